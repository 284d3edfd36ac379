import logging
import random

import numpy as np
import pytest

from attnlab.config import build, spec
from attnlab.data.text.text import TextFiles
from attnlab.data.text.tokenizers import BytePairs, Bytes
from attnlab.data.text.windows import Windows
from attnlab.errors import UserError


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def names(source, split):
    return [document.name for document in source.documents(split)]


def joined(source, split):
    return b''.join(document.content for document in source.documents(split))


def test_a_file_is_cut_at_the_start_of_a_line(tmp_path):
    content = b''.join(b'line %03d\n' % i for i in range(1000))
    path = write(tmp_path, {'a.txt': content}) / 'a.txt'
    source = TextFiles(str(path))
    train, valid = joined(source, 'train'), joined(source, 'valid')
    assert train + valid == content
    assert valid.startswith(b'line 950\n')
    # The same through its folder, and its home directory.
    assert joined(TextFiles(str(tmp_path)), 'valid') == valid


def test_a_file_without_lines_is_cut_between_characters(tmp_path):
    path = write(tmp_path, {'a.txt': '日本語' * 1000}) / 'a.txt'
    source = TextFiles(str(path), valid_fraction=0.1)
    train, valid = joined(source, 'train').decode(), joined(source, 'valid').decode()
    assert train + valid == '日本語' * 1000
    assert abs(len(valid) - 300) <= 1


def test_bytes_that_are_no_text_are_cut_where_they_are_asked_to(tmp_path):
    """Silence in 8 bits looks like the middle of a character without end."""
    path = write(tmp_path, {'a.raw': b'\x80' * 10_000}) / 'a.raw'
    source = TextFiles(str(path), encoding='bytes')
    assert [len(joined(source, split)) for split in ('train', 'valid')] == [9500, 500]


def test_many_documents_are_split_whole_and_by_content(tmp_path):
    rng = random.Random(0)
    files = {f'{i:04}.txt': rng.randbytes(rng.randint(50, 150)).hex() for i in range(1000)}
    source = TextFiles(str(write(tmp_path / 'a', files)))
    train, valid = names(source, 'train'), names(source, 'valid')
    assert sorted(train + valid) == sorted(files)
    assert train == sorted(train)
    assert 30 < len(valid) < 75
    # Other names, other neighbours: a document stays where it is.
    renamed = {f'z{name}': content for name, content in files.items() if name > '0100.txt'}
    again = names(TextFiles(str(write(tmp_path / 'b', renamed))), 'valid')
    assert again == [f'z{name}' for name in valid if name > '0100.txt']


def test_equal_documents_stay_together(tmp_path):
    files = {f'{i:04}.txt': f'document {i % 400}' for i in range(1200)}
    source = TextFiles(str(write(tmp_path, files)))
    train, valid = ({d.content for d in source.documents(split)} for split in source.splits)
    assert not train & valid
    assert valid


def test_one_large_document_among_small_ones_is_cut(tmp_path):
    files = {f'{i:04}.txt': f'small {i}\n' for i in range(500)} | {'large.txt': 'large\n' * 20_000}
    source = TextFiles(str(write(tmp_path, files)))
    sizes = [len(joined(source, split)) for split in source.splits]
    assert sum(sizes) == sum(map(len, files.values()))
    assert 0.04 < sizes[1] / sum(sizes) < 0.06
    assert 'large.txt' in names(source, 'train')
    assert 'large.txt' in names(source, 'valid')


def test_separators_end_documents_and_stay_part_of_them(tmp_path):
    path = write(tmp_path, {'a.txt': 'one\n\ntwo\nthree\n\n\n\nfour'}) / 'a.txt'
    source = TextFiles(str(path), separator='\n\n', valid_path=str(path))
    assert [(d.name, d.content) for d in source.documents('train')] == [
        ('a.txt#0', b'one\n\n'),
        ('a.txt#1', b'two\nthree\n\n'),
        ('a.txt#2', b'\n\n'),
        ('a.txt#3', b'four'),
    ]


def test_a_validation_path_is_the_validation_split(tmp_path):
    write(tmp_path, {'train/a.txt': 'aaaa', 'valid/b.txt': 'bb'})
    source = TextFiles(str(tmp_path / 'train'), valid_path=str(tmp_path / 'valid'))
    assert [joined(source, split) for split in source.splits] == [b'aaaa', b'bb']
    assert source.describe()['valid_path'] == str(tmp_path / 'valid')
    assert 'valid_fraction' not in source.describe()


def test_what_validates_inside_of_a_folder_is_not_trained_on(tmp_path):
    write(tmp_path, {'a.txt': 'aaaa', 'valid.txt': 'cc', 'valid/b.txt': 'bb'})
    (tmp_path / 'link.txt').symlink_to(tmp_path / 'valid' / 'b.txt')
    folder = TextFiles(str(tmp_path), valid_path=str(tmp_path / 'valid'))
    assert [names(folder, split) for split in folder.splits] == [['a.txt', 'valid.txt'], ['b.txt']]
    file = TextFiles(str(tmp_path), valid_path=str(tmp_path / 'valid.txt'))
    assert [names(file, split) for split in file.splits] == [['a.txt', 'link.txt', 'valid/b.txt'], ['valid.txt']]
    (tmp_path / 'held').mkdir()
    (tmp_path / 'held' / 'a.txt').symlink_to(tmp_path / 'a.txt')
    links = TextFiles(str(tmp_path), valid_path=str(tmp_path / 'held'))
    assert [names(links, split) for split in links.splits] == [['link.txt', 'valid.txt', 'valid/b.txt'], ['a.txt']]
    within = TextFiles(str(tmp_path / 'valid'), valid_path=str(tmp_path))
    with pytest.raises(UserError, match=r'every file of .*valid is in .*, which is valid_path: none is left to'):
        names(within, 'train')


def test_which_files_of_a_folder(tmp_path):
    files = {'b.txt': 'b', 'a/c.txt': 'c', 'a/d.md': 'd', '.hidden.txt': 'h', '.git/e.txt': 'e', 'f': 'f', 'Z.txt': 'z'}
    write(tmp_path, files)
    assert list(dict.fromkeys(names(TextFiles(str(tmp_path)), 'train'))) == ['Z.txt', 'a/c.txt', 'b.txt']
    assert names(TextFiles(str(tmp_path), pattern='**/*.md'), 'train') == ['a/d.md']
    assert names(TextFiles(str(tmp_path), pattern='*.txt'), 'train') == ['Z.txt', 'b.txt']
    # A file is taken whatever the pattern.
    assert names(TextFiles(str(tmp_path / 'f')), 'train') == ['f']


def test_a_corpus_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=f'no text corpus at {tmp_path}/nowhere: no such file'):
        TextFiles(str(tmp_path / 'nowhere')).load('train', Bytes())
    with pytest.raises(UserError, match=f'no text corpus at {tmp_path}/gone'):
        TextFiles(str(write(tmp_path, {'a.txt': 'a'})), valid_path=str(tmp_path / 'gone')).load('valid', Bytes())


def test_a_folder_without_matching_files_says_what_it_has(tmp_path):
    with pytest.raises(
        UserError, match=rf"no file in {tmp_path} matches the pattern '\*\*/\*.txt'; the folder is empty"
    ):
        TextFiles(str(tmp_path)).load('train', Bytes())
    write(tmp_path, {'a.md': 'a', 'b/c.py': 'c', 'b/d.py': 'd', 'e': 'e', '.git/f': 'f', '.git/g': 'g', '.git/h': 'h'})
    with pytest.raises(UserError) as caught:
        TextFiles(str(tmp_path)).load('train', Bytes())
    found = "the files there end in .py, none, .md: set pattern, as by '--config.task.text.pattern=**/*.py'"
    assert str(caught.value).endswith(found)


def test_empty_files_are_passed_over_and_recorded(tmp_path, caplog):
    write(tmp_path, {'a.txt': 'text ' * 100, 'b.txt': '', 'c.txt': ''})
    source = TextFiles(str(tmp_path), cache=None)
    with caplog.at_level(logging.WARNING):
        text = source.load('train', Bytes())
    assert f'2 empty file(s) skipped in {tmp_path}, such as {tmp_path}/b.txt' in caplog.text
    assert text.provenance['empty_files'] == [f'{tmp_path}/b.txt', f'{tmp_path}/c.txt']
    assert text.provenance['documents'] == 1


def test_nothing_but_empty_files_is_an_error(tmp_path):
    write(tmp_path, {'a.txt': '', 'b.txt': ''})
    with pytest.raises(UserError, match=rf'{tmp_path} holds no text: 2 matching file\(s\), every one empty'):
        TextFiles(str(tmp_path)).load('train', Bytes())
    with pytest.raises(UserError, match=r'a\.txt holds no text'):
        TextFiles(str(tmp_path / 'a.txt')).load('train', Bytes())


def test_text_that_is_not_utf8_is_refused_at_its_byte(tmp_path):
    write(tmp_path, {'a.txt': 'fine', 'b/c.txt': b'abc\xffdef'})
    source = TextFiles(str(tmp_path), cache=None)
    with pytest.raises(UserError) as raised:
        source.load('train', Bytes())
    assert str(raised.value) == f"{tmp_path}/b/c.txt is not UTF-8: byte 3 is 0xff; encoding='bytes' takes any content"
    text = TextFiles(str(tmp_path), encoding='bytes', valid_path=str(tmp_path), cache=None).load('train', Bytes())
    assert text.tokens.tobytes() == b'fineabc\xffdef'


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, {'a.txt': 'a'}) / 'a.txt'

    def refuse(self):
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(type(path), 'read_bytes', refuse)
    with pytest.raises(UserError, match=f'cannot read {path}: Permission denied'):
        TextFiles(str(path)).load('train', Bytes())


def test_a_text_too_short_for_a_window(tmp_path):
    text = TextFiles(str(write(tmp_path, {'a.txt': 'short'}) / 'a.txt'), cache=None).load('train', Bytes())
    with pytest.raises(UserError, match='the text has 5 tokens and a window of length 256 needs 257'):
        Windows(text, 256)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'encoding': 'latin-1'}, "encoding of TextFiles is 'latin-1'; it must be one of utf-8, bytes"),
        ({'valid_fraction': 0.0}, 'valid_fraction of TextFiles is 0.0; it must be above 0 and below 1'),
        ({'valid_fraction': 1.5}, 'valid_fraction'),
        ({'separator': ''}, 'separator of TextFiles is empty'),
        ({'separator': '\\n\\n'}, r"has a backslash and the letter n, .*separator=\$'\\n\\n'"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(UserError, match=message):
        TextFiles('x', **arguments)


def test_a_pattern_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="pattern of TextFiles is '/etc/"):
        TextFiles(str(tmp_path), pattern='/etc/*').load('train', Bytes())


def test_loading_through_the_cache(tmp_path):
    content = ''.join(f'the {i} cats and the {i} dogs of the house\n' for i in range(400))
    write(tmp_path / 'texts', {'a.txt': content})
    source = TextFiles(str(tmp_path / 'texts'), cache=str(tmp_path / 'cache'))
    for tokenizer in (Bytes(), BytePairs(300)):
        texts = [source.load(split, tokenizer) for split in source.splits]
        decoded = [text.tokenizer.decode(text.tokens) for text in texts]
        assert b''.join(decoded).decode() == content
        assert all(isinstance(text.tokens, np.memmap) for text in texts)
    # Edited text is other text.
    write(tmp_path / 'texts', {'a.txt': content.upper()})
    assert source.load('train', Bytes()).tokens.tobytes().decode().startswith('THE 0 CATS')


def test_constructing_touches_nothing_and_survives_a_config():
    source = TextFiles('/nowhere/at/all', separator='\n\n')
    assert source.splits == ('train', 'valid')
    assert build(spec(TextFiles, path='/nowhere/at/all', separator='\n\n')) == source
