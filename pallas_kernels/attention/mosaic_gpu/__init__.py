"""`attention` on Hopper GPUs."""

from pallas_kernels.attention.mosaic_gpu.passes import form, in_passes, refusal, tiled_by

__all__ = ['form', 'in_passes', 'refusal', 'tiled_by']
