"""Whose a work directory is."""

import jax
import pytest

from attnlab.config import load
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.files import temporary_name
from attnlab.train.run import claim
from tests.sweep import tiny


def test_a_folder_is_claimed_whatever_another_process_has_written_of_the_config(tmp_path, monkeypatch):
    """What is there of it, for a process that comes second: nothing, the beginning of the file, or all of it."""
    config = config_of(tiny.LANGUAGE, 'zoo=mha')
    begun = temporary_name(tmp_path / 'config.json')
    begun.write_text('{"steps"')
    with monkeypatch.context() as other:
        other.setattr(jax, 'process_index', lambda: 1)
        claim(tmp_path, config)
        assert list(tmp_path.iterdir()) == [begun]
    claim(tmp_path, config)
    claim(tmp_path, config)
    assert set(tmp_path.iterdir()) == {begun, tmp_path / 'config.json'}
    assert load(tmp_path / 'config.json').steps == config.steps


def test_what_is_no_run_is_left_alone(tmp_path):
    temporary_name(tmp_path / 'config.json').touch()
    (tmp_path / 'thesis.tex').touch()
    with pytest.raises(UserError, match='is not empty and holds no config'):
        claim(tmp_path, config_of(tiny.LANGUAGE, 'zoo=mha'))
