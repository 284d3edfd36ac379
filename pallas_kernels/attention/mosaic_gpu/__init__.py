"""`attention` on Hopper GPUs."""

from pallas_kernels.attention.mosaic_gpu.passes import form, refusal

__all__ = ['form', 'refusal']
