"""Precomputed float64 results of the cores: arguments and expectations, a file of arrays for each call."""

import importlib
import os
import pathlib
import urllib.parse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from attnlab.testing import cores
from pallas_kernels.cases import attention as attention_cases
from pallas_kernels.cases.drawing import Call
from scripts.session.cases import Case

FOLDER = 'expected'


def call_of(case: Case) -> Call:
    """The call of a case; a call of attention may name a weight map, as in 'masked, softpick'."""
    module = importlib.import_module(f'pallas_kernels.cases.{case.core}')
    name, _, weights = case.call.partition(', ')
    if case.core == 'attention' and weights:
        return attention_cases.call(name, case.dtype, attention_cases.MAPS[weights])
    return module.call(case.call, case.dtype)


def core_of(case: Case) -> cores.Core:
    """The core of a case."""
    return getattr(pallas_kernels, case.core)


def key(case: Case) -> str:
    """What a case compares with, the same for all implementations."""
    return f'{case.core}/{case.call}/{case.dtype}'


def write(folder: pathlib.Path, cases: list[Case]) -> None:
    """Writes missing expectations; can be interrupted and resumed."""
    (folder / FOLDER).mkdir(exist_ok=True)
    for place, case in enumerate(cases):
        path = path_of(folder, case)
        if path.exists():
            continue
        print(f'{place + 1} of {len(cases)}: {key(case)}', flush=True)
        # Beside it until it is whole.
        arrays: dict[str, Any] = dict(_arrays(case))
        with (part := path.with_suffix('.part')).open('wb') as file:
            np.savez_compressed(file, **arrays)
        os.replace(part, path)
        jax.clear_caches()


def path_of(folder: pathlib.Path, case: Case) -> pathlib.Path:
    """The file of a case."""
    return folder / FOLDER / f'{urllib.parse.quote(key(case), safe=" ,")}.npz'


def _arrays(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    call = call_of(case)
    for name, array in call.arrays.items():
        yield f'argument {name}', _wide(array)
    with jax.enable_x64(True):
        yield from cores.evaluate(core_of(case), cores.double(call), 'reference').items()


def _wide(array: jax.Array) -> np.ndarray:
    """The same numbers in a type that files support."""
    return np.asarray(array if jnp.issubdtype(array.dtype, jnp.complexfloating) else array.astype(jnp.float32))


def read(folder: pathlib.Path, case: Case) -> tuple[Call, cores.Numbers]:
    """The call of a case with its stored arguments, and the expected results.

    Arguments are stored since devices may draw random numbers that differ in the last bit.

    Raises KeyError where it was not prepared.
    """
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
        drawn = call_of(case)
    if not (path := path_of(folder, case)).exists():
        raise KeyError(f'{key(case)} was not prepared')
    with np.load(path, allow_pickle=False) as file:
        filed = {name: file[name] for name in file.files}
    arrays = {name: jnp.asarray(filed[f'argument {name}'], array.dtype) for name, array in drawn.arrays.items()}
    options = jax.tree.map(
        lambda one: jnp.asarray(np.asarray(one)) if isinstance(one, jax.Array) else one, drawn.options
    )
    found = {name: array for name, array in filed.items() if name.startswith(('output', 'gradient'))}
    return Call(arrays, options), found
