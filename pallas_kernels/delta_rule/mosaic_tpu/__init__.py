"""`delta_rule` on TPUs."""

from pallas_kernels.delta_rule.mosaic_tpu.passes import form, with_erase
from pallas_kernels.matrix_state.mosaic_tpu.plan import refusal

__all__ = ['form', 'refusal', 'with_erase']
