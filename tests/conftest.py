"""Strict mode: what would pass unnoticed in a run is an error here, and shapes are checked against the annotations.

Warnings are errors too: see `filterwarnings` in setup.cfg. Processes that tests start inherit what is set by variables.
"""

import collections
import gc
import itertools
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

import jax
import jaxtyping
import pytest

from tests import durations

# So many threads XLA has on a CPU; it reads this when it is first asked for one. A warpgroup that waits for another in
# the interpreter of GPU kernels occupies one, and with as few as there are cores the other may never have its turn.
os.environ.setdefault('NPROC', '8')

# Nearly all the time of the tests goes into compiling, and a third of that into optimising machine code. What is
# compared with a reference by `Comparison` in tests/kernels is optimised nevertheless.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
jax.config.update('jax_disable_most_optimizations', os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] == '1')

# Of a program that is as it was, the machine code is kept in the environment: two thirds of the time of a first run go
# into making it. What is half written by another worker cannot be read, and is compiled again.
COMPILED = pathlib.Path(sys.prefix, 'compiled')
if (
    'PYTEST_XDIST_WORKER' not in os.environ
    and COMPILED.exists()
    and sum(map(os.path.getsize, COMPILED.iterdir())) > 2e9
):
    shutil.rmtree(COMPILED)
KEPT = {
    'jax_compilation_cache_dir': str(COMPILED),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
}
for name, value in KEPT.items():
    jax.config.update(name, value)

# Before anything imports attnlab, so that every annotated function of it is checked.
jaxtyping.install_import_hook('attnlab', 'beartype.beartype')

jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True)
def commands_leave_settings_as_they_were() -> Iterator[None]:
    """Commands that a test runs in this process say where programs are kept, and which."""
    yield
    for name, value in KEPT.items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    """A process of its own: what is allowed, importable and imported of the test ends with it."""
    from attnlab import trust

    monkeypatch.setattr(trust, '_allowed', set())
    monkeypatch.setattr(sys, 'path', list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, '__file__', None)).startswith(str(tmp_path)):
            del sys.modules[name]


MAPS = pathlib.Path('/proc/self/maps')
MOST_MAPS = 30_000
"""Pieces of memory of a process beyond which it drops its programs; they are read again from where they are kept.

Every program has some dozens. Linux gives a process 65,530, and XLA dies where it gets none for one that it reads or
writes, as it did after some thousand tests of the contract; pytest-xdist then waits for ever for the rest of its group.
"""

since_counted = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if next(since_counted) % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b'\n') > MOST_MAPS:
        jax.clear_caches()


def pytest_collection_finish() -> None:
    """Collects garbage less often: it looked for cycles in all that was imported and traced for a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope='session')
def compiled(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the processes that tests start keep compiled programs: one folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'compiled'
    folder.mkdir(exist_ok=True)
    return folder


CASES = {
    'compile/test_programs.py::test_steps_are_lowered_for_gpus': 2,
    'functional/test_cores.py::test_time_over_two_devices_agrees_with_one': 10,
    'functional/test_cores.py::test_two_devices_agree_with_one': 9,
    'kernels/test_attention.py::test_hidden_keys_weigh_nothing': 6,
    'kernels/test_linear_attention.py::test_kernels_are_the_reference': 4,
    'kernels/test_linear_scan.py::test_gradients_of_the_reference_are_differences': 3,
    'kernels/test_linear_scan.py::test_xla_is_the_reference': 8,
    'kernels/test_long_conv.py::test_xla_is_the_reference': 4,
    'kernels/test_softmax.py::test_forms_are_the_reference': 8,
    'kernels/test_softmax_topk.py::test_forms_are_the_reference': 7,
    'kernels/test_transformations.py::test_kernels_lower_inside_all_of_them': 8,
    'kernels/test_transformations.py::test_remat_inside_scan': 5,
    'kernels/test_transformations.py::test_shard_map': 5,
    'kernels/test_transformations.py::test_vmap': 5,
    'nn/test_systems.py::test_convolution_and_recurrence_are_the_dense_system': 3,
    'test_configs.py::test_recall_on_every_task': 10,
    'train/test_partition.py::test_on_eight_devices': 2,
}
"""Of these tests so many cases are run every time, the others nightly: they differ in sizes, types or a part that has
tests of its own, and each takes a second or more to compile."""


LONG = 0.6
"""Seconds from which on a test, or a fixture of its module, is left to the night."""

EVERY_TIME = (
    'analysis/test_first_values.py::test_what_is_seen_after_the_last_layer_is_what_the_model_has',
    'bad_inputs/test_strangers.py::test_nothing_unpickles_unpacks_or_runs_text',
    'compile/test_programs.py::test_steps_are_lowered_for_gpus',
    'compile/test_training.py::test_calls_on_two_gpus_are_of_half_the_rows',
    'compile/test_training.py::test_steps_keep_their_kernels_on_four_tpus[rows and parameters]',
    'kernels/test_attention_tpu.py::test_interpreted_is_the_reference',
    'kernels/test_delta_rule_gpu.py::test_interpreted_is_the_reference',
    'kernels/test_long_conv.py::test_the_kernel_for_tpus_is_the_reference[blocks, packed-float32]',
    'kernels/test_tpu.py::test_a_kernel_compiles',
    'kernels/test_transformations.py::test_shard_map',
    'mixers/linear/test_rwkv7.py::test_values_of_the_first_layer_are_mixed_into_those_above_as_in_the_paper',
    'sweep/test_study.py',
    'test_architecture.py',
    'test_cli.py',
    'test_configs.py::test_two_steps',
    'test_docs.py',
    'test_readme.py',
    'train/test_checkpoint.py',
    'train/test_mesh.py::test_rows_over_two_devices_stay_where_they_are',
    'train/test_mesh.py::test_two_devices_agree_with_one',
    'train/test_processes.py',
    'train/test_resume.py',
)
"""What is run every time however long it takes: commands and pages as users read them, the rules of the house, and the
one test of its kind."""


def _night(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests that took long by tests/durations.txt, or whose fixtures did that only tests of their module share."""
    here = pathlib.Path(__file__).parent
    found = durations.read(durations.FILE.read_text().splitlines())

    def shared(item: pytest.Item) -> set[tuple[str, str]]:
        defined = getattr(item, '_fixtureinfo').name2fixturedefs  # noqa: B009
        last = {name: each[-1] for name, each in defined.items()}
        return {(one.baseid, name) for name, one in last.items() if one.scope == 'module' and one.baseid in item.nodeid}

    dear = [item for item in items if found.get((item.nodeid, 'setup'), 0) >= LONG]
    fixtures = set().union(*map(shared, dear))
    for item in items:
        always = any(item.nodeid.startswith(f'{here.name}/{name}') for name in EVERY_TIME)
        if not always and (found.get((item.nodeid, 'call'), 0) >= LONG or item in dear or shared(item) & fixtures):
            yield item


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that are run nightly."""
    seen: collections.Counter[str] = collections.Counter()
    here = pathlib.Path(__file__).parent
    for item in items:
        name = f'{item.path.relative_to(here)}::{getattr(item, "originalname", None)}'
        if name in CASES and 'slow' not in item.keywords:
            seen[name] += 1
            if seen[name] > CASES[name]:
                item.add_marker(pytest.mark.slow)
    for item in _night(items):
        item.add_marker(pytest.mark.slow)
