"""Modular addition in full batches: from memorising the training sums to generalising to the others.

    attnlab train --config=grokking:method=stablemax,size=tiny --workdir=runs/stablemax

- `method`: one of `METHODS`;
- `size`: `tiny`, sums modulo 59, 70 % of which are trained on; or `paper`, modulo 113, 40 %, for 80,000 epochs.

The model is the perceptron of Prieto et al. 2025, https://arxiv.org/abs/2501.04697, with the optimiser of the released
scripts for their figure 1: Adam at 0.01 with epsilon 1e-25, no clipping, and `b2` of 0.999 for StableMax and 0.99
otherwise. Those scripts compute the loss in float64, except for `perpendicular`; here it is in float32. `optimizer`,
`schedule` and `rounding` are as in `configs/language.py`.
"""

import dataclasses

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec
from attnlab.data.synthetic.addition import OPERANDS, ModularAddition
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.models.perceptron import Perceptron
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.addition import Addition
from attnlab.train.optimizer import AdamW
from attnlab.train.perpendicular import Perpendicular
from attnlab.train.report import Reporting
from attnlab.train.schedule import Constant
from attnlab.train.step import Precision


@dataclasses.dataclass(frozen=True)
class Method:
    """How a run deals with vanishing gradients of the loss."""

    loss: str = 'softmax'
    perpendicular: Perpendicular | None = None
    weight_decay: float = 0.0
    b2: float = 0.99


METHODS = {
    'softmax': Method(),
    'stablemax': Method(loss='stablemax', b2=0.999),
    # With the norm of the gradient given back, as in the released code.
    'perpendicular': Method(perpendicular=Perpendicular(rescale=True)),
    'weight_decay': Method(weight_decay=1.0),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """A table, the share of its sums that is shown, and the number of epochs."""

    modulus: int
    share: float
    steps: int


# 2,440 of 3,481 sums: a batch that divides over up to 8 devices.
SIZES = {'tiny': Size(59, 0.701, 3000), 'paper': Size(113, 0.4, 80_000)}


def get_config(arg: str = '') -> ConfigDict:
    """The config of `method=...,size=...` and `CHOICES`."""
    chosen = arguments(arg, method='softmax', size='tiny', **CHOICES)
    method = choose(METHODS, 'method', chosen['method'])
    size = choose(SIZES, 'size', chosen['size'])
    table, steps = ModularAddition(modulus=size.modulus, share=size.share), size.steps
    return run_config(
        chosen,
        steps=steps,
        batch_size=table.count('train'),
        length=OPERANDS,
        task=spec(Addition, table=table),
        model=spec(Perceptron, length=OPERANDS, loss=method.loss),
        optimizer=AdamW(
            peak_lr=1e-2,
            schedule=Constant(warmup=0.0),
            weight_decay=method.weight_decay,
            clip=None,
            perpendicular=method.perpendicular,
            b2=method.b2,
            eps=1e-25,
        ),
        evals=(spec(BySlice, cadence=spec(EveryNSteps, n=20), multiples=(1,), examples=table.count('test')),),
        save_every=steps // 4,
        precision=Precision(matmul='highest'),
        report=Reporting(tensorboard=False),
    )
