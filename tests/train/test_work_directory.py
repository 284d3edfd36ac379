"""What a work directory keeps out: other data, other processes, configs that cannot run."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from attnlab import cli
from attnlab import config as configs
from attnlab.data.edition import content_of
from attnlab.data.long_range import authorship, digits
from attnlab.data.long_range.authorship import Authorship
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.pathfinder import Pathfinder
from attnlab.data.series.drawn import DrawnSeries, Seasonal
from attnlab.data.series.mixtures import DrawnMixtures, Tones
from attnlab.data.synthetic.addition import ModularAddition
from attnlab.data.synthetic.copying import SelectiveCopying
from attnlab.data.synthetic.mixture import Mixture
from attnlab.data.synthetic.planted import PlantedSample
from attnlab.data.synthetic.prototypes import ZipfPrototypes
from attnlab.data.synthetic.ranked import RankedTransitions
from attnlab.data.synthetic.recall import MultiQueryRecall
from attnlab.data.synthetic.sums import SignedSums
from attnlab.data.text.text import TextFiles
from attnlab.data.text.tokenizers import load_tokenizer
from attnlab.data.vision.folders import _content, _files, image_folder
from attnlab.errors import UserError
from attnlab.tasks.addition import Addition
from attnlab.tasks.forecasting import Forecasting
from attnlab.tasks.images import ImageClassification
from attnlab.tasks.language import LanguageModelling, _load
from attnlab.tasks.long_range import Classification
from attnlab.tasks.many_classes import ManyClasses
from attnlab.tasks.planted import Planted
from attnlab.tasks.separation import Separation
from attnlab.tasks.synthetic import LabelPrediction
from attnlab.tasks.transitions import Transitions
from attnlab.train import launch, run
from attnlab.train.fork import Fork
from attnlab.train.setup import prepare

LANGUAGE = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'


@pytest.fixture
def trained(tmp_path, capsys):
    """Trains two steps on a text in byte pairs; returns what gives the same command again, and the text."""
    text = tmp_path / 'text.txt'
    text.write_text('one and two and three and four and five\n' * 400)
    argv = [
        'train',
        f'--config={LANGUAGE}:zoo=mingru,data={text},tokens=bpe',
        f'--workdir={tmp_path / "run"}',
        *('--config.steps=2', '--config.batch_size=2', '--config.length=16', '--config.model.dim=16'),
        *('--config.model.stack.depth=1', '--config.evals=()', '--config.task.tokenizer.vocab=264'),
        *(f'--config.task.text.cache={tmp_path / "cache"}', '--compilation_cache='),
    ]
    assert cli.main(argv) == 0
    capsys.readouterr()
    return argv, text, tmp_path / 'run'


def test_another_text_is_refused_and_the_tokenizer_stays(trained, capsys):
    argv, text, workdir = trained
    tokenizer = load_tokenizer(workdir / 'tokenizer.json')
    before = json.loads((workdir / 'run.json').read_text())['starts'][-1]['data']['content_hash']
    text.write_text('six or seven or eight or nine\n' * 400)
    for command in (
        argv,
        ['eval', f'--workdir={workdir}', '--compilation_cache='],
        ['analyse', f'--workdir={workdir}'],
    ):
        assert cli.main(command) == 2
        printed = capsys.readouterr()
        assert before in printed.err and '--other_data' in printed.err and 'writing' not in printed.out
    assert not (workdir / 'evals').exists()
    evaluate = ['eval', f'--workdir={workdir}', '--multiples=1', '--tokens=64', '--compilation_cache=']
    assert cli.main([*evaluate, '--other_data']) == 0
    assert json.loads((workdir / 'evals' / '2-64-tokens.json').read_text())['other_data']
    assert cli.main([*argv, '--other_data']) == 0
    starts = json.loads((workdir / 'run.json').read_text())['starts']
    assert [start['other_data'] for start in starts] == [False, True]
    assert starts[1]['data']['content_hash'] != before
    assert load_tokenizer(workdir / 'tokenizer.json').hash == tokenizer.hash == starts[1]['data']['tokenizer']['hash']


@pytest.mark.parametrize('place', ['fork', 'copy'])
def test_a_fork_that_was_interrupted_has_the_tokenizer_of_its_parameters(trained, place, tmp_path, monkeypatch):
    _, text, workdir = trained
    text.write_text('six or seven or eight or nine\n' * 400)
    fork = tmp_path / 'fork'
    again = [
        'train',
        f'--from={workdir}',
        f'--workdir={fork}',
        '--other_data',
        '--config.steps=4',
        '--compilation_cache=',
    ]
    broken = {'fork': (launch.run, 'record'), 'copy': (Fork, 'copy_into')}[place]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(*broken, lambda *given: sys.exit(9))
        cli.main(again)
    assert not (fork / 'run.json').exists()
    assert load_tokenizer(fork / 'tokenizer.json') == load_tokenizer(workdir / 'tokenizer.json')
    assert cli.main(again) == 0
    assert load_tokenizer(fork / 'tokenizer.json') == load_tokenizer(workdir / 'tokenizer.json')


def test_a_checkpoint_without_its_trained_tokenizer_is_refused(trained, tmp_path, capsys):
    argv, _, workdir = trained
    (workdir / 'tokenizer.json').unlink()
    fork = ['train', f'--from={workdir}', f'--workdir={tmp_path / "fork"}', '--config.steps=4']
    for command in (argv, ['eval', f'--workdir={workdir}', '--compilation_cache='], fork):
        assert cli.main(command) == 2
        assert f'{workdir} has a checkpoint and no tokenizer.json, so that its' in capsys.readouterr().err
    assert not (workdir / 'tokenizer.json').exists() and not (tmp_path / 'fork').exists()


def test_parameters_of_a_run_come_with_its_tokenizer(trained, tmp_path):
    argv, text, workdir = trained
    theirs = load_tokenizer(workdir / 'tokenizer.json')
    other = tmp_path / 'other.txt'
    other.write_text('six or seven or eight or nine\n' * 400)
    begun = [word.replace(str(text), str(other)) for word in argv]
    begun[1] += f',run={workdir}'
    begun[2] = f'--workdir={tmp_path / "begun"}'
    assert cli.main(begun) == 0
    assert load_tokenizer(tmp_path / 'begun' / 'tokenizer.json') == theirs
    begun[2] = f'--workdir={tmp_path / "afresh"}'
    assert cli.main([*begun, "--config.start.leave=('embedding/*', 'head/*')"]) == 0
    own = load_tokenizer(tmp_path / 'afresh' / 'tokenizer.json')
    assert own != theirs

    setup = prepare(configs.load(tmp_path / 'begun' / 'config.json'))
    assert (
        setup.begun().task.tokenizer == theirs and setup.restored(tmp_path / 'begun').begun().task.tokenizer == theirs
    )
    with pytest.raises(UserError, match=f'config.start.run is {workdir}, whose .* {theirs.hash}, .* run {own.hash}: '):
        setup.restored(tmp_path / 'afresh').begun()
    shutil.rmtree(workdir)
    assert cli.main([word.replace('afresh', 'begun') for word in begun]) == 0, 'what it began with is read once'


def test_prompts_of_ones_own_are_asked_whatever_the_text_is_by_now(trained, capsys):
    _, text, workdir = trained
    text.write_text('six or seven or eight or nine\n' * 400)
    asked = ['analyse', f'--workdir={workdir}', '--compilation_cache=', '--trace', '--prompt=x', '--other=y']
    assert cli.main(asked) == 0
    assert 'a prompt, asked for' in capsys.readouterr().out


def test_a_folder_of_another_config_is_refused_before_anything_is_said_of_writing(trained, capsys):
    argv, _, workdir = trained
    assert cli.main([*argv, '--config.seed=1']) == 2
    printed = capsys.readouterr()
    assert f'{workdir} holds a run with another config (seed' in printed.err and not printed.out
    assert '--from' not in printed.err
    assert cli.main([word.replace('steps=2', 'steps=9') for word in argv]) == 2
    assert f'to train it for longer: --from={workdir}' in capsys.readouterr().err
    assert cli.main(argv) == 0
    assert 'ready in' in (said := capsys.readouterr().out) and 'writing' in said


def changed(workdir, before, task):
    """What a run that recorded these data is told of its task now; `None` if nothing."""
    workdir.mkdir(exist_ok=True)
    start = {'implementations': [], 'parameters': 1, 'flops_per_token': 0, 'state_bytes_per_sequence': {}}
    start |= {'device_kind': 'cpu', 'device_count': 1, 'data': before}
    (workdir / 'run.json').write_text(json.dumps({'starts': [start]}))
    for cached in (_load, _files, _content):
        cached.cache_clear()
    try:
        run.check_data(workdir, task.describe())
    except UserError as error:
        return str(error)


def test_another_held_out_text_is_refused(tmp_path):
    train, valid = tmp_path / 'train.txt', tmp_path / 'valid.txt'
    train.write_text('one and two and three\n'), valid.write_text('four and five\n')
    task = LanguageModelling(TextFiles(str(train), valid_path=str(valid), cache=None))
    before = task.describe()
    assert changed(tmp_path / 'run', before, task) is None
    valid.write_text('five and four\n')
    told = changed(tmp_path / 'run', before, task)
    assert f'held_out.content_hash was {before["held_out"]["content_hash"]} and is' in told


def test_another_image_in_a_folder_is_refused(tmp_path):
    for name in ('cat', 'dog'):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f'{number}.png').write_bytes(b'%d' % number)
    task = ImageClassification(image_folder(str(tmp_path)))
    before = task.describe()
    earlier = {name: value for name, value in before.items() if name != 'content'}
    assert changed(tmp_path / 'run', before, task) is None
    (tmp_path / 'cat' / '3.png').write_bytes(b'larger')
    assert f'content was {before["content"]} and is' in changed(tmp_path / 'run', before, task)
    assert changed(tmp_path / 'run', earlier, task) is None
    (tmp_path / 'cat' / '3.png').write_bytes(b'3')
    assert changed(tmp_path / 'run', before, task) is None
    (tmp_path / 'cat' / '3.png').rename(tmp_path / 'cat' / '33.png')
    assert f'content was {before["content"]} and is' in changed(tmp_path / 'run', before, task)
    (tmp_path / 'cat' / '3.png').write_bytes(b'3')
    assert 'counts.train was 16 and is 17' in changed(tmp_path / 'run', earlier, task)


def test_another_edition_of_what_is_drawn_is_refused(tmp_path, monkeypatch):
    task = Classification(Drawn(Pathfinder()))
    before = task.describe()
    earlier = {name: value for name, value in before.items() if name != 'content'}
    assert changed(tmp_path / 'run', before, task) is None and changed(tmp_path / 'run', earlier, task) is None
    # A field that a distribution gains is in its name, and in none of the examples.
    assert changed(tmp_path / 'run', before | {'of': 'Pathfinder(size=32)'}, task) is None
    monkeypatch.setattr(Pathfinder, 'edition', Pathfinder.edition + 1)
    assert f'content was {before["content"]} and is' in changed(tmp_path / 'run', before, task)
    assert f'of was {before["of"]} and is' in changed(tmp_path / 'run', earlier, task)


@pytest.mark.parametrize(
    ('task', 'kind'),
    [
        (LabelPrediction(SignedSums()), SignedSums),
        (LabelPrediction(MultiQueryRecall()), MultiQueryRecall),
        (ManyClasses(), ZipfPrototypes),
        (Addition(), ModularAddition),
        (Transitions(), RankedTransitions),
        (Forecasting(DrawnSeries(Seasonal())), Seasonal),
        (Separation(DrawnMixtures()), Tones),
    ],
    ids=lambda each: getattr(each, '__name__', ''),
)
def test_another_edition_of_any_problem_series_or_mixture_is_refused(tmp_path, monkeypatch, task, kind):
    """A record of before has the name alone, and goes on where that says the same edition, whatever its fields."""
    before = task.describe()
    earlier = {name: value for name, value in before.items() if name != 'content'}
    (key,) = [name for name, value in earlier.items() if kind.__name__ in str(value)]
    fewer = earlier | {key: f'{kind.__name__}(){earlier[key].partition(")")[2]}'}
    assert all(changed(tmp_path / 'run', each, task) is None for each in (before, earlier, fewer))
    hashes = {'content': before['content']}
    assert all(run.data_hashes(each) == hashes for each in (before, earlier, fewer))
    monkeypatch.setattr(kind, 'edition', kind.edition + 1)
    for each in (before, earlier, fewer):
        assert f'content was {before["content"]} and is {task.describe()["content"]}' in changed(
            tmp_path / 'run', each, task
        )
        assert run.data_hashes(each) != run.data_hashes(task.describe())


def test_a_mixture_has_the_editions_of_its_parts(monkeypatch):
    mixture = Mixture((SelectiveCopying(), MultiQueryRecall()), (64, 64), ('copying', 'recall'))
    before, name = mixture.content, mixture.name
    assert content_of(name) == before
    monkeypatch.setattr(MultiQueryRecall, 'edition', 2)
    assert mixture.content != before and mixture.name == name


def test_another_edition_of_a_planted_mixture_is_refused(tmp_path, monkeypatch):
    """A record of before names what is planted, not the class of its samples, and goes on."""
    before = Planted().describe()
    earlier = {name: value for name, value in before.items() if name != 'content'}
    assert (
        changed(tmp_path / 'run', before, Planted()) is None and changed(tmp_path / 'run', earlier, Planted()) is None
    )
    monkeypatch.setattr(PlantedSample, 'edition', 2)
    assert f'content was {before["content"]} and is' in changed(tmp_path / 'run', before, Planted())


def test_other_digits_are_refused(tmp_path, monkeypatch):
    pytest.importorskip('sklearn')
    task = Classification(Digits())
    before = task.describe()
    earlier = {name: value for name, value in before.items() if name != 'content'}
    assert changed(tmp_path / 'run', before, task) is None and changed(tmp_path / 'run', earlier, task) is None
    images, labels = digits._digits()
    monkeypatch.setattr(digits, '_digits', lambda: (images[::-1], labels))
    digits._content.cache_clear()
    told = changed(tmp_path / 'run', before, task)
    digits._content.cache_clear()
    assert f'content was {before["content"]} and is' in told


def test_passages_of_another_python_are_refused(tmp_path, monkeypatch):
    task = Classification(Authorship(span=4096))
    before = task.describe()
    earlier = {name: value for name, value in before.items() if name != 'content'}
    monkeypatch.setattr(authorship.platform, 'python_version', lambda: '3.99.0')
    assert changed(tmp_path / 'run', before, task) is None
    assert f'python was {before["python"]} and is 3.99.0' in changed(tmp_path / 'run', earlier, task)
    passages = authorship._passages(4096)
    monkeypatch.setattr(authorship, '_passages', lambda span: passages[1:])
    authorship._content.cache_clear()
    told = changed(tmp_path / 'run', before, task)
    authorship._content.cache_clear()
    assert f'content was {before["content"]} and is' in told


def test_one_process_at_a_time(tmp_path):
    holder = (
        'import pathlib, sys; from attnlab.train import run\n'
        f'with run.held(pathlib.Path({str(tmp_path)!r})):\n    print("held", flush=True); sys.stdin.read()'
    )
    with subprocess.Popen(
        [sys.executable, '-c', holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == 'held\n'
        with pytest.raises(UserError, match=f'is being trained in by process {other.pid} on '), run.held(tmp_path):
            pass
        other.kill()
    with run.held(tmp_path):
        assert (tmp_path / 'lock').exists()


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('model.stack.blocks[0].mixer.heads=5', 'heads'),
        ('checkpoint.every=-1', 'config.checkpoint.every is -1; it must be a whole number of at least 1'),
    ],
)
def test_a_config_that_cannot_run_leaves_no_trace(tmp_path, capsys, override, message):
    text = tmp_path / 'text.txt'
    text.write_text('one and two and three\n' * 400)
    argv = ['train', f'--config={LANGUAGE}:data={text}', f'--workdir={tmp_path / "run"}', '--compilation_cache=']
    assert cli.main([*argv, f'--config.{override}']) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()
