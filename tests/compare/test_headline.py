"""The sentence of a comparison: what is best, at what cost, and never more than the intervals say."""

import dataclasses
import math

from attnlab.compare.headline import Entrant, ranked, sentence, separated, shown_digits, stands_out
from attnlab.evals.measured import Measured, of_seeds

SURE = of_seeds([0.90, 0.91, 0.92])
LOW = of_seeds([0.50, 0.51, 0.52])
CLOSE = of_seeds([0.89, 0.90, 0.91])


def said(*entrants, higher=True, **baselines):
    return sentence(
        entrants,
        metric='accuracy',
        higher=higher,
        task='Recall',
        shown_cost=lambda cost: f'{cost:.0f} B of state',
        baselines=baselines,
    )


def test_what_is_separated_and_what_is_not():
    found = said(Entrant('low', LOW, 10.0), Entrant('sure', SURE, 20.0))
    assert found == (
        'sure has the highest accuracy on Recall, with 20 B of state: 0.910 ± 0.025 (95 %, 3 seeds); '
        'separated from the second, low (0.510 ± 0.025, 10 B of state).'
    )
    found = said(Entrant('close', CLOSE, 10.0), Entrant('sure', SURE, 20.0), Entrant('low', LOW, 5.0))
    assert found.endswith('not separated from close (0.900 ± 0.025, 10 B of state), which is cheaper.')
    assert 'low' not in found
    found = said(Entrant('a', CLOSE, 10.0), Entrant('b', SURE, 20.0), Entrant('c', SURE, 30.0))
    assert 'c (0.910 ± 0.025, 30 B of state), a (0.900 ± 0.025, 10 B of state), of which a is the cheapest' in found
    found = said(Entrant('low', LOW), Entrant('sure', SURE), higher=False)
    assert found.startswith('low has the lowest accuracy on Recall: 0.510')


def test_whoever_is_not_separated_from_the_best_is_named_and_takes_its_bold():
    spread = [Measured(*ends, 3, 'seeds') for ends in ((0.90, 0.89, 0.91), (0.87, 0.86, 0.88), (0.86, 0.70, 1.0))]
    a, b, c, d, e = map(Entrant, 'abcde', (*spread, spread[2], spread[2]))
    assert said(a, b, c).endswith(
        'separated from the second, b (0.870 ± 0.010); not separated from c (0.860 [0.700, 1.000]).'
    )
    found = said(a, b, c, d, e)
    assert found.endswith('; not separated from c (0.86 [0.70, 1.00]), d (0.86 [0.70, 1.00]) and 1 more.'), found
    cheaper = Entrant('c', spread[2], 10.0)
    assert said(Entrant('a', spread[0], 20.0), Entrant('b', spread[1], 20.0), cheaper).endswith('which is cheaper.')
    assert 'not separated from c (0.800)' in said(a, b, Entrant('c', of_seeds([0.8])))
    assert stands_out([a, b]) and not stands_out([a, b, c])
    assert stands_out([a, b, Entrant('lost', of_seeds([math.nan]))])


def test_one_seed_and_two_separate_nothing():
    one, two = of_seeds([0.9]), of_seeds([0.1, 0.2])
    assert separated(one, LOW) is None and separated(two, LOW) is None and separated(SURE, LOW)
    assert 'one seed cannot separate it from b (0.1' in said(Entrant('a', one), Entrant('b', of_seeds([0.1])))
    found = said(Entrant('a', SURE), Entrant('b', two))
    assert 'two seeds cannot separate it from b (0.15' in found
    left = Measured(0.95, None, None, 3, 'survivors')
    found = said(Entrant('a', SURE), Entrant('b', left))
    assert '0.950 (3 seeds, without those that failed); a mean that leaves out failed seeds cannot separate it' in found
    assert not stands_out([Entrant('b', left), Entrant('a', LOW)])
    assert said(Entrant('a', SURE), Entrant('b', dataclasses.replace(left, mean=0.5))).endswith(
        'cannot separate it from b (0.500 without its failed seeds).'
    )
    assert said(Entrant('a', SURE)) == 'a reaches accuracy on Recall: 0.910 ± 0.025 (95 %, 3 seeds).'
    assert said(Entrant('a', Measured(math.nan, None, None, 1, 'one'))).startswith('Nothing to compare yet')


def test_a_trivial_predictor_is_named_where_it_is_no_worse():
    assert 'trivial' not in said(Entrant('a', SURE), chance=0.1)
    assert said(Entrant('a', LOW), chance=0.1, majority=0.505).endswith(
        'which is not clearly better than the trivial predictor “majority”, 0.505.'
    )


def test_what_is_worse_than_a_trivial_predictor_is_called_worse():
    worse = 'which is worse than the trivial predictor “chance”, '
    assert said(Entrant('a', LOW), chance=0.6).endswith(worse + '0.600.')
    assert said(Entrant('a', LOW), chance=0.4, higher=False).endswith(worse + '0.400.')
    assert said(Entrant('a', of_seeds([0.5])), chance=0.6).endswith(worse + '0.6000.')
    assert 'which is not clearly better' in said(Entrant('a', of_seeds([0.5])), chance=0.5)
    assert 'trivial' not in said(Entrant('a', LOW), chance=0.6, higher=False)


def test_the_best_is_first_of_equals_the_cheapest_and_what_is_not_finite_last():
    lost = Measured(math.nan, None, None, 1, 'one')
    order = ranked([Entrant('lost', lost), Entrant('dear', SURE, 9.0), Entrant('cheap', SURE, 3.0)], higher=True)
    assert [one.name for one in order] == ['cheap', 'dear', 'lost']
    assert stands_out([Entrant('a', SURE), Entrant('b', LOW)]) and not stands_out([Entrant('a', SURE)])
    assert shown_digits([SURE]) == 3 and shown_digits([of_seeds([1.0])]) == 4


def test_small_errors_are_seen():
    small = of_seeds([3e-6, 3.2e-6, 3.1e-6])
    assert said(Entrant('a', small), higher=False) == (
        'a reaches accuracy on Recall: 0.00000310 ± 0.00000025 (95 %, 3 seeds).'
    )
    assert shown_digits([of_seeds([0.98, 0.980001, 0.980002])]) == 4
    assert shown_digits([of_seeds([3e-6])]) == 9
