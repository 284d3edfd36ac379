"""The names of costs: one table, whose fields are those of what is compared."""

import dataclasses

import pytest

from attnlab.compare.costs import COSTS, LARGE, OPENING, WEIGHTS, matched_cost, pareto
from attnlab.compare.report.contents import Costs
from attnlab.compare.runs import OF_RUNS, RunResult


def test_costs_are_fields_of_what_is_compared():
    assert list(COSTS) == [field.name for field in dataclasses.fields(Costs)]
    assert {*OF_RUNS, *WEIGHTS} <= set(COSTS) & {field.name for field in dataclasses.fields(RunResult)} | {'bits'}
    assert [field for field, cost in COSTS.items() if cost.more_is_better] == ['tokens_per_second']


@pytest.mark.parametrize(
    ('by', 'field'),
    [
        ('params', 'parameters'),
        ('train_flops', 'flops'),
        ('decode_ms', 'decode_ms'),
        ('state_bytes@32', 'state_bytes'),
        ('state_bytes@256', 'state_bytes_8x'),
        ('state_bytes@64', None),
        ('', None),
    ],
)
def test_the_cost_that_was_matched(by, field):
    assert matched_cost(by, 32) == field


def test_costs_of_a_page_have_their_titles_and_those_of_the_large_figure_its_words():
    assert set(OPENING) == {field for field, cost in COSTS.items() if cost.title}
    assert set(LARGE) == {field for field, cost in COSTS.items() if cost.large}


def test_pareto_marks():
    assert pareto([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0), (3.0, 3.0), None]) == [True, True, True, False, False]
    assert pareto([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0)]) == [True, True, False]
    assert pareto([(2.0, 1.0), (1.0, 1.0)]) == [False, True]
