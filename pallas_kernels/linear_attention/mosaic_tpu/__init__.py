"""`linear_attention` on TPUs."""

from pallas_kernels.linear_attention.mosaic_tpu.passes import form, refusal

__all__ = ['form', 'refusal']
