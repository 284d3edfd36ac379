"""Precomputed float64 results of the cores: arguments and expectations in one file of arrays."""

import importlib
import pathlib
import zipfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from attnlab.testing import cores
from pallas_kernels.cases import attention as attention_cases
from pallas_kernels.cases.drawing import Call
from scripts.session.cases import Case

FILE = 'expected.npz'


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
    """The prefix of the arrays of a case, the same for all implementations."""
    return f'{case.core}/{case.call}/{case.dtype}'


def write(folder: pathlib.Path, cases: list[Case]) -> None:
    """Adds missing expectations to the file; can be interrupted and resumed."""
    path = folder / FILE
    there = set(zipfile.ZipFile(path).namelist()) if path.exists() else set()
    for place, case in enumerate(cases):
        if f'{key(case)}/complete.npy' in there:
            continue
        print(f'{place + 1} of {len(cases)}: {key(case)}', flush=True)
        arrays = [*_arrays(case), ('complete', np.array(True))]
        with zipfile.ZipFile(path, 'a', zipfile.ZIP_DEFLATED) as file:
            for name, array in arrays:
                member = f'{key(case)}/{name}.npy'
                if member not in there:
                    with file.open(member, 'w') as out:
                        np.lib.format.write_array(out, array)
        there.add(f'{key(case)}/complete.npy')
        jax.clear_caches()


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
    with np.load(folder / FILE) as file:
        names = [name for name in file.files if name.startswith(f'{key(case)}/')]
        if f'{key(case)}/complete' not in names:
            raise KeyError(f'{key(case)} was not prepared')
        filed = {name.removeprefix(f'{key(case)}/'): file[name] for name in names}
    arrays = {name: jnp.asarray(filed[f'argument {name}'], array.dtype) for name, array in drawn.arrays.items()}
    options = jax.tree.map(
        lambda one: jnp.asarray(np.asarray(one)) if isinstance(one, jax.Array) else one, drawn.options
    )
    found = {name: array for name, array in filed.items() if name.startswith(('output', 'gradient'))}
    return Call(arrays, options), found
