"""`attention` on TPUs."""

from pallas_kernels.attention.mosaic_tpu.passes import form, refusal

__all__ = ['form', 'refusal']
