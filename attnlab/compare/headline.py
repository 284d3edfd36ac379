"""The sentence that a comparison opens with: what is best, at what cost, and whether the intervals say so."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from attnlab.evals.measured import Kind, Measured


@dataclasses.dataclass(frozen=True)
class Entrant:
    """One of the things compared.

    Attributes:
      name: of the run or study.
      score: what it reached.
      cost: what that cost; `None` where it is not known.
    """

    name: str
    score: Measured
    cost: int | float | None = None


def ranked(entrants: Sequence[Entrant], *, higher: bool) -> list[Entrant]:
    """The best first; of equal scores the cheaper first; scores that are not finite last."""

    def key(one: Entrant) -> tuple[bool, float, float]:
        score = one.score.mean
        if not math.isfinite(score):
            return (True, 0.0, 0.0)
        return (False, -score if higher else score, math.inf if one.cost is None else one.cost)

    return sorted(entrants, key=key)


def separated(one: Measured, other: Measured) -> bool | None:
    """Whether two intervals over seeds do not overlap; `None` where either has none: one seed, two, or failed ones.

    That two intervals at 95 % do not overlap is more than a test of their difference at 5 % would ask.
    """
    if one.kind != 'seeds' or other.kind != 'seeds':
        return None
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return None
    return one.low > other.high or one.high < other.low


def stands_out(order: Sequence[Entrant]) -> bool:
    """Whether the first of those ranked is separated from every other whose score is finite."""
    found = [one.score for one in order if math.isfinite(one.score.mean)]
    return len(found) > 1 and all(separated(found[0], other) for other in found[1:])


def sentence(
    entrants: Sequence[Entrant],
    *,
    metric: str,
    higher: bool,
    task: str,
    shown_cost: Callable[[float], str],
    baselines: Mapping[str, float],
) -> str:
    """What is best at what cost, whether intervals separate it from the others, and what a trivial predictor reaches
    where that is no worse; `shown_cost` gives a cost with its unit.
    """
    order = [one for one in ranked(entrants, higher=higher) if math.isfinite(one.score.mean)]
    if not order:
        return f'Nothing to compare yet: no {metric} on {task} is known.'
    digits = shown_digits([one.score for one in order])

    def described(one: Entrant) -> str:
        price = '' if one.cost is None else f', {shown_cost(one.cost)}'
        lacking = ' without its failed seeds' if one.score.kind == 'survivors' else ''
        return f'{one.score.text(digits)}{lacking}{price}'

    best, *others = order
    price = '' if best.cost is None else f', with {shown_cost(best.cost)}'
    verb = 'reaches' if not others else f'has the {"highest" if higher else "lowest"}'
    parts = [f'{best.name} {verb} {metric} on {task}{price}: {best.score.text(digits)}']
    parts[0] += _evidence(best.score) if not others or best.score.kind != 'one' else ''
    if others:
        parts.append(_verdict(best, others, described, shown_cost))
    parts += _against(best.score, baselines, digits, higher=higher)
    return '; '.join(parts) + '.'


def _evidence(score: Measured) -> str:
    """What the number is over."""
    if score.kind == 'one':
        return ' (one seed)'
    if score.kind == 'range':
        return ' (the mean and range of 2 seeds)'
    if score.kind == 'survivors':
        return f' ({"one seed" if score.n == 1 else f"{score.n} seeds"}, without those that failed)'
    if score.kind == 'seeds':
        return f' (95 %, {score.n} seeds)'
    return f' (one seed, {score.n:,} {score.kind})'


def _verdict(
    best: Entrant,
    others: Sequence[Entrant],
    described: Callable[[Entrant], str],
    shown_cost: Callable[[float], str],
) -> str:
    second = others[0]
    found = separated(best.score, second.score)
    close = [one for one in others if separated(best.score, one.score) is not True]
    if found:
        # The interval of one that is no better in the mean may be wide enough to have the best in it.
        text = f'separated from the second, {second.name} ({described(second)})'
        return f'{text}; {_not_separated(best, close, described, shown_cost)}' if close else text
    if found is None:
        little = _too_little({best.score.kind, second.score.kind})
        return f'{little} cannot separate it from {second.name} ({described(second)})'
    return _not_separated(best, close, described, shown_cost)


def _too_little(kinds: Collection[Kind]) -> str:
    """What separates no two scores, by their kinds."""
    if 'survivors' in kinds:
        return 'a mean that leaves out failed seeds'
    return 'two seeds' if set(kinds) <= {'seeds', 'range'} else 'one seed'


def _not_separated(
    best: Entrant,
    close: Sequence[Entrant],
    described: Callable[[Entrant], str],
    shown_cost: Callable[[float], str],
) -> str:
    """Which the best is not separated from, the first two by name, and whether that would be cheaper."""
    named = ', '.join(f'{one.name} ({described(one)})' for one in close[:2])
    rest = f' and {len(close) - 2} more' if len(close) > 2 else ''
    cheaper = [one for one in close if one.cost is not None and best.cost is not None and one.cost < best.cost]
    text = f'not separated from {named}{rest}'
    if cheaper and len(close) == 1:
        text += ', which is cheaper'
    elif cheaper:
        least = min(cheaper, key=lambda one: one.cost or 0.0)
        text += f', of which {least.name} is the cheapest ({shown_cost(least.cost or 0.0)})'
    return text


def _against(score: Measured, baselines: Mapping[str, float], digits: int, *, higher: bool) -> list[str]:
    """The best trivial predictor, where the score is not clearly better: worse, if all of its interval is."""
    if not baselines:
        return []
    name, value = (max if higher else min)(baselines.items(), key=lambda item: item[1])
    sign = 1 if higher else -1
    ends = [sign * (score.mean if end is None else end) for end in (score.low, score.high)]
    if min(ends) > sign * value:
        return []
    verdict = 'worse' if max(ends) < sign * value else 'not clearly better'
    return [f'which is {verdict} than the trivial predictor “{name}”, {value:.{digits}f}']


def shown_digits(scores: Sequence[Measured]) -> int:
    """Decimals: two digits of the typical error, from 2 to 4; four where no error is known.

    Where all scores are below 0.1 up to 9, so that four digits of the largest are seen.
    """
    largest = max((abs(one.mean) for one in scores if math.isfinite(one.mean)), default=0.0)
    most = min(max(3 - math.floor(math.log10(largest)), 4), 9) if largest else 4
    errors = sorted(one.half_width for one in scores if one.half_width)
    if not errors:
        return most
    return min(max(1 - math.floor(math.log10(errors[len(errors) // 2])), 2), most)
