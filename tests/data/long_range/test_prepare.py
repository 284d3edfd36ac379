"""Drawing a data set into files: in any number of processes, with interruptions, and with damage."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from attnlab.data.long_range.blocks import Blocks, draw_all
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.preparable import DATASETS, preparable
from attnlab.data.long_range.prepare import prepare
from attnlab.data.long_range.prepared import Prepared, version
from attnlab.errors import UserError

pytest.importorskip('tensorflow_datasets')

from attnlab.data.long_range import builders

ROOT = pathlib.Path(__file__).parents[3]
SHORT = ListOps(shortest=20, longest=100, max_depth=4, max_arguments=5)
COUNTS = {'train': 1200, 'validation': 30, 'test': 30}
PROGRAM = """
import sys
from attnlab.cli import main
from attnlab.data.long_range import builders
from attnlab.data.long_range.listops import ListOps
if __name__ == '__main__':
    builders.ListOpsBuilder.of = ListOps({settings})
    builders.ListOpsBuilder.counts = {counts}
    sys.exit(main(sys.argv[1:]))
"""


class Told:
    """What was said of the progress."""

    def __init__(self):
        self.said = []

    def __call__(self, stage, done, total):
        self.said.append((stage, done, total))

    def first(self, stage):
        return next(told[1:] for told in self.said if told[0] == stage)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(builders.ListOpsBuilder, 'of', SHORT)
    monkeypatch.setattr(builders.ListOpsBuilder, 'counts', COUNTS)


def blocks_in(folder):
    return sorted((folder / 'downloads' / 'listops').glob('*.npz'))


def test_what_is_prepared_is_what_is_drawn(tmp_path, short):
    told = Told()
    outcome = prepare('listops', tmp_path, 1, told)
    assert outcome.fresh and outcome.folder == tmp_path / 'listops' / '1.0.0'
    assert [(part.name, part.examples, part.repeated) for part in outcome.splits] == [
        (name, count, 0) for name, count in COUNTS.items()
    ]
    assert sum(outcome.splits[0].classes) == 1200 and not blocks_in(tmp_path)
    assert list(dict.fromkeys(stage for stage, _, _ in told.said)) == [
        'drawing', 'writing train', 'writing validation', 'writing test', 'verifying train', 'verifying validation',
        'verifying test',
    ]  # fmt: skip
    source = Prepared('listops', str(tmp_path))
    for split in source.splits:
        rows, drawn = source.rows(split), Drawn(SHORT).rows(split)
        assert len(rows) == COUNTS['train' if split == 'train' else 'test']
        for index in (0, 7, len(rows) - 1):
            assert rows[index]['x'].tolist() == drawn[index]['x'].tolist()
            assert (rows[index]['label'], rows[index]['depth']) == (drawn[index]['label'], drawn[index]['depth'])
    again = prepare('listops', tmp_path, 1, Told())
    assert not again.fresh and again.splits == outcome.splits
    assert source.describe() == {
        'source': 'prepared',
        'name': 'listops/1.0.0',
        'content': {part.name: part.content for part in outcome.splits},
    }


def test_blocks_go_on_where_they_were(tmp_path):
    parts = [Blocks(SHORT, 0, split, count, tmp_path) for split, count in (('train', 1200), ('test', 20))]
    parts[0].draw(range(500, 1000))
    told = Told()
    draw_all(parts, 1, told)
    assert told.said == [
        ('drawing', 500, 1220),
        ('drawing', 1000, 1220),
        ('drawing', 1200, 1220),
        ('drawing', 1220, 1220),
    ]
    drawn = list(parts[0].read())
    assert len(drawn) == 1200 and len(parts[0].files()) == 3
    assert drawn[733]['x'].tolist() == Drawn(SHORT).rows('train')[733]['x'].tolist()
    assert drawn[733]['label'].dtype == np.int32
    # Of another seed or another distribution nothing is taken.
    assert len(Blocks(SHORT, 1, 'train', 1200, tmp_path).missing()) == 3
    assert len(Blocks(ListOps(), 0, 'train', 1200, tmp_path).missing()) == 3


def test_a_block_that_is_damaged_is_named(tmp_path):
    part = Blocks(SHORT, 0, 'train', 10, tmp_path)
    draw_all([part], 1, Told())
    (path,) = part.files()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f'{path} is damaged; delete it'):
        list(part.read())


def command(folder, *arguments):
    program = folder / 'program.py'
    settings = 'shortest=20, longest=100, max_depth=4, max_arguments=5'
    program.write_text(PROGRAM.format(settings=settings, counts=COUNTS | {'train': 3_000}))
    return subprocess.Popen(
        [sys.executable, program, 'data', 'prepare', 'listops', f'--data_dir={folder}', *arguments],
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_preparation_that_is_killed_goes_on(tmp_path):
    process = command(tmp_path, '--workers=2')
    while len(blocks_in(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # Its workers have ended with it.
    deadline = time.monotonic() + 60
    while subprocess.run(['pgrep', '-g', str(process.pid)], capture_output=True, check=False).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    drawn = [int(path.stem[-8:]) - int(path.stem[-17:-9]) for path in blocks_in(tmp_path)]
    assert sum(drawn) < 3_060 and not (tmp_path / 'listops' / '1.0.0').exists()
    process = command(tmp_path, '--workers=1')
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert f'drawing: {sum(drawn):,} of 3,060 exist already; resuming' in said.replace('\n', ' ')
    rows, drawn_again = Prepared('listops', str(tmp_path)).rows('train'), Drawn(SHORT).rows('train')
    assert len(rows) == 3_000 and not blocks_in(tmp_path)
    for index in range(0, 3_000, 250):
        assert rows[index]['x'].tolist() == drawn_again[index]['x'].tolist()


def test_the_command_says_what_is_there(tmp_path, short, capsys):
    from attnlab.cli import main

    assert main(['data', 'prepare', 'listops', f'--data_dir={tmp_path}', '--workers=1']) == 0
    said = capsys.readouterr().out
    for words in ('drawing', 'verifying test', 'listops, prepared and verified', '1,200', str(tmp_path / 'listops')):
        assert words in said.replace('\n', ' ')
    assert main(['data', 'prepare', 'listops', f'--data_dir={tmp_path}']) == 0
    assert 'listops, found and verified' in capsys.readouterr().out
    assert main(['data', 'prepare', 'listop']) == 2
    assert "there is no data set 'listop'; did you mean 'listops'" in capsys.readouterr().err
    assert main(['data', 'make']) == 2
    assert 'usage: attnlab data prepare NAME' in capsys.readouterr().err
    assert main(['data']) == 0
    assert 'pathfinder128' in capsys.readouterr().out


def test_what_another_version_prepared_is_not_read(tmp_path, short, monkeypatch, capsys):
    from attnlab.cli import main

    version = builders.tfds.core.Version
    prepare('listops', tmp_path, 1, Told())
    earlier = Prepared('listops', str(tmp_path)).describe()
    for now in ('10.0.0', '0.9.0'):
        monkeypatch.setattr(builders.ListOpsBuilder, 'VERSION', version(now))
        said = rf'prepared by another attnlab \(1.0.0; this one has {now}\); run: attnlab data prepare listops'
        with pytest.raises(UserError, match=rf'{tmp_path}/listops was {said} --data_dir={tmp_path}'):
            Prepared('listops', str(tmp_path)).rows('train')
        assert main(['data', 'list', f'--data_dir={tmp_path}', '--format=plain']) == 0
        shown = capsys.readouterr()
        assert re.search(rf'^listops was {said}$', shown.out + shown.err, re.MULTILINE)
        assert re.search(r'^listops\t.*\tFalse\b', shown.out, re.MULTILINE)
    monkeypatch.setattr(builders.ListOpsBuilder, 'VERSION', version('10.0.0'))
    assert prepare('listops', tmp_path, 1, Told()).folder == tmp_path / 'listops' / '10.0.0'
    for now in ('10.0.0', '1.0.0'):
        monkeypatch.setattr(builders.ListOpsBuilder, 'VERSION', version(now))
        assert Prepared('listops', str(tmp_path)).describe() == earlier | {'name': f'listops/{now}'}
    assert main(['data', 'list', f'--data_dir={tmp_path}', '--format=plain']) == 0
    shown = capsys.readouterr().out
    assert re.search(r'^listops\t.*\tTrue\b', shown, re.MULTILINE) and 'another attnlab' not in shown


def test_what_is_not_what_was_written_is_refused(tmp_path, short, monkeypatch):
    prepare('listops', tmp_path, 1, Told())
    path = tmp_path / 'listops' / '1.0.0' / 'metadata.json'
    content = path.read_text()
    recorded = Prepared('listops', str(tmp_path)).describe()['content']['test']
    path.write_text(content.replace(recorded, recorded[::-1]))
    with pytest.raises(UserError, match=f'test of .*1.0.0 is not what was written: its content is {recorded}, not'):
        prepare('listops', tmp_path, 1, Told())
    for wrong in ('', '{}', '[]', '{"content": []}'):
        path.write_text(wrong)
        with pytest.raises(UserError, match=r'metadata\.json .*; delete its folder and prepare it again'):
            Prepared('listops', str(tmp_path)).describe()
    path.write_text(content)
    stored = next(path.parent.glob('*train*.array_record*'))
    records = stored.read_bytes()
    stored.write_bytes(records[: len(records) // 2])
    with pytest.raises(UserError, match=r'1\.0\.0 is damaged \(.*\); delete it and prepare it again'):
        prepare('listops', tmp_path, 1, Told())
    stored.write_bytes(records)
    monkeypatch.setattr(builders.ListOpsBuilder, 'seed', 1)
    with pytest.raises(UserError, match=r'example 0 of train in .* differs from what this attnlab and this numpy draw'):
        prepare('listops', tmp_path, 1, Told())


def test_repeated_examples_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(builders.ListOpsBuilder, 'of', ListOps(3, 5, 2, 2))
    monkeypatch.setattr(builders.ListOpsBuilder, 'counts', COUNTS)
    with pytest.raises(UserError, match=r'\d+ examples of listops up to train occur twice'):
        prepare('listops', tmp_path, 1, Told())


@pytest.mark.parametrize('name', DATASETS)
def test_builders_and_entries_are_of_one_kind(name):
    builder = builders.BUILDERS[name]
    assert DATASETS[name].builder == builder.__name__ and builder.name == name
    if issubclass(builder, builders.DrawnBuilder):
        assert builder.of.kind == preparable(name).kind
        assert set(builder.counts) == set(preparable(name).splits.values())
        assert sum(builder.counts.values()) in (100_000, 200_000)


@pytest.mark.parametrize(
    'named',
    [
        {'pythonClassName': 'sentinel.X'},
        {'python_class_name': 'sentinel.X'},
        {'featuresDict': {'features': {'x': {'type': 'sentinel.X'}}}},
        {'jsonFeature': {'json': '{"feature": {"type": "sentinel.X"}}'}},
    ],
)
def test_a_folder_does_not_choose_what_is_imported(tmp_path, named):
    folder = tmp_path / 'listops' / version('listops')
    folder.mkdir(parents=True)
    (folder / 'dataset_info.json').write_text('{}')
    (folder / 'features.json').write_text(json.dumps(named))
    with pytest.raises(UserError, match=r'names the class sentinel.X, which would be imported; it must be one of'):
        Prepared('listops', str(tmp_path)).describe()
