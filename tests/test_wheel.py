"""What `pip install` of the wheel gives, in an environment and a folder that know nothing of the clone."""

import configparser
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ('attnlab', 'pallas_kernels', 'configs', 'setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE')
SMALL = ('length=32', 'batch_size=2', 'model.dim=16', 'model.stack.depth=1', 'model.stack.blocks[0].mixer.heads=2')


def call(*command: object, cwd: pathlib.Path) -> str:
    """What a command prints, run as in a shell of its own."""
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f'{command}: {done.stdout}{done.stderr}'
    return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy, for building leaves folders behind, of which the next wheel would take what is outdated."""
    folder = tmp_path_factory.mktemp('wheel')
    (folder / 'clone').mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / 'clone' / name, **({'symlinks': True} if copy is shutil.copytree else {}))
    options = ('--no-deps', '--no-build-isolation', '--disable-pip-version-check', '-qq')
    call(sys.executable, '-m', 'pip', 'wheel', *options, '-w', folder, folder / 'clone', cwd=folder)
    (built,) = folder.glob('*.whl')
    return built


def test_the_wheel_holds_both_packages_the_configs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if '.dist-info/' not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for package in ('attnlab', 'pallas_kernels')
        for path in ROOT.glob(f'{package}/**/*.py')
    }
    configs = {f'attnlab/{path.relative_to(ROOT)}' for path in ROOT.glob('configs/**/*.py')}
    assert len(configs) >= 5
    data = {'attnlab/py.typed', 'pallas_kernels/py.typed', 'attnlab/quantize/gaussian_grids.npz'}
    tables = {str(path.relative_to(ROOT)) for path in ROOT.glob('pallas_kernels/tuned/*.json')}
    assert held == wanted | configs | data | tables


def test_a_clone_is_found_beside_its_own_folder():
    """Its folder is called attnlab as the package is, and Python would take it for a package without `__init__`.

    setuptools puts the clone on the path, where the package goes first, if the sources are said to be at its root; it
    installs a finder, which comes too late, otherwise.
    """
    config = configparser.ConfigParser()
    config.read(ROOT / 'setup.cfg')
    assert config['options']['package_dir'].strip() == '= .'


@pytest.mark.slow
def test_an_installed_wheel_trains_goes_on_and_evaluates(wheel, tmp_path):
    call(sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'venv', cwd=tmp_path)
    bin = tmp_path / 'venv' / 'bin'
    options = ('--no-deps', '--no-index', '--disable-pip-version-check', '-qq')
    call(sys.executable, '-m', 'pip', f'--python={bin / "python"}', 'install', *options, wheel, cwd=tmp_path)
    # The libraries are those of this environment; a .pth of theirs, such as the clone's, is not read from here.
    (site,) = (tmp_path / 'venv').glob('lib/python*/site-packages')
    (site / 'libraries.pth').write_text(sysconfig.get_path('purelib'))
    folder = tmp_path / 'elsewhere'
    folder.mkdir()
    assert str(site) in call(bin / 'python', '-c', 'import attnlab; print(attnlab.__file__)', cwd=folder)

    shutil.copy(ROOT / 'README.md', folder / 'text.md')
    overrides = [f'--config.{item}' for item in (*SMALL, 'steps=10', 'checkpoint.every=5', 'report.every=5')]
    train = (bin / 'attnlab', 'train', '--config=language:data=text.md', '--workdir=run', *overrides)
    call(*train, cwd=folder)
    metrics = (folder / 'run' / 'metrics.jsonl').read_bytes()
    shutil.rmtree(folder / 'run' / 'checkpoints' / '10')
    call(*train, cwd=folder)
    assert (folder / 'run' / 'metrics.jsonl').read_bytes() == metrics
    assert (folder / 'run' / 'checkpoints' / '10').is_dir()
    assert 'bits/byte' in call(bin / 'attnlab', 'eval', '--workdir=run', '--tokens=64', '--multiples=1', cwd=folder)

    shutil.copytree(ROOT / 'experiments' / 'softmax_bottleneck', folder / 'mine')
    assert 'can be run' in call(bin / 'attnlab', 'experiment', 'mine', '--dry_run', cwd=folder)
    script = call(bin / 'attnlab', 'completion', 'bash', cwd=folder)
    call('bash', '-nc', script, cwd=folder)
