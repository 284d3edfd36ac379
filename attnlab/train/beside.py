"""Names of the numbers that stand beside a metric in a run's record: ends of its interval, and what was counted."""

ENDS = ('_low', '_high')
"""How the names of the ends of an interval end."""

ACCESSORY = (*ENDS, 'tokens', 'documents', 'examples')
"""How the names end of what is no metric."""


def interval_ends(metric: str) -> tuple[str, str]:
    """The names of the ends of a metric's interval; what follows an `@`, such as a window, stays at the end."""
    stem, at, suffix = metric.partition('@')
    low, high = (f'{stem}{end}{at}{suffix}' for end in ENDS)
    return low, high


def is_accessory(name: str) -> bool:
    """Whether a number is an end of an interval, or counts what was evaluated."""
    return name.partition('@')[0].endswith(ACCESSORY)
