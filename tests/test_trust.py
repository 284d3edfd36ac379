"""What a config may name: classes of attnlab, and of code that the user said may run."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from attnlab import cli, trust
from attnlab.config import build, from_plain, load, plain, set_value, spec, value_at
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.sweep.search import GridSearch
from attnlab.sweep.space import Choice
from attnlab.sweep.study import create_study
from attnlab.sweep.sweep import sweep_config
from attnlab.testing.noise import noise
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import chosen_recipe
from configs import language

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    ('target', 'message'),
    [
        (5, r'config.target is 5; it must be the import path of a class'),
        ('os.system', r'config.target names os.system, which is no part of attnlab.*--allow=os'),
        ('attnlab.cli.main', r'config.target names attnlab.cli.main, which no config may call'),
        ('attnlab.__main__.main', r'cannot be imported: attnlab.__main__ is a program'),
        ('attnlab.train.run.pathlib', r'which no config may call'),
        ('attnlab.train.launch.Console', r'which no config may call'),
        ('attnlab.sweep.launch.Job', r'which no config may call'),
        ('system', r'--allow=system'),
    ],
)
def test_a_config_calls_nothing_but_parts(own_process, target, message):
    with pytest.raises(UserError, match=message):
        build(ConfigDict({'target': target}))


def test_a_config_from_a_stranger_runs_nothing(own_process, tmp_path, capsys):
    """The refusal comes before the import: a module's own code would have run by then."""
    (tmp_path / 'malice.py').write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = plain(language.get_config())
    config['model']['norm'] = {'target': 'malice.Part'}
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
    trust.importable(tmp_path)
    for command, *rest in (('eval',), ('analyse',), ('generate', '--prompt=x')):
        assert cli.main([command, f'--workdir={tmp_path / "run"}', *rest]) == 2
    assert '--allow=malice' in capsys.readouterr().err
    assert not (tmp_path / 'ran').exists()


GLOBALS = "__globals__['inspect']"
OUT = (f'__class__.__init__.{GLOBALS}.sys.path[0]', f'lock.{GLOBALS}.sys.path[0]')
"""Keys by which attributes lead from a config to the interpreter; the second is that of a value in `shadowed`."""


def shadowed():
    """A config with a group that is called as a method is."""
    return from_plain({'steps': 5, 'blocks': [{'heads': 2}], 'lock': {GLOBALS: {'sys': {'path[0]': 'x'}}}})


@pytest.mark.parametrize('key', OUT)
def test_a_shared_study_sets_nothing_but_its_config(own_process, key, tmp_path, capsys):
    base, before = language.get_config('zoo=mha,size=tiny').unlock(), list(sys.path)
    base['lock'] = shadowed()['lock']
    space = {'rate': spec(Choice, key='optimizer.peak_lr', values=(1e-3,))}
    create_study(tmp_path, sweep_config(base, space, sampler=spec(GridSearch), metric='valid/loss'))
    for file in (tmp_path / 'sweep.json', tmp_path / 'journal.log'):
        file.write_text(file.read_text().replace('optimizer.peak_lr', key))
    assert cli.main(['sweep', 'status', f'--study={tmp_path}']) == 2
    assert 'the base config has no key' in capsys.readouterr().err
    assert sys.path == before


@pytest.mark.parametrize('key', [*OUT, '__class__', 'keys', 'blocks.count', 'blocks[0].__class__.__init__'])
def test_keys_of_a_config_lead_nowhere_else(own_process, key):
    config, before = shadowed(), list(sys.path)
    with pytest.raises(LookupError):
        value_at(config, key)
    with pytest.raises(LookupError):
        set_value(config, key, '/elsewhere')
    assert sys.path == before and config == shadowed()


@pytest.mark.parametrize('key', ['', 'a b', 'steps()', 'steps[', 'blocks[3].heads', 'blocks[0]', 'a' + '.a' * 100_000])
def test_what_is_no_key_of_a_config_is_not_set(key):
    with pytest.raises(LookupError):
        set_value(shadowed(), key, 3)


def test_a_key_of_a_config_is_read_and_set():
    config = shadowed()
    set_value(config, 'blocks[0].heads', 4)
    assert value_at(config, 'blocks[0].heads') == 4 and value_at(config, 'blocks')[0].heads == 4
    with pytest.raises(TypeError, match='heads'):
        set_value(config, 'blocks[0].heads', 'four')


@pytest.mark.parametrize('folder', ['attnlab', 'configs', 'experiments'])
def test_nothing_else_takes_attributes_for_keys(folder):
    files = [file for file in (ROOT / folder).rglob('*.py') if file != ROOT / 'attnlab' / 'config.py']
    assert not [file for file in files if 'config_path' in file.read_text()]


def test_a_class_of_a_config_file_is_refused_where_it_is_written_down(own_process, tmp_path, capsys):
    (tmp_path / 'mine.py').write_text(
        'import dataclasses\nfrom attnlab.config import spec\n\n'
        '@dataclasses.dataclass(frozen=True)\nclass Part:\n    x: int = 1\n\n'
        'def get_config(arg):\n    return spec(Part)\n'
    )
    assert cli.main(['train', f'--config={tmp_path / "mine.py"}', '--dry_run']) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / 'mine.py') in message and 'put the class into a module beside that file' in message


def test_the_mixer_of_the_readme_trains_and_is_loaded_again(own_process, tmp_path, capsys):
    definition = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), flags=re.DOTALL)[0]
    module = tmp_path / 'my_mixers.py'
    module.write_text(definition)
    text = tmp_path / 'text.txt'
    text.write_text('one and two and three and four and five\n' * 400)
    workdir = f'--workdir={tmp_path / "run"}'
    train = [
        'train',
        f'--config={ROOT / "configs" / "language.py"}:zoo=my_mixers.MovingAverage,data={text}',
        workdir,
        *('--config.steps=2', '--config.batch_size=2', '--config.length=16', '--config.model.dim=16'),
        *('--config.model.stack.depth=1', '--config.evals=()', '--compilation_cache='),
    ]
    assert cli.main(train) == 2
    assert 'zoo names my_mixers.MovingAverage' in capsys.readouterr().err
    allow = f'--allow={module}'
    assert cli.main([*train, allow]) == 0
    assert f'Next: attnlab eval {workdir} {allow}' in ' '.join(capsys.readouterr().out.split())
    assert load(tmp_path / 'run' / 'config.json').model.stack.blocks[0].mixer.target == 'my_mixers.MovingAverage'
    trust._allowed.clear()
    assert cli.main(['generate', workdir, '--prompt=one']) == 2
    assert '--allow=my_mixers' in capsys.readouterr().err
    assert cli.main(['eval', workdir, '--multiples=1', '--tokens=64', '--compilation_cache=', allow]) == 0
    assert cli.main(['generate', workdir, '--prompt=one', '--tokens=4', '--compilation_cache=', allow]) == 0


UNFINISHED = """
from attnlab.mixers.mixer import Mixer


class Halved(Mixer):
    def __init__(self, dim, *, rngs):
        pass

    def __call__(self, x, ctx, state=None):
        return x / 2, state


class Forgetful(Halved):
    def init_state(self, batch, length, dtype):
        return ()


class Layered(Forgetful):
    def __init__(self, dim, layer, *, rngs):
        pass
"""


def test_what_a_first_mixer_lacks_is_said_in_one_line(own_process, tmp_path, capsys):
    (tmp_path / 'my_halves.py').write_text(UNFINISHED)
    wrong = {'Halved': 'zoo names my_halves.Halved, which lacks init_state of its base class', 'Layered': "'layer'"}
    for name, said in wrong.items():
        train = [
            'train',
            f'--config=language:zoo=my_halves.{name}',
            f'--allow={tmp_path / "my_halves.py"}',
            '--dry_run',
        ]
        assert cli.main(train) == 2
        assert said in capsys.readouterr().err, name
    text = tmp_path / 'text.txt'
    text.write_text('one and two and three\n' * 400)
    train = ['train', f'--config=language:zoo=my_halves.Forgetful,data={text}', f'--allow={tmp_path / "my_halves.py"}']
    train += ['--config.steps=1', '--config.batch_size=2', '--config.length=8', '--config.model.dim=8']
    train += ['--config.model.stack.depth=1', '--config.evals=()', '--compilation_cache=']
    assert cli.main([*train, f'--workdir={tmp_path / "run"}']) == 0
    assert 'no layer keeps a state, so that attnlab generate' in ' '.join(capsys.readouterr().out.split())


def test_a_module_that_is_not_found_is_asked_for_by_its_file(own_process):
    trust.allow('my_absent')
    with pytest.raises(UserError, match=r'No module named .my_absent.; give its file, --allow=PATH/my_absent.py'):
        trust.named('my_absent.Mixer', 'zoo')
    with pytest.raises(UserError, match=r'No module named .attnlab.absent.$'):
        trust.named('attnlab.absent.Mixer', 'zoo')


def test_a_file_whose_name_another_module_has_is_not_allowed(own_process, tmp_path):
    for folder in 'ab':
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'my_twins.py').write_text('')
    for name in ('code', 'time', 'attnlab'):
        (tmp_path / f'{name}.py').write_text('')
        with pytest.raises(UserError, match=f'--allow names .*{name}.py.* another {name} comes before it, .*; rename'):
            trust.allow(str(tmp_path / f'{name}.py'))
    trust.allow(str(tmp_path / 'a' / 'my_twins.py'))
    trust.allow(str(tmp_path / 'a' / 'my_twins.py'))
    with pytest.raises(UserError, match=r'another my_twins comes before it, .*a/my_twins.py; rename'):
        trust.allow(str(tmp_path / 'b' / 'my_twins.py'))
    (tmp_path / 'my_package').mkdir()
    (tmp_path / 'my_package' / '__init__.py').write_text('')
    trust.allow(str(tmp_path / 'my_package'))
    assert trust.allowed() == ['my_package', 'my_twins']


def test_patterns_join_rows():
    recipe = chosen_recipe('3*gla+mha')
    assert [mixer.target.rpartition('.')[2] for mixer in recipe.pattern] == ['LinearAttention'] * 3 + ['Attention']
    assert recipe.streaming and recipe.packed and 'Vaswani' in recipe.cite and 'Yang' in recipe.cite
    assert chosen_recipe('gla') is ZOO['gla']
    assert chosen_recipe('2*mamba+mha').layer == ZOO['mha'].layer != chosen_recipe('2*mamba').layer


def test_a_causal_row_is_read_both_ways():
    recipe, own = chosen_recipe('bi_mamba2'), chosen_recipe('mamba2')
    forwards, backwards = recipe.spec[0].mixers
    assert forwards == own.spec and backwards.mixers[0] == own.spec
    assert recipe.bidirectional and recipe.packed and not (recipe.causal or recipe.streaming or recipe.sequence)
    assert recipe.layer == own.layer and 'Dao' in recipe.cite and 'Schuster' in recipe.cite
    assert [len(mixer.mixers) for mixer in chosen_recipe('bi_griffin').pattern] == [2, 2, 2]
    mixer = build(recipe.reduced()[0])(16, rngs=nnx.Rngs(0))
    x = noise(1, 5, 16)
    gradient = jax.grad(lambda x: jnp.sum(mixer(x, Context.full(1, 5))[0][0, 2] ** 2))(x)
    assert (np.abs(gradient[0]).max(axis=1) > 0).all()
    alone = [each(x, Context.full(1, 5))[0] for each in mixer.mixers]
    np.testing.assert_allclose(mixer(x, Context.full(1, 5))[0], alone[0] + alone[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('bi_mha', 'mha has a bidirectional form of its own; choose zoo=mha'),
        ('bi_mambaa', 'there is no zoo=bi_mambaa'),
        ('3*glaa+mha', "there is no zoo=glaa; did you mean 'gla'"),
        ('0*gla', r'holds .0\*gla.'),
        ('3*+mha', r'holds .3\*.'),
        ('1001*gla', 'up to 1000 layers of a row'),
        ('99999999999*gla', 'up to 1000 layers of a row'),
        ('gla++mha', 'a pattern is written 3'),
        ('gla+uniattn', 'fill layers in different ways'),
    ],
)
def test_a_pattern_that_is_none_says_so(name, message):
    with pytest.raises(UserError, match=message):
        chosen_recipe(name)


def test_a_function_is_no_part():
    with pytest.raises(UserError, match='cannot stand in a config'):
        spec(build)
