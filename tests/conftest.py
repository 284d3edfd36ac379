"""Strict mode: what would pass unnoticed in a run is an error here, and shapes are checked against the annotations.

Warnings are errors too: see `filterwarnings` in setup.cfg. Processes that tests start inherit what is set by variables.
"""

import os
import pathlib

import jax
import jaxtyping
import pytest

# So many threads XLA has on a CPU; it reads this when it is first asked for one. A warpgroup that waits for another in
# the interpreter of GPU kernels occupies one, and with as few as there are cores the other may never have its turn.
os.environ.setdefault('NPROC', '8')

# Nearly all the time of the tests goes into compiling, and a third of that into optimising machine code. What is
# compared with a reference by `Comparison` in tests/kernels is optimised nevertheless.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
jax.config.update('jax_disable_most_optimizations', os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] == '1')

# Before anything imports attnlab, so that every annotated function of it is checked.
jaxtyping.install_import_hook('attnlab', 'beartype.beartype')

jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(scope='session')
def compiled(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the processes that tests start keep compiled programs: one folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'compiled'
    folder.mkdir(exist_ok=True)
    return folder
