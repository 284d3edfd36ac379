"""Labels of runs and their parts, runs grouped by them, and how seeds are drawn."""

import pytest

from attnlab.errors import UserError
from attnlab.experiment.experiment import label_of, parts_of
from attnlab.experiment.results import at_best_rate, grouped, panels, rate_of, seeds_on_bar, seeds_on_line


def test_a_label_gives_back_the_parts_that_it_is_made_of():
    assert label_of('gla', 'low', 0) == 'gla-low-0' and parts_of('gla-low-0') == ('gla', 'low', '0')
    with pytest.raises(UserError, match="parts of a label are 'gla', '1e-05'; none may have a dash"):
        label_of('gla', '1e-05')


def test_runs_are_grouped_by_all_parts_but_the_last():
    def run(*parts, loss=0.0):
        return {'label': label_of(*parts), 'loss': loss}

    seeds = [run('b', 0), run('a', 0), run('b', 1)]
    assert list(grouped(seeds).items()) == [('b', [seeds[0], seeds[2]]), ('a', [seeds[1]])]
    assert grouped([run('a', 'x', 'low', 0)]).keys() == {('a', 'x', 'low')}
    assert grouped([{'report': 'recall', 'study': label_of('gla', 'all')}]).keys() == {'gla'}
    losses = (('a', 'low', 0.3), ('a', 'high', 0.2), ('b', 'low', 0.1), ('b', 'high', 0.4))
    runs = [run(*key, seed, loss=loss + seed) for *key, loss in losses for seed in (0, 1)]
    for highest, rates in ((False, {'a': 'high', 'b': 'low'}), (True, {'a': 'low', 'b': 'high'})):
        best = at_best_rate(runs, lambda row: row['loss'], highest=highest)
        assert {key: [rate_of(row) for row in seeds] for key, seeds in best.items()} == {
            key: [rate] * 2 for key, rate in rates.items()
        }


def test_seeds_are_points_about_their_mean():
    _, (line, bar) = panels(2)
    seeds_on_line(line, [0, 1], [[1.0, 3.0], [4.0]], 'C0', 'gla')
    assert [tuple(each.get_ydata()) for each in line.lines] == [(2.0, 4.0), (1.0, 3.0), (4.0,)]
    seeds_on_bar(bar, 0, [1.0, 3.0], 'C0')
    seeds_on_bar(bar, 1, [], 'C0')
    assert [each.get_height() for each in bar.patches] == [2.0, 0.0]
    assert [tuple(each.get_ydata()) for each in bar.lines] == [(1.0, 3.0), ()]
