"""Commands that documents show are run, shortened by flags and overrides, on runs and studies of this test's own.

A line that a document gains is run too, without anything to be written here. `LEFT` says what is not run, why, and what
runs it instead. `test_commands_in_documents.py` reads every line as it stands.
"""

import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from attnlab import cli
from tests.bad_inputs.conftest import originals
from tests.test_commands_in_documents import ELSEWHERE, PLACEHOLDERS, lines, own_mixer, program

ROOT = pathlib.Path(__file__).parents[1]
TEXT = 'one and two and three and four and five\n'
__all__ = ['originals']

BASE = ('steps=4', 'batch_size=2', 'checkpoint.every=4', 'report.every=1', 'report.tensorboard=False')
LENGTHS = {
    'language': ('length=32', 'evals[0].tokens=64'),
    'activations': ('length=32', 'evals[0].tokens=64'),
    'recall': ('evals[0].examples=2', 'evals[0].multiples=(1,)'),
    'long_range': ('evals[0].examples=2',),
    'grokking': ('evals[0].examples=2',),
    'images': ('evals[0].examples=2',),
    'series': ('evals[0].examples=2', 'evals[1].examples=2'),
    'separation': ('evals[0].examples=2', 'evals[1].examples=2', 'length=256'),
    'dynamics': ('evals[0].examples=2', 'task.data.rows=5000'),
}
"""What shortens a run of a config, besides `BASE`."""

SWEEPS = {
    'language': ('base.evals[0].cadence.n=2', 'base.model.stack.depth=1', 'trials=2', 'pruner.first=2'),
    'images': ('base.evals[1].cadence.n=2',),
    'series': ('base.evals[1].cadence.n=2',),
}
"""What shortens a sweep of a config, besides; of a config that is not here, as of `language`."""

SHORTER = {
    'eval': ('--multiples=1', '--tokens=64', '--compilation_cache='),
    'generate': ('--tokens=4', '--compilation_cache='),
    'compare': (),
    'show': (),
    'quantize': ('--compilation_cache=',),
    'analyse': ('--rows=2', '--bits=8', '--compilation_cache='),
    'match': ('--recipes=mha', '--compilation_cache='),
    'uncertainty': ('--rows=24', '--fitted_rows=2', '--compilation_cache='),
    'report': ('--nomeasure',),
    'experiment': ('--report',),
    'sweep status': (),
}
"""What is added to a command, in the place of a flag of the same name; `train` and `sweep` follow from the config."""

LEFT = {
    r'attnlab eval .*--attention': 'needs a run with a softmax; tests/convert/test_substitution.py',
    r'attnlab eval .*--judge': 'needs runs of images; tests/analysis/test_judged.py',
    r'attnlab analyse .*--between': 'needs two runs; tests/analysis/test_between.py',
    r'attnlab analyse .*--knockout': 'needs runs of attention and of Mamba; tests/analysis/test_asked.py',
    r'attnlab edit ': 'needs runs of facts, and of several layers; tests/analysis/test_edited.py',
    r'attnlab eval .*--factors': 'needs a run of embedding-free attention; tests/analysis/test_reductions.py',
    r'attnlab quantize .*--softmax': 'needs a run with a softmax; tests/quantize/test_softmax.py',
    r'attnlab train .*learngene=runs/': 'begins with another run; tests/convert/test_learngene.py',
    r'attnlab train .*data=mnist': 'needs a download; tests/test_configs.py builds it',
    r'make install': 'makes the environment that runs this',
    r'attnlab train .*,run=runs/': 'begins with another run; tests/quantize/test_training.py',
    r'attnlab quantize --workdir=runs/gla-learned4': 'needs a run of few bits; tests/quantize/test_training.py',
    r'attnlab uncertainty .*(digits|-large|-seed)': 'needs other runs; tests/commands/test_uncertainty.py',
    r'attnlab eval --workdir=runs/mqar-gla': 'needs a run of another task; tests/evals/test_by_slice.py',
    r'attnlab train .*--topology=': 'compiles for minutes; tests/runs/test_plan.py plans for a smaller model',
    r'attnlab train .*task=listops,.*size=full': 'needs prepared data; tests/test_configs.py builds it',
    r'attnlab train .*task=imdb': 'needs a download; tests/test_configs.py builds it',
    r'attnlab train .*data=etth1': 'needs a download; tests/data/series/test_files.py reads such a file',
    r'attnlab data prepare': 'takes minutes; tests/data/long_range/test_prepare.py',
    r'attnlab sweep .*--launcher=submitit': 'needs SLURM; tests/sweep/test_slurm.py',
    r'attnlab sweep .*--storage=postgresql': 'needs PostgreSQL; tests/sweep/test_postgresql.py',
    r'attnlab sweep .*size=paper': 'needs an accelerator; tests/test_configs.py builds it',
    r'make experiment .*SIZE=full': 'needs an accelerator and hours; tests/test_configs.py builds its runs',
    r'make (quickstart|bench-kernels|bench)\b': 'the commands of its rule are among these, or shortened below',
    r'make (test|test-all|lint|format)\b': 'checks the code; it is what runs this',
    r'scripts/cluster/': 'needs a cluster; tests/sweep/test_cluster.py',
    r'python scripts/gpu_session.py': 'needs a GPU; tests/scripts/test_gpu_session.py rehearses all of it',
    r'python scripts/bench_start.py': 'times starts for minutes; tests/test_commands_in_documents.py reads its flags',
    r'python -m pallas_kernels.bench( |$)': 'times for minutes; tests/kernels/test_bench.py has all of it with --small',
    r'python scripts/pathfinder_statistics.py .*FOLDER': 'needs the released images; the other line runs without them',
    r'python scripts/bench_rows.py': 'times for tens of minutes; tests/scripts/test_bench_rows.py',
    r'python scripts/bench_decode.py': 'times for minutes; tests/scripts/test_bench_decode.py',
    r'python scripts/bench_steps.py': 'times for minutes; tests/scripts/test_bench_steps.py',
    r'python scripts/gaussian_grids.py': 'takes minutes; tests/quantize/test_formats.py reads what it made',
    r'python tests/kernels/compile_tpu.py': 'needs libtpu; tests/kernels/test_tpu.py',
}
"""Commands that are not run here, by a pattern, with the reason and what runs them."""

SCRIPTS = {
    'bench_step.py': ('--rounds=2', '--burst=1', '--peer_python='),
    'bench_input.py': (),
    'pathfinder_statistics.py': (),
}
"""Flags that make a script short; one without a value leaves that flag out."""

OTHERS = ('--inside', '--head', '--neighbours', '--trace', '--knockout', '--propagate', '--massive', '--influence')
"""Flags of `analyse` that ask for something else than layers, which `--bits` is of."""

FAST = ('eval', 'generate', 'compare', 'show')
"""Commands of which the first is run every time."""


def plain(line: str) -> str:
    """A line as `LEFT` has it: without a folder of programs, and without its comment."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    return shlex.join(words).removeprefix('.venv/bin/').replace('python3 ', 'python ').replace("'", '')


def is_left(line: str) -> bool:
    """Whether a line is run elsewhere, or nowhere."""
    return program(line) in ELSEWHERE or any(re.match(pattern, plain(line)) for pattern in LEFT)


def command_of(words: list[str]) -> str:
    """The name of a command of attnlab, with its subcommand."""
    return ' '.join(itertools.takewhile(lambda word: not word.startswith('-'), words[: 1 + (words[0] == 'sweep')]))


def parts(line: str) -> Iterator[list[str]]:
    """The words of the commands of a line: what `make` would run, and both sides of `&&`, without redirections."""
    if program(line) == 'make':
        words = list(itertools.takewhile(lambda word: word != '&&', shlex.split(line, comments=True)))
        done = subprocess.run(['make', '-n', *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
        for made in done.stdout.splitlines():
            if made.strip() and program(made) == 'attnlab':
                yield from parts(made)
        return
    yield list(itertools.takewhile(lambda word: word not in '|>&&', shlex.split(line, comments=True)))


def commands() -> list:
    """The lines of documents that are run; the first of some commands is not slow."""
    found, seen = [], set()
    for file, line in lines():
        if is_left(line):
            continue
        name = program(line)
        command = command_of(shlex.split(line, comments=True)[1:]) if name == 'attnlab' else name
        fast = command in FAST and command not in seen
        seen.add(command)
        found.append(pytest.param(line, id=f'{file}: {plain(line)}', marks=[] if fast else [pytest.mark.slow]))
    return found


def shortened(words: list[str]) -> list[str]:
    """A command of attnlab with flags that make it short, its globs expanded."""
    command = command_of(words)
    added = list(SHORTER[command]) if command in SHORTER else overrides(words)
    if command == 'experiment' and '--dry_run' in words:
        added.remove('--report')
    if command == 'analyse' and any(word.startswith(OTHERS) for word in words):
        added.remove('--bits=8')  # Of the analysis of layers.
    if command == 'analyse' and any(word.startswith('--prompt') for word in words):
        added.remove('--rows=2')  # Of the data.
    if any(word.startswith('--budget') for word in words):
        added.append('--budget=8')  # Scales weigh more in layers of few numbers.
    names = {flag.partition('=')[0] for flag in added}
    kept = [with_text(word) for word in words if word.partition('=')[0] not in names]
    globbed = [
        sorted(map(str, pathlib.Path().glob(word))) if '*' in word and '=' not in word else [word] for word in kept
    ]
    return [word for found in globbed for word in found] + added


def overrides(words: list[str]) -> list[str]:
    """What shortens a run or a sweep: a few steps of a few short rows."""
    (config,) = (word.partition('=')[2] for word in words if word.startswith('--config='))
    stem = pathlib.Path(config.partition(':')[0]).stem
    sweep = words[0] == 'sweep'
    short = [f'--config.{"base." if sweep else ""}{item}' for item in (*BASE, *LENGTHS[stem])]
    if '--dry_run' in words and not sweep:
        short.append('--config.model.stack.depth=3')
    if sweep:
        short += ['--config.confirm=0', *(f'--config.{item}' for item in SWEEPS.get(stem, SWEEPS['language']))]
    return [*short, '--compilation_cache=']


def with_text(word: str) -> str:
    """A flag that names a config of texts, with a text of a test in the place of what it would read."""
    if (
        not re.match(r'--config=(sweeps/|configs/|configs/sweeps/)?(language|activations)(\.py)?(:|$)', word)
        or 'base=' in word
    ):
        return word
    name, _, arg = word.partition(':')
    asked = [item for item in arg.split(',') if item and not item.startswith('data=')]
    return f'{name}:{",".join([*asked, "data=path/to/texts"])}'


def place(words: list[str], originals: pathlib.Path, folder: pathlib.Path, finished: pathlib.Path | None) -> None:
    """Puts copies of a run and of a study wherever a command names one that is there already."""
    for word in words[1:]:
        named = re.fullmatch(r'(?:--workdir=)?(runs/[\w-]+)(\*?)', word)
        if named and words[0] not in ('train', 'sweep'):
            for end in ('one', 'two') if named[2] else ('',):
                shutil.copytree(originals / 'run', folder / f'{named[1]}{end}')
        named = re.fullmatch(r'(?:--study=)?(studies/[\w-]+)', word)
        if named and finished is not None:
            shutil.copytree(finished, folder / named[1], symlinks=True)


@pytest.fixture
def folder(own_process, tmp_path, monkeypatch):
    """The folder in which commands are run: what the documents name is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    shutil.copytree(ROOT / 'experiments', tmp_path / 'experiments')
    (tmp_path / 'my_mixers.py').write_text(own_mixer())
    (tmp_path / 'expression.lark').write_text('start: /[a-z0-9]/ ("+" start)?')
    (tmp_path / 'matched').mkdir()
    for name in ('gla', 'mha'):
        shutil.copy(ROOT / 'configs' / 'language.py', tmp_path / 'matched' / f'{name}.py')
    (tmp_path / 'path' / 'to' / 'texts').mkdir(parents=True)
    for name in 'ab':
        (tmp_path / 'path' / 'to' / 'texts' / f'{name}.txt').write_text(TEXT * 200)
    return tmp_path


@pytest.fixture(scope='session')
def studies(tmp_path_factory):
    """Makes a finished study, once, when it is first asked for."""
    made = []

    def study() -> pathlib.Path:
        if not made:
            root = tmp_path_factory.mktemp('studies')
            text = root / 'text.txt'
            text.write_text(TEXT * 200)
            words = shlex.split(f'sweep --config=sweeps/language:zoo=mingru,data={text} --study={root}/study')
            assert cli.main([*words, *overrides(words)]) == 0
            made.append(root / 'study')
        return made[0]

    return study


@pytest.mark.parametrize('line', commands())
def test_a_command_of_a_document_runs(line, originals, studies, folder, capsys):
    ran = 0
    for words in parts(line):
        if program(words[0]) == 'attnlab':
            asked = [PLACEHOLDERS.get(word, word) for word in words[1:]]
            if asked[0] == 'experiment' and not (folder / 'experiments' / asked[1] / 'results' / 'cpu.json').exists():
                pytest.skip('its plan is newer than its results')
            needs = command_of(asked) in ('sweep status', 'report')
            place(asked, originals, folder, studies() if needs else None)
            assert cli.main(shortened(asked)) == 0, capsys.readouterr().err
        else:
            run_script(words[1:])
        ran += 1
    assert ran


def run_script(words: list[str]) -> None:
    """Runs a script of the clone, with the flags of `SCRIPTS`."""
    script = ROOT / words[0]
    names = {flag.partition('=')[0] for flag in SCRIPTS[script.name]}
    kept = [word for word in words[1:] if word.partition('=')[0] not in names]
    flags = [*kept, *(flag for flag in SCRIPTS[script.name] if not flag.endswith('='))]
    done = subprocess.run([sys.executable, script, *flags], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_benchmark_of_a_step_runs(tmp_path):
    """The command of `make bench`."""
    made = (ROOT / 'Makefile').read_text()
    assert '\t$(BIN)/python scripts/bench_step.py $(ARGS)\n' in made
    run_script(['scripts/bench_step.py', f'--out={tmp_path / "step.json"}'])
    assert (tmp_path / 'step.json').stat().st_size


def test_what_is_left_is_there_and_names_tests_that_are():
    every = [plain(line) for _, line in lines() if program(line) not in ELSEWHERE]
    for pattern, reason in LEFT.items():
        assert any(re.match(pattern, line) for line in every), pattern
        assert all((ROOT / name).is_file() for name in re.findall(r'tests/[\w/]+\.py', reason)), reason


def test_every_command_that_documents_show_is_run_or_left():
    run = {item.values[0] for item in commands()}
    shown = {line for _, line in lines()}
    assert run | {line for line in shown if is_left(line)} == shown
    known = {command_of(shlex.split(line, comments=True)[1:]) for line in run if program(line) == 'attnlab'}
    assert known == {*SHORTER, 'train', 'sweep'}
