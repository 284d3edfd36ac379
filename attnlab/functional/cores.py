"""The cores of sequence mixing, as mixers, heads and losses call them: the one front of attnlab to `pallas_kernels`."""

from pallas_kernels import attention, cross_entropy, delta_rule, linear_attention, linear_scan, selective_scan

__all__ = ['attention', 'cross_entropy', 'delta_rule', 'linear_attention', 'linear_scan', 'selective_scan']
