"""`attention` on TPUs."""

from pallas_kernels.attention.mosaic_tpu.passes import form, passes, refusal

__all__ = ['form', 'passes', 'refusal']
