"""Chooses the implementation of a core for a call, and records the choice."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pallas_kernels import counting, tuning
from pallas_kernels.cost import CallCost
from pallas_kernels.ledger import Ledger
from pallas_kernels.target import Target

PREFERENCE = ('mosaic_gpu', 'mosaic_tpu', 'xla', 'reference')
"""The implementations that can be chosen, in order of preference."""

PLATFORM = {'mosaic_gpu': 'gpu', 'mosaic_tpu': 'tpu'}
"""The only platform that has an implementation; those not listed run anywhere."""

LIBRARIES = {'cudnn': 'gpu'}
"""Third-party kernels, with their only platform; they run only when named."""

ALTERNATIVES = ('two_pass',)
"""Portable forms that are slower where they were measured; they run only when named."""

UNCHOSEN = 'it serves if it is named: its gradients may differ from run to run'
"""The recorded reason for not choosing a third-party kernel."""


class Unserved(NotImplementedError):
    """No form of a core serves a call, or not the one that is named."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation of a core, a function or its passes, and why it cannot serve the call (`None`: it can).

    `tiles` says what chose its tiles, see `Entry`.
    """

    function: Any
    refusal: str | None = None
    tiles: str = tuning.HEURISTIC


class Entry(NamedTuple):
    """An entry of the ledger: which implementation served a call of `core`, and why the preferred ones did not.

    `cost` is that of one call; repetition by surrounding loops and maps is not counted. `tiles` is 'table' where the
    sizes of tiles are from the table of the device, see `tuning`, and 'heuristic' where rules chose them.
    """

    core: str
    implementation: str
    refused: tuple[tuple[str, str], ...]
    cost: CallCost
    tiles: str = tuning.HEURISTIC


def kernel(
    core: str, implementation: str, here: Target, *call: Any, made_by: str = 'form', fixed: tuple[Any, ...] = ()
) -> Candidate:
    """Returns the form of `core` that one platform has, the module of which is imported on that platform only.

    The module has `form(here, *fixed)`, the function, or another function in its place (`made_by`), and
    `refusal(here, *call)`, the reason why it cannot serve or `None`; where its tiles may be from a table it also has
    `tiled_by(here, *call)`, which says whether they are. `fixed` is what of a call no array says.
    """
    if here.platform != {**PLATFORM, **LIBRARIES}[implementation]:
        return Candidate(_missing, f'the platform is {here.platform}')
    module = importlib.import_module(f'pallas_kernels.{core}.{implementation}')
    refusal = module.refusal(here, *call)
    tiled_by = getattr(module, 'tiled_by', None)
    tiles = tuning.HEURISTIC if tiled_by is None or refusal is not None else tiled_by(here, *call)
    return Candidate(getattr(module, made_by)(here, *fixed), refusal, tiles)


def _missing(*_: Any) -> Any:
    raise AssertionError('a kernel that refused was called')


_ENTRIES = Ledger[Entry]('entries')


def ledger() -> contextlib.AbstractContextManager[list[Entry]]:
    """Collects an `Entry` for every call of a core traced inside the `with` block, in this thread.

    A function that was compiled before is not traced again, and adds no entry.
    """
    return _ENTRIES.collecting()


def select(
    core: str, implementation: str | None, candidates: Mapping[str, Candidate], cost: Callable[..., CallCost]
) -> Any:
    """Returns the named implementation of `core` or, with `None`, the first of `PREFERENCE` that supports the call.

    Inside `counting.counting` it is a stand-in for the definition with the cost of that implementation.

    Args:
      core: name of the core, for the ledger and for errors.
      implementation: one of `PREFERENCE`, `LIBRARIES` or `ALTERNATIVES`, or `None`.
      candidates: the implementations that exist for this core.
      cost: of the call, a function of `implementation=`.

    Raises:
      ValueError: `implementation` is an unknown name.
      Unserved: the named implementation cannot serve this call, or none can; the message says why.
    """
    names = (*PREFERENCE, *LIBRARIES, *ALTERNATIVES)
    if implementation is not None and implementation not in names:
        raise ValueError(f'{core}: implementation is {implementation!r}; expected None or one of {names}')
    if implementation is not None:
        reason = _refusal(core, implementation, candidates)
        if reason is not None:
            raise Unserved(
                f'{core}: implementation {implementation!r} cannot serve: {reason}; None takes the first form that can'
            )
        chosen = candidates[implementation]
        return _record(Entry(core, implementation, (), cost(implementation=implementation), chosen.tiles), candidates)

    libraries = [name for name in LIBRARIES if _refusal(core, name, candidates) is None]
    refused = [(name, UNCHOSEN) for name in libraries]
    for name in PREFERENCE:
        reason = _refusal(core, name, candidates)
        if reason is None:
            entry = Entry(core, name, tuple(refused), cost(implementation=name), candidates[name].tiles)
            return _record(entry, candidates)
        refused.append((name, reason))
    listing = '; '.join(f'{name}: {reason}' for name, reason in refused)
    raise Unserved(f'{core}: no implementation can serve: {listing}')


def _refusal(core: str, name: str, candidates: Mapping[str, Candidate]) -> str | None:
    if name not in candidates:
        return f'this version has no {name} form of {core}'
    return candidates[name].refusal


def _record(entry: Entry, candidates: Mapping[str, Candidate]) -> Any:
    if counting.is_counting() and 'reference' not in candidates:
        raise Unserved(f'{entry.core}: a call without a reference form is not counted; expected a call of the whole')
    _ENTRIES.record(entry)
    if counting.is_counting():
        return counting.stand_in(entry.core, entry.cost, candidates['reference'].function)
    return candidates[entry.implementation].function
