"""Evaluators made from a request, and that evaluators satisfy the protocol of the trainer."""

import dataclasses

import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.held_out import Evaluation, HeldOut
from attnlab.evals.request import Request
from attnlab.tasks.addition import Addition
from attnlab.tasks.language import LanguageModelling
from attnlab.tasks.task import Sliced, Task, Textual
from attnlab.train.setup import Evaluator, prepare
from configs.grokking import get_config


def setup_of(task, *evals):
    return dataclasses.replace(prepare(get_config()), task=task, evals=evals)


def test_evaluators_and_tasks_keep_their_protocols():
    assert all(isinstance(evaluator, Evaluator) for evaluator in (HeldOut(AtEnd()), BySlice(AtEnd())))
    text, sums = LanguageModelling(), Addition()
    assert isinstance(text, Task) and isinstance(text, Textual) and not isinstance(text, Sliced)
    assert isinstance(sums, Task) and isinstance(sums, Sliced) and not isinstance(sums, Textual)


def test_a_text_is_asked_for_tokens():
    setup = setup_of(LanguageModelling(), HeldOut(EveryNSteps(2), tokens=8))
    assert HeldOut.requested(setup, Request()).tokens is None
    assert HeldOut.requested(setup, Request(tokens=4)).split == 'valid'
    assert HeldOut.requested(setup, Request(tokens=4, stride=2)).stride == 2
    assert Request(tokens=4, stride=2).suffix == '-4-tokens-stride-2' and Request().suffix == ''
    with pytest.raises(UserError, match='--stride does not apply to Addition, which takes --examples'):
        BySlice.requested(setup_of(Addition()), Request(stride=4))
    with pytest.raises(UserError, match='--examples does not apply to LanguageModelling, which takes --tokens'):
        HeldOut.requested(setup, Request(examples=4))


def test_slices_are_the_runs_own():
    setup = setup_of(Addition(), BySlice(EveryNSteps(2), split='train', examples=7))
    found = BySlice.requested(setup, Request(multiples=(3,)))
    assert (found.split, found.examples, found.multiples) == ('train', 7, (3,))
    assert BySlice.requested(setup_of(Addition()), Request(examples=2)).split == 'test'
    with pytest.raises(UserError, match='--tokens does not apply to Addition, which takes --examples'):
        BySlice.requested(setup, Request(tokens=4))


def test_the_table_of_windows_has_a_row_for_each():
    numbers = {f'{name}{window}': 1.0 for name in ('loss', 'bits_per_byte', 'perplexity') for window in ('', '@4x')}
    table = Evaluation(numbers, {'2x': np.zeros(16), '4x': np.zeros(32)}, trained=8).table('title')
    assert [row[:2] for row in table.text()] == [['2x', '16'], ['4x', '32']]
