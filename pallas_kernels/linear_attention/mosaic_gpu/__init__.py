"""`linear_attention` on Hopper GPUs."""

from pallas_kernels.linear_attention.mosaic_gpu.passes import form
from pallas_kernels.matrix_state.mosaic_gpu.refusal import refusal

__all__ = ['form', 'refusal']
