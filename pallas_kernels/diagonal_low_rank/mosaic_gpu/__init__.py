"""`diagonal_low_rank` on Hopper GPUs."""

from pallas_kernels.diagonal_low_rank.mosaic_gpu.passes import form
from pallas_kernels.matrix_state.mosaic_gpu.refusal import of_columns as refusal
from pallas_kernels.matrix_state.mosaic_gpu.sweep import tiled_by

__all__ = ['form', 'refusal', 'tiled_by']
