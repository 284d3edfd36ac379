"""Checks of the contract of mixers, to be run on your own.

    def make(dim, *, rngs, causal=True):
        return MyMixer(dim, heads=4, causal=causal, rngs=rngs)

    check_mixer(make, causal=True, bidirectional=False, streaming=True, packed=True)

Each property has its own function, which takes a `Subject`: a small mixer made by `make` with its compiled programs,
which all checks share. It raises AssertionError with the name of the property and what was found.
"""

from collections.abc import Callable

from attnlab.errors import UserError
from attnlab.testing.contract.bidirectional import check_bidirectional, check_two_sided, is_mirrored
from attnlab.testing.contract.compilation import check_compiles_once, check_streaming_compiles_once
from attnlab.testing.contract.documents import check_long_packed, check_packing, check_padding
from attnlab.testing.contract.donation import check_donation
from attnlab.testing.contract.gradients import check_float64, check_gradients, check_zeros, compare_with_differences
from attnlab.testing.contract.grids import check_grids, check_sparse, on_grid
from attnlab.testing.contract.implementations import check_implementations
from attnlab.testing.contract.lookahead import check_no_lookahead
from attnlab.testing.contract.narrow import check_bfloat16, check_bfloat16_gradients, check_bfloat16_sums
from attnlab.testing.contract.rows import check_rows_apart
from attnlab.testing.contract.shapes import check_shape_and_type
from attnlab.testing.contract.streaming import (
    check_decoding,
    check_long_pieces,
    check_long_prompt,
    check_state,
    check_streaming,
    check_streaming_bfloat16,
    check_streaming_gradients,
    check_streaming_packed,
)
from attnlab.testing.contract.subject import Make, Subject, cast_parameters, check_each, context
from attnlab.testing.contract.variables import check_buffers, check_parameters

__all__ = [
    'Check',
    'Make',
    'Subject',
    'cast_parameters',
    'check_implementations',
    'check_mixer',
    'claimed',
    'compare_with_differences',
    'context',
    'is_mirrored',
    'on_grid',
]

Check = Callable[[Subject], None]


def check_mixer(
    make: Make,
    *,
    causal: bool,
    bidirectional: bool,
    streaming: bool,
    packed: bool,
    grid: bool = False,
    sparse: bool = False,
    surrogate: Make | None = None,
    dim: int = 32,
    say: Callable[[str], None] = print,
) -> None:
    """Checks every property that is claimed, and those that no mixer may lack; says of each whether it holds.

    Args:
      make: makes the mixer, as `make(dim, rngs=rngs)`, and its bidirectional form with `causal=False`; what is
        bidirectional alone is made so without being asked.
      causal, bidirectional, streaming, packed, grid, sparse: what is claimed; see the attributes of `Recipe`.
      surrogate: makes, as `make` does, the mixer whose gradients are compared with finite differences, where `make`
        makes one that rounds, with the gradient of another function straight through.
      dim: the width of the mixer that is checked.
      say: is given a line for every property.

    Raises AssertionError for the first property that does not hold: its name, and what was found. Raises `UserError`
    for `sparse` without `grid`.
    """
    claims = {'causal': causal, 'bidirectional': bidirectional, 'streaming': streaming, 'packed': packed, 'grid': grid}
    claims |= {'sparse': sparse} if grid or sparse else {}
    checks = claimed(**claims)
    smooth = on_grid(surrogate) if grid and surrogate is not None else surrogate
    subject = Subject(on_grid(make) if grid else make, dim, causal=causal or not bidirectional, surrogate=smooth)
    if bidirectional:
        checks = {'two-sided': check_two_sided} | checks
    check_each(subject, checks, say)
    left = [name for name, claim in claims.items() if not claim]
    say(f'{len(checks)} properties hold' + (f'; not claimed, so not checked: {", ".join(left)}' if left else ''))


def claimed(
    *, causal: bool, bidirectional: bool, streaming: bool, packed: bool, grid: bool = False, sparse: bool = False
) -> dict[str, Check]:
    """Returns the checks, by name, that a mixer with these claims must pass; see the attributes of `Recipe`.

    With `grid` they are those of a mixer made by `on_grid`; which tokens see each other then depends on the grid.
    Raises `UserError` for `sparse` without it.
    """
    if sparse and not grid:
        raise UserError('sparse is a claim about grids; give grid=True')
    checks: dict[str, Check] = {
        'parameters': check_parameters,
        'buffers': check_buffers,
        'shape and type': check_shape_and_type,
        **({'state': check_state} if streaming else {}),
        'gradients': check_gradients,
        'zeros': check_zeros,
        'rows apart': check_rows_apart,
        'bfloat16': check_bfloat16,
        'bfloat16 gradients': check_bfloat16_gradients,
        'bfloat16 sums': check_bfloat16_sums,
        'float64': check_float64,
        'compiles once': check_compiles_once,
    }
    if causal:
        checks['no look-ahead'] = check_no_lookahead
    if streaming:
        checks['donation'] = check_donation
        checks['decoding'] = check_decoding
        checks['streaming'] = check_streaming
        checks['streaming bfloat16'] = check_streaming_bfloat16
        checks['long prompt'] = check_long_prompt
        checks['long pieces'] = check_long_pieces
        checks['streaming gradients'] = check_streaming_gradients
        checks['streaming compiles once'] = check_streaming_compiles_once
    if packed:
        checks['packing'] = lambda subject: check_packing(subject, causal=causal)
        checks['padding'] = lambda subject: check_padding(subject, causal=causal)
        if not grid:
            checks['long packed'] = lambda subject: check_long_packed(subject, causal=causal)
    if packed and streaming:
        checks['streaming packed'] = check_streaming_packed
    if grid:
        checks['grids'] = check_grids
        if sparse:
            checks['sparse'] = check_sparse
        if bidirectional:
            # Which tokens see each other depends on the grid, so that neighbours are not asked.
            checks['two-sided'] = check_two_sided
    elif bidirectional:
        checks['bidirectional'] = lambda subject: check_bidirectional(subject, packed=packed)
    return checks
