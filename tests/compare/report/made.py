"""Contents of a page without studies behind them: what a real sweep leaves, failures and pruned trials among it."""

import dataclasses

import numpy as np

from attnlab.compare.axes import styles
from attnlab.compare.equality import Equality
from attnlab.compare.report.comparison import Comparison, Point, StudyResult
from attnlab.compare.report.contents import Contents, Costs, Kernel, StudyContents, Trial
from attnlab.compare.report.measured import DeviceCost
from attnlab.compare.report.opening import Opening, Scored
from attnlab.evals.measured import SHARE, Measured, of_seeds
from attnlab.train.cost import LayerCore

NAMES = ('mha', 'gla', 'mamba2', 'gated_delta_net', 'hgrn2', 'sliding_window', 'rwkv & <co>', 'retnet')
DOZEN = (
    *('mha', 'gla', 'mamba2', 'gated_delta_net', 'hgrn2', 'sliding_window', 'gated_slot_attention', 'retnet'),
    *('rwkv7', 'mesa_net', 'native_sparse_attention', 'longhorn'),
)
VERSIONS = {'attnlab': '0.1.0', 'jax': '0.12.0'}


def contents(studies: int = 8, trials: int = 16, *, grid: bool = False, companion: bool = False) -> Contents:
    """So many studies of so many trials each, of the first of `NAMES`; over a grid of rates, or spread out."""
    shown = tuple(_study(index, trials, grid, companion) for index in range(studies))
    rows = tuple(study.row for study in shown)
    reasons = ('gla has another sweep than mha: base.steps: 2000 there, 1000 here', 'hgrn2 is not finished')
    words = {'task': 'StdlibText', 'baselines': {'unigram': 2.4}}
    comparison = Comparison('valid/loss', 'params', 0.01, rows, reasons[: studies - 1], **words)
    equalities = (
        Equality('params', True, True, (10.4e6, 'mha'), (10.4416e6, 'gla')),
        Equality('state_bytes_8x', False, False, (65536.0, 'hgrn2'), (8388608.0, 'mha')),
        Equality('search space', True, True),
        Equality('tokens of training', True, False, different=('base.steps', 'base.batch_size')),
    )
    notices = ('The trials ran on several kinds of device: mha on NVIDIA H200, gla on cpu.',)
    return Contents(
        comparison=comparison,
        companion='valid/accuracy' if companion else None,
        studies=shown,
        length=512,
        device='NVIDIA H200',
        equalities=equalities,
        notices=notices,
        within='..',
    )


def crowd() -> Opening:
    """A dozen accuracies far above chance at three sizes of state, two of them the same."""
    draws = np.random.default_rng(3)
    entries = []
    for place, name in enumerate(DOZEN):
        scores = np.clip(0.97 - 0.012 * place + draws.normal(0, 0.006, 3), 0, 1)
        state = 1024.0 * (64, 64, 128, 128, 64, 96, 128, 64, 128, 64, 96, 128)[place]
        entries.append(Scored(name, of_seeds(list(map(float, scores))).within(*SHARE), {'state_bytes': state}))
    words = {'name': 'score', 'metric': 'confirmed test/1x/accuracy', 'task': 'MultiQueryRecall'}
    baselines = {'chance': 0.0625, 'majority': 0.071}
    common = {'higher': True, 'share': True, 'matched': (), 'tolerance': 0.01}
    return Opening(entries=entries, looks=styles(DOZEN), baselines=baselines, **words, **common)


def against_a_line() -> Opening:
    """Three accuracies, of which the interval of the best ends just above what a trivial predictor reaches."""
    scores = {'mha': (0.245, 0.255, 0.265), 'gla': (0.16, 0.187, 0.214), 'mingru': (0.075, 0.09, 0.105)}
    entries = [
        Scored(name, of_seeds(values).within(*SHARE), {'state_bytes': size})
        for (name, values), size in zip(scores.items(), (16648.0, 2056.0, 264.0), strict=True)
    ]
    words = {'name': 'score', 'metric': 'test/1x/accuracy', 'task': 'MultiQueryRecall'}
    baselines = {'chance': 0.0625, 'a label shown': 0.2222}
    common = {'higher': True, 'share': True, 'matched': (), 'tolerance': 0.01}
    return Opening(entries=entries, looks=styles(list(scores)), baselines=baselines, **words, **common)


def of_runs() -> Opening:
    """Three runs of one seed, with names as they are below studies, and all costs of runs."""
    scores = {
        'mha/trials/0001': (0.2474, 0.0170),
        'gla/trials/0001': (0.1929, 0.0155),
        'mingru/trials/0001': (0.07, 0.01),
    }
    costs = {'parameters': 10336, 'state_bytes': 16648, 'state_bytes_8x': 133128, 'flops': 7.8e9}
    entries = [
        Scored(
            name,
            Measured(mean, mean - half, mean + half, 512, 'examples'),
            {cost: float(value / 2**place) for cost, value in costs.items()} | {'tokens_per_second': 36653.0},
        )
        for place, (name, (mean, half)) in enumerate(scores.items())
    ]
    words = {'name': 'runs_0', 'metric': 'valid/1x/accuracy', 'task': 'MultiQueryRecall'}
    common = {'higher': True, 'share': True, 'matched': (), 'tolerance': 0.01}
    return Opening(entries=entries, looks=styles(list(scores)), baselines={'chance': 0.0625}, **words, **common)


def _study(index: int, count: int, grid: bool, companion: bool) -> StudyContents:
    draws = np.random.default_rng(index)
    name = NAMES[index]
    rates = np.geomspace(3e-4, 1e-2, 4)[np.arange(count) % 4] if grid else 10 ** draws.uniform(-3.5, -2, count)
    values = 2.2 + 0.05 * draws.random() + 0.6 * (np.log10(rates) + 2.8) ** 2 + 0.05 * draws.random(count)
    states = ['done', 'failed', *draws.choice(['done', 'pruned', 'failed'], count - 2, p=[0.6, 0.3, 0.1])]
    points = tuple(
        Point(float(rate), number % 3, str(state), None if state == 'failed' else float(value))
        for number, (rate, value, state) in enumerate(zip(rates, values, states, strict=True))
    )
    known = [number for number, point in enumerate(points) if point.state == 'done']
    best = min(known, key=lambda number: values[number])
    confirmed = tuple(float(values[best] + 0.01 * n) for n in range(3))
    row = StudyResult(name, 10.4e6 + 1e4 * index, 3.1e16, points, 'min', confirmed)
    other = tuple(dataclasses.replace(p, value=None if p.value is None else 1 / p.value) for p in points)
    trials = [_trial(name, number, point, number == best) for number, point in enumerate(points)]
    trials += [
        _trial(name, n, Point(points[best].rate, n + 3, 'done', value), None) for n, value in enumerate(confirmed)
    ]
    why = (
        ('mosaic_gpu', 'the head has 12 channels; it must be a multiple of 16'),
        ('mosaic_tpu', 'the platform is gpu'),
    )
    return StudyContents(
        row=row,
        companion=dataclasses.replace(row, points=other, goal='max', confirmed=()) if companion else None,
        costs=Costs(
            parameters=10.4e6 + 1e4 * index,
            state_bytes=float(2 ** (16 + index)),
            state_bytes_8x=float(2 ** (16 + index)) * (8 if index % 3 == 0 else 1),
            flops=1.9e15 * (1 + 0.07 * index),
            tokens_per_second=1.2e5 / (1 + 0.3 * ((5 * index) % 8)),
            decode_ms=None if index == 6 else 0.2 + 0.05 * ((3 * index) % 8),
            peak_bytes=2.1e9 * (1 + 0.2 * ((7 * index) % 8)),
        ),
        trials=tuple(trials),
        kernels=((Kernel(LayerCore(tuple(range(12)), 'Attention', 'attention', 'xla', why), 'NVIDIA H200'), count),),
        measured={'NVIDIA H200': DeviceCost(0.2 + 0.05 * index, 2_100_000_000, '3.13.0', VERSIONS)},
        settings={
            'base.model.dim': 256 + 8 * index,
            'base.model.stack.blocks[0].mixer.target': f'attnlab.mixers.linear.attention.Mixer{index}',
            'base.steps': 1000 if index == 1 else 2000,
            'metric': 'valid/loss',
        },
        curves={
            metric: [(step, 2.2 + 0.05 * index + rise * 50 / step) for step in range(50, 2001, 50)]
            for metric, rise in (('valid/loss', 1.0), ('train/loss', 0.8))
        },
    )


def _trial(name: str, number: int, point: Point, best: bool | None) -> Trial:
    """`best` is `None` for a trial of the confirmation."""
    folder = 'trials' if best is not None else 'confirm/trials'
    rise = 0.08 if len(name) % 2 else 0.4
    lengths = {} if point.value is None else {m: point.value + rise * (m - 1) ** 0.5 for m in (1, 2, 4, 8)}
    reason = 'step 412: loss nan, gradient norm nan; the first that is not finite: stack.layers[3].mixer'
    return Trial(
        number=number,
        state=point.state,
        confirms=best is None,
        best=bool(best),
        settings={'optimizer.peak_lr': point.rate, 'optimizer.weight_decay': 0.1},
        seed=point.seed,
        value=point.value,
        reason=reason if point.state == 'failed' else '',
        link=f'../studies/{name}/{folder}/{number:04}',
        lengths=lengths if point.state == 'done' else {},
        slices={},
        tokens_per_second=None if point.state == 'failed' else 1.1e5 + 100 * number,
        device='NVIDIA H200',
    )
