"""`linear_attention` on TPUs."""

from pallas_kernels.linear_attention.mosaic_tpu.passes import form
from pallas_kernels.matrix_state.mosaic_tpu.plan import refusal

__all__ = ['form', 'refusal']
