"""`delta_rule` on Hopper GPUs."""

from pallas_kernels.delta_rule.mosaic_gpu.passes import form, refusal, tiled_by

__all__ = ['form', 'refusal', 'tiled_by']
