"""Meshes, placements, and parts of a batch; the checks on eight virtual devices are in `eight_devices.py`."""

import pathlib
import subprocess
import sys

import pytest

from attnlab.errors import UserError
from attnlab.train import partition
from configs import language

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('check', ['placements', 'meshes', 'training', 'experts', 'measurements', 'evaluations'])
def test_on_eight_devices(check: str):
    command = [sys.executable, '-m', 'tests.train.eight_devices', check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ('size', 'devices', 'parts'),
    [('125m', 1, 16), ('125m', 8, 2), ('350m', 64, 1), ('1b', 1, 64), ('1b', 16, 4), ('1b', 256, 1)],
)
def test_parts_follow_from_the_mesh(size: str, devices: int, parts: int):
    config = language.get_config(f'size={size}')
    assert partition.parts(config.batch_size, config.accumulate, config.rows_at_once, devices) == parts


def test_parts_asked_for_are_the_least_there_are():
    assert partition.parts(256, 32, 16, 2) == partition.parts(256, 32, None, 8) == 32
    assert partition.parts(256, 3, 16, 8) == 4


def test_a_batch_that_does_not_divide_into_parts_says_so():
    wrong = {
        (256, 1, 4, 512): 'accumulate=1 or more parts of a multiple of 512 rows .*, at most 4 a device',
        (16, 1, None, 3): 'accumulate=1 parts of a multiple of 3 rows',
        (16, 8, None, 4): 'accumulate=8 parts of a multiple of 4 rows',
    }
    for numbers, message in wrong.items():
        with pytest.raises(UserError, match=f'config.batch_size, {numbers[0]}, does not divide into config.{message}'):
            partition.parts(*numbers)


def test_rows_of_a_part_are_told_of_a_batch_that_does_not_divide_too():
    assert partition.rows_of_part(256, 3, 16, 8) == 256 // partition.parts(256, 3, 16, 8) == 64
    # No more on a device than a part would have there, and at least a row each.
    assert partition.rows_of_part(3, 1, None, 2) == 2
    assert partition.rows_of_part(100, 2, None, 8) == 48
    assert partition.rows_of_part(100, 2, 4, 8) == 32
    assert partition.rows_of_part(16, 8, None, 4) == 4
