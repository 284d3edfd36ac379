"""`diagonal_low_rank` on TPUs."""

from pallas_kernels.diagonal_low_rank.mosaic_tpu.passes import form
from pallas_kernels.matrix_state.mosaic_tpu.plan import refusal

__all__ = ['form', 'refusal']
