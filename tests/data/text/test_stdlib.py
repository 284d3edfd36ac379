import pathlib
import platform
import sysconfig

import pytest

from attnlab.config import build, spec
from attnlab.data.text.stdlib import StdlibText, is_valid
from attnlab.data.text.tokenizers import BytePairs, Bytes
from attnlab.errors import UserError

KNOWN = {
    '3.12.1': (382, 7_665_751, 630_293, '3069167c91bd'),
    '3.13.0': (400, 7_879_349, 648_918, '5592100abd59'),
}
"""Files (empty ones too), bytes, bytes of `valid`, and the beginning of the hash, by Python version."""


def test_the_corpus_of_this_python_is_the_known_one():
    documents = {split: list(StdlibText().documents(split)) for split in ('train', 'valid')}
    names = [document.name for split in documents.values() for document in split]
    assert len(names) == len(set(names))
    for split in documents.values():
        assert [document.name for document in split] == sorted(document.name for document in split)
    total, valid = (sum(len(document.content) for document in split) for split in documents.values())
    assert 0.06 < valid / (total + valid) < 0.1
    if platform.python_version() not in KNOWN:
        pytest.skip(f'the corpus of Python {platform.python_version()} is not on record')
    files, size, valid_size, digest = KNOWN[platform.python_version()]
    assert (len(names), total + valid, valid) == (files, size, valid_size)
    assert StdlibText().describe()['corpus_hash'].startswith(digest)


def test_modules_do_not_straddle_the_splits():
    for module in ('json', 'email', 'asyncio'):
        assert len({is_valid(f'{module}/{file}.py') for file in 'abcdefgh'}) == 1
        assert is_valid(f'{module}.py') == is_valid(f'_{module}/x.py') == is_valid(f'{module}/x.py')


def test_bytes_are_the_sources_themselves_and_cache_nothing(tmp_path):
    text = StdlibText(cache=str(tmp_path)).load('valid', Bytes())
    contents = [document.content for document in StdlibText().documents('valid') if document.content]
    assert text.tokens.tobytes() == b''.join(contents)
    assert len(text.ends) == len(contents)
    assert list(tmp_path.iterdir()) == []
    assert text.provenance['python'] == platform.python_version()
    assert len(text.provenance['corpus_hash']) == 64


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of our own making."""
    root = tmp_path / 'lib'
    for name in (
        'json/decoder.py',
        'os.py',
        '_io.py',
        '_pylong/x.py',
        'test/a.py',
        'json/__pycache__/b.py',
        'config-3/c.py',
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'# {name}\n' * 100)
    for name in ('turtle.py', '_sysconfigdata_linux.py', 'os.pyc', 'README'):
        (root / name).write_text('left out')
    monkeypatch.setattr(sysconfig, 'get_paths', lambda: {'stdlib': str(root)})
    return root


def test_what_is_left_out_and_how_the_rest_is_split(library):
    # By `sha256sum`, modulo 20: io 6, json 6, os 2, pylong 1.
    assert [document.name for document in StdlibText().documents('train')] == ['_io.py', 'json/decoder.py', 'os.py']
    assert [document.name for document in StdlibText().documents('valid')] == ['_pylong/x.py']


def test_byte_pairs_are_cached(library, tmp_path):
    source = StdlibText(cache=str(tmp_path / 'cache'))
    text = source.load('train', BytePairs(262))
    assert text.tokenizer.decode(text.tokens).count(b'\n') == 300
    assert len(list((tmp_path / 'cache').iterdir())) == 2


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    (tmp_path / 'os.pyc').touch()
    for root in (tmp_path, tmp_path / 'python313.zip'):
        monkeypatch.setattr(sysconfig, 'get_paths', lambda root=root: {'stdlib': str(root)})
        with pytest.raises(UserError, match=f'no standard library sources under {root}; use TextFiles'):
            StdlibText().load('train', Bytes())


def test_constructing_touches_nothing(monkeypatch):
    monkeypatch.setattr(pathlib.Path, 'walk', None)
    assert build(spec(StdlibText)) == StdlibText()
