"""`delta_rule` on Hopper GPUs."""

from pallas_kernels.delta_rule.mosaic_gpu.passes import form, refusal, with_erase
from pallas_kernels.matrix_state.mosaic_gpu.sweep import tiled_by

__all__ = ['form', 'refusal', 'tiled_by', 'with_erase']
