"""`attention` on TPUs."""

from pallas_kernels.attention.mosaic_tpu.passes import form, in_passes, refusal

__all__ = ['form', 'in_passes', 'refusal']
