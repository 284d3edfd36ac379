"""`attention` on Hopper GPUs."""

from pallas_kernels.attention.mosaic_gpu.passes import form, passes, refusal

__all__ = ['form', 'passes', 'refusal']
