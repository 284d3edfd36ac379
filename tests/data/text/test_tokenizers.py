import hashlib
import json
import sys
import time

import numpy as np
import pytest

from attnlab.config import build, spec
from attnlab.data.text import tokenizers
from attnlab.data.text.tokenizers import (
    BytePairs,
    Bytes,
    StreamDecoder,
    encode_prompt,
    load_tokenizer,
    save_tokenizer,
)
from attnlab.errors import UserError

LINE = b'the cat sat on the mat; the quick brown fox jumps over the lazy dog, and the dog over the cat.\n'
TEXT = LINE * 20
STRANGE = [
    b'',
    b'\x00\t \n\n  \r\n',
    'naïve façade, 日本語, \U0001f600\u200d\ufeff \ud7ff\ue000'.encode(),
    'é'.encode() * 50,
    b'    def f(self):\n\n\n        return  1\n',
    b"I'll don't we've  it's",
]


@pytest.fixture(scope='module')
def pairs():
    return BytePairs(vocab=300).train([TEXT, 'größer als größe '.encode() * 30])


def test_bytes_are_their_own_tokens():
    tokenizer = Bytes()
    (ids,) = tokenizer.encode([b'a\xff\x00'])
    assert ids.tolist() == [97, 255, 0]
    assert tokenizer.decode(ids) == b'a\xff\x00'
    assert tokenizer.vocab == 256
    assert tokenizer.token_bytes.tolist() == [1] * 256


@pytest.mark.parametrize('content', STRANGE)
def test_byte_pairs_round_trip_whatever_is_utf8(pairs, content):
    (ids,) = pairs.encode([content])
    assert ids.dtype == np.uint16
    assert pairs.decode(ids) == content
    assert pairs.token_bytes[ids].sum() == len(content)


def test_byte_pairs_decode_all_ids_and_count_their_bytes(pairs):
    pieces = [pairs.decode([index]) for index in range(pairs.vocab)]
    assert [len(piece) for piece in pieces] == pairs.token_bytes.tolist()
    assert sorted(piece[0] for piece in pieces if len(piece) == 1) == list(range(256))
    assert len(set(pieces)) == pairs.vocab == 300


def test_byte_pairs_learn_what_is_frequent(pairs):
    (ids,) = pairs.encode([TEXT])
    assert len(ids) < len(TEXT) / 2
    assert b' the' in [pairs.decode([index]) for index in ids.tolist()]


def test_byte_pairs_decode_as_the_library_does(pairs):
    library = pytest.importorskip('tokenizers')
    theirs = library.Tokenizer.from_str(pairs.definition)
    theirs.decoder = library.decoders.ByteLevel()
    ids = pairs.encode([STRANGE[2] + TEXT])[0].tolist()
    assert theirs.decode(ids) == pairs.decode(ids).decode()


def test_training_again_gives_the_same():
    first, second = (BytePairs(268).train(iter([TEXT])) for _ in range(2))
    assert first.hash == second.hash
    assert first.hash != BytePairs(269).train([TEXT]).hash


def test_training_stops_at_train_bytes():
    rest = [b'zq' * 1000]
    assert BytePairs(268, train_bytes=len(TEXT)).train([TEXT, *rest]).hash == BytePairs(268).train([TEXT]).hash
    assert BytePairs(268, train_bytes=len(TEXT) + 1).train([TEXT, *rest]).hash != BytePairs(268).train([TEXT]).hash


@pytest.mark.parametrize('run', ['ACGTTGCA', 'été', '0123456789', '_-=+', ' \t', ' '])
def test_runs_without_a_break_are_cut_for_training(run):
    text = 'a word ' + run * (10_000 // len(run)) + '\nmore words\n'
    parts = list(tokenizers._head([text.encode()], len(text)))
    assert ''.join(parts) == text
    assert len(parts) == 3
    # 300 kB in one took 20 s and more.
    rest = run.encode() * (300_000 // len(run.encode()))
    start = time.monotonic()
    assert BytePairs(258).train([rest, TEXT]).vocab == 258
    assert time.monotonic() - start < 5


def test_ordinary_text_is_not_cut():
    text = (TEXT * 100).decode() + 'ab1-_é ' * 10_000 + 'w' + '-' * 4095 + 'w' * 4095 + ' ' * 4095
    assert list(tokenizers._cut(text)) == [text]
    assert list(tokenizers._head([text.encode(), b'', b'x'], 10**9)) == [text, 'x']


def test_long_texts_are_encoded_in_pieces(pairs, monkeypatch):
    content = TEXT + 'ünbroken'.encode() * 40
    whole = pairs.encode([content])[0]
    for size in (7, 64, 4096):
        monkeypatch.setattr(tokenizers, 'PIECE', size)
        ids = pairs.encode([b'x', content])[1]
        assert pairs.decode(ids) == content
        assert len(ids) >= len(whole)
    # Cut only where a line ends, nothing is lost.
    monkeypatch.setattr(tokenizers, 'PIECE', len(LINE) + 5)
    assert np.array_equal(pairs.encode([TEXT])[0], np.tile(pairs.encode([LINE])[0], 20))


def test_text_that_is_not_utf8_is_refused_at_its_byte(pairs, monkeypatch):
    monkeypatch.setattr(tokenizers, 'PIECE', 16)
    with pytest.raises(UserError, match='byte 40 is 0xff; the Bytes tokenizer takes any content'):
        pairs.encode([b'good', b'g' * 40 + b'\xff' + b'g' * 40])


def test_pieces_end_even_where_no_character_does(pairs, monkeypatch):
    monkeypatch.setattr(tokenizers, 'PIECE', 16)
    with pytest.raises(UserError, match='byte 0 is 0x80'):
        pairs.encode([b'\x80' * 100])


def test_vocabularies_that_cannot_be():
    with pytest.raises(UserError, match='vocab of BytePairs is 255; the single bytes alone are 256'):
        BytePairs(255).train([TEXT])
    with pytest.raises(UserError, match=r'vocab of BytePairs is 100000, but the training text yields only \d+ tokens'):
        BytePairs(100_000).train([TEXT])


def test_prompts_are_text_and_not_empty():
    np.testing.assert_array_equal(encode_prompt(Bytes(), 'aß'), [97, 195, 159])
    for text, said in (('', 'the prompt is empty'), ('a\udcff', "the prompt is not UTF-8: 'a.udcff'; give it in")):
        with pytest.raises(UserError, match=said):
            encode_prompt(Bytes(), text)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    with pytest.raises(UserError, match=r'pip install "attnlab\[bpe\]"'):
        BytePairs().train([TEXT])


def test_saving_and_loading(pairs, tmp_path):
    for tokenizer in (Bytes(), pairs):
        path = tmp_path / 'tokenizer.json'
        save_tokenizer(tokenizer, path)
        assert load_tokenizer(path) == tokenizer
        assert load_tokenizer(path).encode([TEXT])[0].tolist() == tokenizer.encode([TEXT])[0].tolist()
    assert [file.name for file in tmp_path.iterdir()] == ['tokenizer.json']


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_tokenizer_files_that_are_missing_damaged_or_altered(pairs, tmp_path):
    path = tmp_path / 'tokenizer.json'
    with pytest.raises(UserError, match=rf'cannot read the tokenizer {path}: No such file'):
        load_tokenizer(path)
    definitions = '{}', '[]', '5', '{"model": {"vocab": {"a": 0}}}', json.loads(pairs.definition) | {'model': {}}
    written = [
        json.dumps({'kind': 'byte pairs', 'vocab': vocab, 'hash': digest(text), 'definition': text})
        for vocab, text in (
            *((pairs.vocab, one if isinstance(one, str) else json.dumps(one)) for one in definitions),
            *((other, pairs.definition) for other in (3, pairs.vocab + 1, 'many')),
        )
    ]
    number = '{"kind": "byte pairs", "vocab": 3, "hash": "a", "definition": 5}'
    for content in ('', '{', '{}', '[]', '{"kind": "byte pairs", "vocab": 3}', number, '[' * 100_000, *written):
        path.write_text(content)
        with pytest.raises(UserError, match=f'{path} is not a tokenizer'):
            load_tokenizer(path)
    save_tokenizer(pairs, path)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {'definition': fields['definition'].replace('cat', 'dog')}))
    with pytest.raises(UserError, match='was altered'):
        load_tokenizer(path)


ANOTHERS = {
    'a normalizer': ({'normalizer': {'type': 'Lowercase'}}, 'its normalizer is '),
    'truncation': (
        {'truncation': {'direction': 'Right', 'max_length': 4, 'strategy': 'LongestFirst', 'stride': 0}},
        'its truncation is ',
    ),
    'padding': (
        {
            'padding': {
                'strategy': {'Fixed': 8},
                'direction': 'Right',
                'pad_to_multiple_of': None,
                'pad_id': 0,
                'pad_type_id': 0,
                'pad_token': '!',
            }
        },
        'its padding is ',
    ),
    'a post-processor': (
        {'post_processor': {'type': 'BertProcessing', 'sep': ['!', 0], 'cls': ['"', 1]}},
        'its post_processor is ',
    ),
    'a decoder': ({'decoder': {'type': 'Fuse'}}, 'its decoder is '),
    'no pre-tokenizer': ({'pre_tokenizer': None}, 'its pre_tokenizer is None, where attnlab writes {'),
    'spaces before': (
        {'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True, 'use_regex': True}},
        "its pre_tokenizer is .*'add_prefix_space': True",
    ),
    'dropout': ({'model': {'dropout': 0.5}}, 'its dropout is 0.5, where attnlab writes None'),
    'another model': ({'model': {'type': 'WordLevel', 'unk_token': '!', 'merges': None}}, "its type is 'WordLevel'"),
    'a token that is added': (
        {
            'added_tokens': [
                {
                    'id': 5,
                    'content': '&',
                    'single_word': False,
                    'lstrip': True,
                    'rstrip': True,
                    'normalized': False,
                    'special': True,
                }
            ]
        },
        'its added_tokens is ',
    ),
}


@pytest.mark.parametrize('case', ANOTHERS)
def test_a_definition_that_another_program_wrote_is_refused_by_name(pairs, tmp_path, case):
    changed, said = ANOTHERS[case]
    definition = json.loads(pairs.definition)
    definition |= changed | {'model': definition['model'] | changed.get('model', {})}
    with pytest.raises(UserError, match=f'tokenizer.json is not a tokenizer that attnlab wrote: .*{said}'):
        reloaded(definition, pairs.vocab, tmp_path)


def reloaded(definition, vocab, folder):
    path = folder / 'tokenizer.json'
    save_tokenizer(tokenizers.TrainedBytePairs(vocab, json.dumps(definition)), path)
    return load_tokenizer(path)


def test_ids_run_from_0_and_every_byte_has_one(pairs, tmp_path):
    definition = json.loads(pairs.definition)
    merges, vocab = definition['model']['merges'], definition['model']['vocab']
    last = max(vocab, key=vocab.get)
    definition['model']['vocab'] = vocab | {last: 1000}
    with pytest.raises(UserError, match='its ids do not run from 0 without a gap'):
        reloaded(definition, pairs.vocab, tmp_path)
    definition['model'] |= {'vocab': {'x': 0} | {token: i for token, i in vocab.items() if token != '!' and i < 256}}
    definition['model'] |= {'merges': []}
    with pytest.raises(UserError, match='vocab is 300, and the definition has 255 tokens'):
        reloaded(definition, pairs.vocab, tmp_path)
    kept = [token for token in sorted(vocab, key=vocab.get) if token != '!']
    definition['model'] |= {'vocab': {token: i for i, token in enumerate(kept)}, 'merges': merges}
    with pytest.raises(UserError, match='it has no token for the byte 0x21'):
        reloaded(definition, pairs.vocab - 1, tmp_path)


def test_merges_as_the_library_wrote_them_before_0_20_are_read(pairs, tmp_path):
    definition = json.loads(pairs.definition)
    definition['model']['merges'] = [' '.join(pair) for pair in definition['model']['merges']]
    del definition['model']['ignore_merges']
    assert reloaded(definition, pairs.vocab, tmp_path).encode([TEXT])[0].tolist() == pairs.encode([TEXT])[0].tolist()


@pytest.mark.parametrize('content', [*STRANGE, b'\xf0\x9f\x98', b'a\xffb\xc3', bytes(range(256))])
def test_stream_decoding_byte_by_byte_gives_what_decoding_at_once_does(content):
    decoder = StreamDecoder(Bytes())
    pieces = [decoder.feed([byte]) for byte in content]
    assert ''.join([*pieces, decoder.finish()]) == content.decode('utf-8', errors='replace')


def test_stream_decoding_holds_back_unfinished_characters(pairs):
    decoder = StreamDecoder(Bytes())
    assert [decoder.feed([byte]) for byte in 'é!'.encode()] == ['', 'é', '!']
    decoder.feed([0xF0])
    assert decoder.finish() == '\ufffd'
    assert decoder.feed(np.array([97])) == 'a'
    decoder = StreamDecoder(pairs)
    content = STRANGE[2] + TEXT
    pieces = [decoder.feed([index]) for index in pairs.encode([content])[0].tolist()]
    assert ''.join(pieces) == content.decode()


def test_specs():
    assert build(spec(Bytes)) == Bytes()
    assert build(spec(BytePairs, vocab=512)) == BytePairs(512)
