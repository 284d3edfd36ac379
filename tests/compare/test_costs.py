"""The names of costs: one table, whose fields are those of what is compared."""

import dataclasses

import pytest

from attnlab.compare.costs import COSTS, WEIGHTS, matched_cost
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
