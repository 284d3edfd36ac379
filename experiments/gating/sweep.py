"""Gates of experts: in a language model at equal operations, and on planted mixtures that are to be found again."""

import pathlib

import numpy as np

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.experts import ExpertLoads
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.models.gaussian_experts import GaussianExperts
from attnlab.nn.experts import LaplaceGate, SigmoidGate, SoftmaxGate, TemperedGate
from attnlab.nn.planted import PlantedExperts
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.planted import TESTED, Planted
from attnlab.train.optimizer import AdamW
from attnlab.train.report import Reporting
from attnlab.train.schedule import Cosine

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
SEEDS = 3

GATES = {'softmax': 'moe', 'sigmoid': 'moe_sigmoid', 'laplace': 'moe_laplace', 'hierarchical': 'moe_hierarchical'}
"""Values of `mlp=` by gate."""

ARMS = (*GATES, 'unbalanced', 'dense')
"""`unbalanced` is softmax without the penalty of uneven loads; `dense` a gated network as wide as two experts."""

RATES = {'low': 4e-3, 'high': 1e-2}
CAPACITY = 1.25
EXPERTS, ACTIVE = 8, 2

PLANTED = {
    'softmax': SoftmaxGate(),
    'sigmoid': SigmoidGate(),
    'laplace': LaplaceGate(),
    'tempered': TemperedGate(),
    'tempered_tanh': TemperedGate('tanh'),
}
SAMPLES = {'cpu': (300, 1_000, 3_000, 10_000), 'full': (300, 1_000, 3_000, 10_000, 30_000, 100_000)}
FITTED = (4, 8)
"""As many experts as are planted, and twice as many."""

DRAWS = {'cpu': 3, 'full': 20}
STEPS = {'cpu': 1_000, 'full': 4_000}
START = 0.3
CHECKS = {'longer': (4, START), 'nearer': (1, 0.1)}
"""By how much longer training is, and how far from the truth it begins: neither should change the error."""


def runs(size):
    """The language models, and then the planted mixtures."""
    texts = [
        Run(label_of('text', arm, rate, seed), of_text(arm, RATES[rate], seed, size))
        for arm in ARMS
        for rate in RATES
        for seed in range(SEEDS)
    ]
    planted = [
        Run(label_of('planted', gate, fitted, count, seed), of_planted(gate, fitted, count, seed, size))
        for gate in PLANTED
        for fitted in FITTED
        for count in SAMPLES[size]
        for seed in range(DRAWS[size])
    ]
    checks = [
        Run(
            label_of(check, gate, max(FITTED), max(SAMPLES[size]), 0),
            of_planted(gate, max(FITTED), max(SAMPLES[size]), 0, size, *how),
        )
        for gate in PLANTED
        for check, how in CHECKS.items()
    ]
    return texts + planted + checks


def of_text(arm, rate, seed, size):
    """A transformer on bytes whose channel mixers are experts, two of eight a token, each with room for its share."""
    sized = 'tiny' if size == 'cpu' else '10m'
    found = config_of(CONFIG, f'zoo=mha,size={sized},mlp={GATES.get(arm, "swiglu" if arm == "dense" else "moe")}')
    with found.unlocked():
        if size == 'cpu':
            found.update(steps=240, batch_size=8, length=128)
            found.model.dim = 64
            found.model.stack.depth = 2
            found.checkpoint.every = found.steps
        found.seed = seed
        found.optimizer.peak_lr = rate
        width = 64 if size == 'cpu' else 512
        for block in found.model.stack.blocks:
            if arm == 'dense':
                block.mlp.hidden = ACTIVE * width
            else:
                block.mlp.update(experts=EXPERTS, active=ACTIVE, hidden=width, capacity=CAPACITY)
            if arm == 'unbalanced':
                block.mlp.balance = 0.0
        tokens = 16_384 if size == 'cpu' else 262_144
        often = spec(EveryNSteps, n=found.steps // 10)
        loads = () if arm == 'dense' else (spec(ExpertLoads, cadence=often, batches=4),)
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=tokens), *loads)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def of_planted(gate, fitted, count, seed, size, longer=1, start=START):
    """A sample of a mixture with this gate, four experts, and a model with the same gate; seeds draw both anew."""
    planted = PlantedExperts(gate=PLANTED[gate], seed=seed)
    found = run_config(
        CHOICES,
        steps=longer * STEPS[size],
        batch_size=1,
        length=count,
        task=spec(Planted, planted=planted, seed=seed),
        model=spec(GaussianExperts, planted=planted, experts=fitted, start=start),
        optimizer=AdamW(peak_lr=2e-2, schedule=Cosine(warmup=0.02), weight_decay=0.0, b2=0.99),
        evals=(spec(BySlice, cadence=spec(AtEnd), multiples=(1,), examples=1),),
        save_every=longer * STEPS[size],
        report=Reporting(every=STEPS[size] // 5, tensorboard=False),
    )
    with found.unlocked():
        found.seed = seed
    return found


def measure(finished: Finished):
    """Of text, the loss and where tokens went; of a sample, how far parameters and predictions are from the mixture."""
    if finished.parts[0] == 'text':
        found = {'loss': last(finished, 'valid/loss'), 'loss_with_room': last(finished, 'valid/loss')}
        if 'dense' not in finished.parts:
            found |= {name: last(finished, f'experts/{name}') for name in SHOWN}
            found |= {f'first_{name}': finished.curve(f'experts/{name}')[0][1] for name in SHOWN}
            found['loss_with_room'] = with_room(finished.loaded)
        return found
    model, task = finished.loaded.model(), finished.loaded.setup.task
    points = task.source('test', TESTED)[0]['tokens']
    router, maps = (np.asarray(each[...], np.float64) for each in (model.router, model.maps))
    shares = np.asarray(model.shares(points), np.float64).mean(axis=0)
    return {
        'error': task.planted.error(maps, shares),
        'misplaced': task.planted.misplaced(maps, shares, points),
        'misrouted': task.planted.misrouted(router, maps, shares),
        'excess': last(finished, 'test/all/excess'),
    }


def with_room(loaded):
    """The held-out loss where every choice has room, so that it depends on no later token."""

    def roomy(model):
        for block in model.stack.blocks:
            block.mlp.capacity = None
        return model

    roomy_run = loaded.altered(roomy)
    return roomy_run.setup.evals[0].evaluate(roomy_run.setup, roomy_run.variables).numbers['loss']


SHOWN = ('load', 'dropped')


def last(finished, metric):
    """The last value of a metric."""
    return finished.curve(metric)[-1][1]
