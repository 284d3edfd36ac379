"""Reconstruction of a chaotic system from one trajectory, by an almost-linear RNN (AL-RNN) that then runs on its own.

    attnlab train --config=dynamics:data=lorenz,rectified=2 --workdir=runs/lorenz

- `data`: one of `SYSTEMS`, simulated series whose law is known;
- `state`: the number of hidden units, the first of which are the observed variables;
- `rectified`: how many of them, counted from the last, are rectified; the map is linear in each of at most
  `2^rectified` regions;
- `forcing`: in training, every `forcing`-th row of the data overwrites the observed units (sparse teacher forcing);
- `size`: `tiny`, minutes on a CPU core, or `paper`, with the published number of steps.

At the end of a run the model is let run freely, and its attractor, power spectrum, regions and largest Lyapunov
exponent are evaluated (`attnlab.evals.attractor`).

Brenner et al. 2024, https://arxiv.org/abs/2410.14240, train with RAdam and a learning rate that decays exponentially
from 1e-3 to 1e-5; here it is AdamW without weight decay, with gradients clipped at 1 and a single cosine. `optimizer`,
`schedule` and `rounding` are as in `configs/language.py`.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec, whole
from attnlab.data.series.drawn import DrawnSeries, Henon, Lorenz
from attnlab.evals.attractor import Attractor
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.models.dynamics import AlmostLinearDynamics
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.reconstruction import Reconstruction
from attnlab.train.optimizer import AdamW
from attnlab.train.schedule import Cosine
from attnlab.train.step import Precision

SYSTEMS: Mapping[str, DrawnSeries] = MappingProxyType(
    {
        'lorenz': DrawnSeries(Lorenz(step=0.01), rows=50_000),
        'henon': DrawnSeries(Henon(), rows=20_000),
    }
)
"""The values of `data=`: a flow, sampled every hundredth of a unit of time, whose largest Lyapunov exponent is known to
be 0.906 per unit of time (Sprott 2003); and a map, for which it is 0.419 per step."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How a model is trained; `length` counts the rows of a stretch, `batch_size` the stretches of a step."""

    steps: int
    length: int
    batch_size: int
    peak_lr: float
    final: float


SIZES = {
    'tiny': Size(steps=3_000, length=100, batch_size=32, peak_lr=5e-3, final=0.01),
    'paper': Size(steps=100_000, length=200, batch_size=16, peak_lr=1e-3, final=0.01),
}


def get_config(arg: str = '') -> ConfigDict:
    """The config of `data=...,state=...,rectified=...,forcing=...,size=...` and `CHOICES`."""
    chosen = arguments(arg, data='lorenz', state='20', rectified='2', forcing='16', size='tiny', **CHOICES)
    data, size = choose(SYSTEMS, 'data', chosen['data']), choose(SIZES, 'size', chosen['size'])
    return run_config(
        chosen,
        steps=size.steps,
        batch_size=size.batch_size,
        length=size.length,
        task=spec(Reconstruction, data=data),
        model=spec(
            AlmostLinearDynamics,
            noise=0.05,
            **{name: whole(name, chosen[name], least=0) for name in ('state', 'rectified', 'forcing')},
        ),
        optimizer=AdamW(peak_lr=size.peak_lr, schedule=Cosine(final=size.final), weight_decay=0.0, b2=0.999),
        evals=(
            spec(BySlice, cadence=spec(EveryNSteps, n=max(1, size.steps // 5)), multiples=(1, 4), examples=256),
            spec(Attractor, cadence=spec(AtEnd)),
        ),
        save_every=size.steps // 2,
        precision=Precision(activations='float32', matmul='highest'),
    )
