"""Replaces the softmax of a trained model by another weight map, without training.

attnlab eval --workdir=RUN --attention=adaptive_temperature
"""

import dataclasses
import functools
import re

from flax import nnx

from attnlab.errors import UserError
from attnlab.models.weight_maps import replaced
from attnlab.nn.temperatures import log_length_scale
from attnlab.quantize.softmax import Correction, QuantizedSoftmax, check_bits
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from pallas_kernels import AdaptiveSoftmax, ScalableSoftmax, WeightMap

NAMES = 'adaptive_temperature, ssmax, quantized_BITS, or quantized_BITS_corrected'


def substituted(loaded: Loaded, name: str, *, rows: int = 32) -> Loaded:
    """Returns the run with another weight map in every attention layer that has a softmax.

    `adaptive_temperature` sharpens rows of high entropy (`pallas_kernels.AdaptiveSoftmax`). `ssmax` multiplies scores
    by `log n` divided by its mean over lengths up to the training length. `quantized_8` rounds weights to 8 bits, and
    `quantized_8_corrected` adds the mean loss of mass, measured on `rows` rows all over training.
    Raises `UserError` for another name, or when no layer has a softmax.
    """
    by = replacement(name, loaded.setup.length)
    result = loaded.altered(functools.partial(replaced, by=by))
    return Correction(by.bits, rows).found(loaded, result) if isinstance(by, Rounding) and by.corrected else result


@checked_fields
@dataclasses.dataclass(frozen=True)
class Rounding:
    """A softmax rounded to `bits` bits; with `corrected` the mean rounding error is added back."""

    bits: int
    corrected: bool

    def __call__(self, *, heads: int, rngs: nnx.Rngs) -> QuantizedSoftmax:
        """Returns the map, with corrections of zero."""
        return QuantizedSoftmax(heads=heads, bits=self.bits, rngs=rngs)


def replacement(name: str, length: int) -> WeightMap | Rounding:
    """Returns the map of a name in `NAMES`, for a run trained on rows of `length`; raises `UserError` for others."""
    if name == 'adaptive_temperature':
        return AdaptiveSoftmax()
    if name == 'ssmax':
        return ScalableSoftmax(log_length_scale(length))
    found = re.fullmatch(r'quantized_(\d+)(_corrected)?', name)
    if found is None:
        raise UserError(f'there is no attention {name!r}; choose from {NAMES}')
    check_bits(int(found[1]))
    return Rounding(bits=int(found[1]), corrected=found[2] is not None)
