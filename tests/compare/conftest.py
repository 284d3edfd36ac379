"""Directories of runs, as training leaves them."""

import json
import pathlib

import pytest

from attnlab.config import save
from attnlab.configuration import config_of

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
FACTS = {
    'parameters': 1000,
    'state_bytes_per_sequence': {'32': 640, '256': 640},
    'flops_per_token': 10.0,
    'implementations': [],
    'device_kind': 'cpu',
    'device_count': 1,
    'data': {},
}


@pytest.fixture
def made(tmp_path):
    """Writes the directory of a run that was trained: what `attnlab train` leaves, without checkpoints."""

    def make(name, scores, file='recall', arg='task=mqar', facts=(), **changes):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = config_of(CONFIGS / f'{file}.py', arg)
        with config.unlocked():
            for key, value in changes.items():
                config[key] = value
        save(config, folder / 'config.json')
        (folder / 'run.json').write_text(json.dumps({'starts': [{}, FACTS | dict(facts)]}))
        lines = [{'step': 10, 'train/loss': 3.0}, *({'step': config.steps} | line for line in scores)]
        (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
        speeds = ''.join(json.dumps({'step': n, 'tokens_per_second': n}) + '\n' for n in (1, 7, 100))
        (folder / 'speed.jsonl').write_text(speeds)
        return folder

    return make
