"""The ablations of kNN-LM on a model of bytes: what is compared, by how many, of how many, and of which text."""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np

from attnlab.analysis.neighbours import KEYS, Compared, Found, compared, log_probabilities, mixed, nearest
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.data.text.corpus import Corpus, Document
from attnlab.data.text.windows import Sample
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.settings import small_text

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
SEEDS = 3
KEY = 'mlp'
"""The paper's, by which stores of other sizes and of other text are asked."""

COUNTS = (1, 4, 16, 64, 256)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TEMPERATURES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
PARTS = (16, 8, 4, 2)
"""Of the rows of the store one in so many is kept."""

ROWS_AT_ONCE = 16


class Sizes(NamedTuple):
    """How many tokens are stored, and how many of held-out text are asked, half of them to choose by."""

    stored: int
    asked: int


SIZES = {'cpu': Sizes(65_536, 16_384), 'full': Sizes(1_048_576, 65_536)}


def runs(size):
    """A model a seed."""
    return [Run(f'{seed}', config(seed, size)) for seed in range(SEEDS)]


def config(seed, size):
    """Softmax attention on the standard library's sources."""
    found = config_of(CONFIG, f'zoo=mha,size={"tiny" if size == "cpu" else "10m"}')
    with found.unlocked():
        found.seed = seed
        if size == 'cpu':
            small_text(found, steps=600, batch=16, length=128)
        found.checkpoint.every = found.steps
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=SIZES[size].asked),)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


@dataclasses.dataclass(frozen=True)
class Topics(Corpus):
    """The help texts of Python, in English: documents of another kind than the sources. Every fifth is held out."""

    cache: None = None

    @property
    def splits(self):
        return ('train', 'valid')

    def documents(self, split):
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UserError('this Python has no pydoc_data, whose help texts are the other text') from error
        for number, (name, text) in enumerate(sorted(topics.items())):
            if (number % 5 == 0) == (split == 'valid'):
                yield Document(name, text.encode())

    def describe(self):
        return {'source': 'pydoc_data.topics'}


class Asked(NamedTuple):
    """Held-out text: what is compared, and which of it belongs to the half that is chosen by."""

    read: Compared
    chooses: np.ndarray


def measure(finished: Finished):
    """Losses, in nats a byte: by key, and by the paper's key of parts of the store and of another text.

    Neighbours, share and temperature are chosen on half of the held-out documents; all losses are of the other half.
    """
    loaded, sizes = finished.loaded, SIZES[finished.size]
    task = loaded.setup.task
    own, other = task.load, lambda split: Topics().load(split, task.tokenizer)
    kept = rows(loaded, own('train'), sizes.stored)
    stored = compared(loaded, batches(kept), tuple(KEYS))
    asked = held_out(loaded, own('valid'), sizes.asked, tuple(KEYS))
    by_key = {key: ablated(stored, asked, key) for key in KEYS}
    parts = [part(stored, kept, every) for every in PARTS]
    by_size = {len(each.targets): ablated(each, asked, KEY)['chosen'] for each in parts}
    by_size[len(stored.targets)] = by_key[KEY]['chosen']
    told = compared(loaded, batches(rows(loaded, other('train'), sizes.stored)), (KEY,))
    strange = held_out(loaded, other('valid'), sizes.asked, (KEY,))
    return {
        'loss': alone(asked),
        'by_key': by_key,
        'by_size': by_size,
        'other': {
            'loss': alone(strange),
            'of the text trained on': ablated(stored, strange, KEY)['chosen'],
            'of the other text': ablated(told, strange, KEY)['chosen'],
        },
    }


def rows(loaded, text, tokens):
    """Rows spread over a text, as many as make whole batches."""
    source = Sample(text, loaded.setup.length, tokens)
    return whole([source[index] for index in range(len(source))])


def whole(found):
    """Without those that do not fill a batch."""
    return found[: len(found) - len(found) % ROWS_AT_ONCE]


def batches(found):
    """Rows as batches of equal size."""
    return [
        {name: np.stack([row[name] for row in found[start : start + ROWS_AT_ONCE]]) for name in found[0]}
        for start in range(0, len(found), ROWS_AT_ONCE)
    ]


def held_out(loaded, text, tokens, keys):
    """Held-out text of which documents of even number choose. A row that begins in one belongs to it as a whole."""
    halves = [[row for row in rows(loaded, text, tokens) if row['documents'][0] % 2 == odd] for odd in (0, 1)]
    read = [compared(loaded, batches(whole(half)), keys) for half in halves]
    both = Compared(
        {key: np.concatenate([each.states[key] for each in read]) for key in keys},
        np.concatenate([each.targets for each in read]),
        np.concatenate([each.losses for each in read]),
    )
    return Asked(both, np.arange(len(both.targets)) < len(read[0].targets))


def part(stored, kept, every):
    """What a store has of one in so many of its rows."""
    numbers = np.repeat(np.arange(len(kept)), [np.count_nonzero(row['weights']) for row in kept])
    there = numbers % every == 0
    return Compared(
        {key: states[there] for key, states in stored.states.items()}, stored.targets[there], stored.losses[there]
    )


def alone(asked):
    """The model's own loss where results are reported."""
    return float(np.mean(asked.read.losses[~asked.chooses]))


def ablated(stored, asked, key):
    """What is chosen, and the loss of every number of neighbours and of every share with the rest chosen for it."""
    read = asked.read
    found = nearest(stored.states[key], stored.targets, read.states[key], max(COUNTS))
    tried = [
        {'count': count, 'temperature': temperature, 'share': share, 'choosing': choosing, 'loss': loss}
        for count in COUNTS
        for temperature in TEMPERATURES
        for share, choosing, loss in losses(found.first(count), asked, temperature)
    ]
    best = min(tried, key=by_choice)
    return {
        'chosen': best,
        **{
            f'by_{name}': [min((one for one in tried if one[name] == value), key=by_choice) for value in values]
            for name, values in (('count', COUNTS), ('share', SHARES), ('temperature', TEMPERATURES))
        },
    }


def losses(found: Found, asked, temperature):
    """Share, loss of the half that chooses, loss of the half that is reported."""
    likely = log_probabilities(found, asked.read.targets, temperature)
    for share in SHARES:
        halves = [mixed(asked.read.losses[half], likely[half], share) for half in (asked.chooses, ~asked.chooses)]
        yield share, *halves


def by_choice(one):
    """The loss of the half that chooses."""
    return one['choosing']
