"""Steps that are traced: which, where to, and that nothing else changes."""

import gzip
import json
import warnings

import jax
import pytest

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.train.profile import Profile, profile_of

RUN = (
    'train',
    '--config=language:zoo=mingru',
    '--config.model.dim=8',
    '--config.model.stack.depth=1',
    '--config.length=16',
    '--config.batch_size=4',
    '--config.steps=6',
    '--config.checkpoint.every=3',
    '--config.evals=()',
    '--config.report.every=2',
    '--compilation_cache=',
)


def traced_steps(path):
    """The numbers of the steps in a trace."""
    trace, found = jax.profiler.ProfileData.from_file(str(path)), []
    with warnings.catch_warnings():
        # The module's own types have no __module__; as an error this ends the process.
        warnings.simplefilter('ignore', DeprecationWarning)
        for plane in trace.planes:
            for line in plane.lines:
                found += [dict(event.stats)['step_num'] for event in line.events if event.name == 'train']
    return found


def host(path):
    """The machine that a trace is of, by the name of its file."""
    return path.name.removesuffix('.xplane.pb')


@pytest.mark.parametrize(('text', 'first', 'last'), [('1', 1, 1), ('10', 10, 10), ('10:15', 10, 15), ('3:3', 3, 3)])
def test_steps_are_one_or_a_first_and_a_last(text, first, last):
    assert profile_of(text) == Profile(first, last)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', '--profile is empty; give it a value, or leave it out'),
        *((text, f"--profile is '{text}'; it must be a step, such as 10") for text in ('0', '-3', 'ten', '1:', ':2')),
        *(
            (text, f"--profile is '{text}'; it must be a step, such as 10")
            for text in ('1:2:3', '1.5', '0:4', '²', ' 4')
        ),
        ('5:4', "--profile is '5:4', which ends before it begins"),
        ('7', '--profile asks for step 7; the run has 6 steps'),
        ('6:7', '--profile asks for steps 6 to 7; the run has 6 steps'),
    ],
)
def test_steps_that_make_no_sense_are_refused_before_anything_is_made(text, message, tmp_path, capsys):
    assert main([*RUN, f'--workdir={tmp_path / "run"}', f'--profile={text}']) == 2
    assert message in capsys.readouterr().err and not (tmp_path / 'run').exists()


def test_steps_that_were_taken_are_refused():
    Profile(4, 6).check(3, 6)
    with pytest.raises(UserError, match='asks for steps 3 to 6; the run goes on from step 3, after them'):
        Profile(3, 6).check(3, 6)


def test_a_trace_of_the_steps_is_written_and_recorded_and_changes_no_number(tmp_path, capsys):
    traced, plain = tmp_path / 'traced', tmp_path / 'plain'
    assert main([*RUN, f'--workdir={traced}', '--profile=2:3']) == 0
    assert f'profile of steps 2 to 3: xprof --logdir={traced}' in capsys.readouterr().out.replace('\n', ' ')
    (written,) = traced.glob('plugins/profile/*/*.xplane.pb')
    assert traced_steps(written) == [2, 3]
    # The same for a browser, in Chrome's format, which Perfetto opens.
    events = json.loads(gzip.decompress(written.with_name(f'{host(written)}.trace.json.gz').read_bytes()))[
        'traceEvents'
    ]
    assert [event['args']['step_num'] for event in events if event.get('name') == 'train'] == ['2', '3']
    assert json.loads((traced / 'run.json').read_text())['starts'][0]['profile'] == 'steps 2 to 3'
    before = (traced / 'run.json').read_bytes()
    assert main([*RUN, f'--workdir={traced}', '--profile=6']) == 2
    assert 'the run goes on from step 6, after them' in capsys.readouterr().err
    assert (traced / 'run.json').read_bytes() == before
    assert main([*RUN, f'--workdir={plain}']) == 0
    assert (traced / 'metrics.jsonl').read_bytes() == (plain / 'metrics.jsonl').read_bytes()
