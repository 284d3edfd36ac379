"""Text from a run, as the command prints it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.cli import main
from attnlab.data.text.tokenizers import load_tokenizer
from attnlab.functional.sampling import Sampling
from attnlab.models import decoding
from attnlab.models.sampling import generate
from attnlab.models.thoughts import thinking
from attnlab.runs import generation
from attnlab.runs.loading import load_run
from attnlab.train.setup import Setup
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def written(run, arguments, capsys):
    """What `attnlab generate` prints and notes for some flags."""
    asked = ['generate', f'--workdir={run}', '--tokens=6', '--compilation_cache=']
    assert main([*asked, *arguments]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def text_of(run, tokens):
    """The text of token ids, as the command prints it: bytes that are no characters are replaced."""
    return load_tokenizer(run / 'tokenizer.json').decode(np.asarray(tokens)).decode(errors='replace')


def test_of_several_processes_the_first_prints(originals, monkeypatch, capsys):
    arguments = ['--prompt=one and', '--beam=2']
    assert all(written(originals / 'run', arguments, capsys))
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    assert not any(written(originals / 'run', arguments, capsys))


def test_searches_through_the_command_are_those_of_the_models(originals, monkeypatch, capsys):
    run = originals / 'run'
    model, prompt = load_run(run).model(), np.frombuffer(b'one and', np.uint8)
    search, widths = decoding.beam_search, []

    def noting(model, prompt, steps, width, **options):
        widths.append(width)
        return search(model, prompt, steps, width, **options)

    monkeypatch.setattr(decoding, 'beam_search', noting)
    said, noted = written(run, ['--prompt=one and', '--beam=3'], capsys)
    found, total = search(model, prompt, 6, 3)
    assert said == f'one and{text_of(run, found)}\n' and noted.endswith(f'log-probability {total:.4f} nats\n')
    # After so few steps every beam finds the same text.
    assert widths == [3]
    # A penalty that is all there is takes another of so many candidates than none, so that both must have come through.
    texts = set()
    for flags, options in (
        (['--contrastive=1', '--top_k=7'], {'penalty': 1.0, 'candidates': 7}),
        (['--contrastive=1'], {'penalty': 1.0, 'candidates': 4}),
        (['--contrastive=0'], {'penalty': 0.0}),
    ):
        expected = text_of(run, list(decoding.contrastive_search(model, prompt, 6, **options)))
        said, noted = written(run, ['--prompt=one and', *flags], capsys)
        assert said == f'one and{expected}\n' and 'nats' not in noted
        texts.add(said)
    assert len(texts) == 3


def test_prompts_of_a_file_go_on_side_by_side_and_a_draft_leaves_the_text_as_it_is(originals, tmp_path, capsys):
    run = originals / 'run'
    (tmp_path / 'prompts').write_text('one\n\nand two and\nf\n')
    alone = [written(run, [f'--prompt={line}', '--temperature=0'], capsys)[0] for line in ('one', 'and two and', 'f')]
    said, _ = written(run, [f'--prompts={tmp_path / "prompts"}', '--temperature=0'], capsys)
    assert said == ''.join(f'{each}---\n' for each in alone)
    # Drawn at random, equal prompts go on each in its own way, and other seeds in others.
    (tmp_path / 'prompts').write_text('one\none\n')
    drawn = [written(run, [f'--prompts={tmp_path / "prompts"}', f'--seed={seed}'], capsys)[0] for seed in (0, 0, 1)]
    first, second, end = drawn[0].split('\n---\n')
    assert end == '' and first != second and drawn[0] == drawn[1] != drawn[2]
    # The likeliest tokens are those of the model alone, and of a run that is its own draft all are taken.
    said, noted = written(run, ['--prompt=one', '--temperature=0', f'--draft={run}', '--ahead=1'], capsys)
    assert said == alone[0]
    assert '6 tokens in 3 readings of the model, each with up to 1 of the draft' in noted


def test_thoughts_through_the_command_are_those_of_the_definition(originals, monkeypatch, capsys):
    run = originals / 'run'
    model, prompt = load_run(run).model(), np.frombuffer(b'one and', np.uint8)
    for count in (1, 3):
        # By reading the row again for every thought, without states.
        hidden, _ = thinking(model, jnp.asarray(prompt, jnp.int32)[None], count)
        expected = list(generate(model, prompt, 6, Sampling(0.0), thoughts=count))
        assert expected[0] == int(jnp.argmax(model.logits(hidden[:, -1])))
        text, _ = written(run, ['--prompt=one and', '--temperature=0', f'--thoughts={count}'], capsys)
        assert text == f'one and{text_of(run, expected)}\n'
    # After so few steps all think alike: that the number comes through is seen where it arrives.
    arrived = []

    def noting(model, prompt, steps, sampling, **options):
        arrived.append(options['thoughts'])
        # The compiler of the run, which knows its mesh and, on GPUs, what gives the same bits.
        assert options['jit'].__func__ is Setup.jit
        return generate(model, prompt, steps, sampling, **options)

    monkeypatch.setattr(generation, 'generate', noting)
    for flags in ([], ['--thoughts=2']):
        written(run, ['--prompt=one and', *flags], capsys)
    assert arrived == [0, 2]
    for flags, complaint in (
        (['--thoughts=2', '--beam=2'], '--thoughts is for what is drawn token by token; leave out --beam'),
        (['--thoughts=-1'], 'thoughts=-1'),
    ):
        assert main(['generate', f'--workdir={run}', '--compilation_cache=', *flags]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize('tested', ['all', 'drawn'])
def test_a_text_that_matches(originals, capsys, tested):
    asked = ['generate', f'--workdir={originals / "run"}', '--prompt=one', '--tokens=9', '--compilation_cache=']
    expression = r' (\d{2,3}|ß+), .*'
    assert main([*asked, f'--regex={expression}', f'--tested={tested}']) == 0
    printed = capsys.readouterr()
    text = printed.out.removesuffix('\n').removeprefix('one')
    assert re.fullmatch(expression, text) and len(text.encode()) == 9
    assert re.search(r'log-weight -\d+\.\d{4} nats, .*; \d[\d,]* tokens tested', printed.err)
    assert 'the mean of whose exponential over seeds is the probability of such texts; ' in printed.err
    # A text ends where the pattern does.
    assert main([*asked, '--regex=[a-c]{3}', f'--tested={tested}', '--seed=1']) == 0
    assert re.fullmatch('one[a-c]{3}\n', capsys.readouterr().out)


def test_what_weights_are_of_where_not_all_is_drawn(originals, capsys):
    asked = ['generate', f'--workdir={originals / "run"}', '--regex=[a-c]{2}', '--tokens=2', '--compilation_cache=']
    for flags, said in (
        (['--top_k=1'], 'is the probability of those of such texts that --top_k, --top_p and --min_p leave; '),
        (['--temperature=0.5'], 'is, at temperature 0.5, the probability of such texts; '),
    ):
        assert main([*asked, *flags]) == 0
        printed = capsys.readouterr().err
        assert said in printed and 'is the probability of such texts' not in printed


@pytest.mark.parametrize('tested', ['all', 'drawn'])
def test_a_text_of_a_grammar(originals, tmp_path, capsys, tested):
    asked = ['generate', f'--workdir={originals / "run"}', '--prompt=one', '--tokens=8', '--compilation_cache=']
    (tmp_path / 'nested.lark').write_text('start: "<" (start | /[a-d]/) ">"')
    for seed in range(3):
        assert main([*asked, f'--grammar={tmp_path / "nested.lark"}', f'--tested={tested}', f'--seed={seed}']) == 0
        printed = capsys.readouterr()
        depth = printed.out.count('<')
        # Three at most, in eight bytes.
        assert depth in (1, 2, 3) and re.fullmatch(f'one<{{{depth}}}[a-d]>{{{depth}}}\n', printed.out)
    assert re.search(r'log-weight -\d+\.\d{4} nats, .*; \d[\d,]* tokens tested', printed.err)
