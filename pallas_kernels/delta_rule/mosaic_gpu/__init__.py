"""`delta_rule` on Hopper GPUs."""

from pallas_kernels.delta_rule.mosaic_gpu.passes import form, refusal, tiled_by, with_erase

__all__ = ['form', 'refusal', 'tiled_by', 'with_erase']
