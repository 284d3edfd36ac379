"""Forecasting, imputation, anomaly detection and classification of time series, by published systems or any recipe.

    attnlab train --config=series:zoo=mha,data=seasonal,lookback=96,horizon=96 --workdir=runs/seasonal-mha
    attnlab train --config=series:system=dlinear,data=etth1,lookback=336,horizon=96 --workdir=runs/etth1-dlinear

`data` is a generated series (`seasonal`, `level_shift`, `trend`, `regimes`, `henon`, `lorenz`, `autoregression`,
`driven`), a recorded one that comes with matplotlib (`membrane`, `eeg`), a published one (`etth1`, `ettm2`,
`electricity`, `exchange`, ...: docs/series.md), or a file of your own: `.csv`, `.txt` (both also `.gz`), `.tsv`,
`.parquet` (extra `parquet`), `.npy` or `.npz`. A model reads `lookback` rows and forecasts `horizon` rows.

`task` is `forecasting`, the default, or

- `imputation`: fills gaps in windows of `lookback` rows (`--config.task.gaps.span=8` makes the gaps longer); it takes
  no `horizon`, no roles of columns and no head but `affine`;
- `anomalies`: trains the same model and, at the end of the run, finds disturbed rows by its errors;
- `classification`: predicts the regime of generated windows of `lookback` rows (`attnlab.data.series.regimes`) or, with
  `data=FILE.npz`, the label of windows of your own (`attnlab.data.series.labelled`), by a recipe `zoo` that reads every
  row as a token and a classification `head`.

`system` is one of `SYSTEMS`; it sets the arguments below, unless they are given:

- `zoo`: a recipe (`attnlab zoo` lists them); linear systems have none;
- `inputs`: `apart`, each variate is a row of patches of its own; `together`, a token is a patch of all variates;
  `variates`, a token is the whole window of a variate; `grid`, the patches of all variates are one row, on a grid of
  variates by times, for recipes with the claim `grid` and others. With the last two, bidirectional mixers have no
  positions along the row, since variates have no order;
- `conv`: the short convolutions, as in `configs/language.py`;
- `patch`, `stride`: steps in a patch, and from the start of one patch to the next;
- `form`: `causal`, where the last token is read, or `bidirectional`, where all are. By default it is causal if the
  recipe can be; with `inputs=variates|grid`, and for tasks other than forecasting, only if it can be nothing else;
- `norm`: how windows are normalised, `instance`, `last_value` or `none`; `gain=1` adds a learned gain and bias for
  each variate;
- `individual=1`: a head for each variate;
- `targets=OT`, `known=price+holiday`: names of columns, joined by `+` (indices where columns have no names): those to
  forecast, by default all that are not known, and those whose values are known over the horizon too. All others are
  observed, which means read in the look-back only;
- `marks=1`: calendar features of the series' dates are known as well;
- `ahead=0`: known columns are read in the look-back only;
- `fast`: a recipe that reads consecutive windows of `rate` tokens, while `zoo` reads a summary of each
  (`attnlab.models.two_rates`); for classification too.

Three systems build on an earlier run, `RUN`, its work directory, whose layers they keep frozen:

- `system=autotimes,run=RUN`: the layers of a causal language model (`configs/language.py`). A token is a segment of
  `horizon` rows, several of which make a look-back, and after every token the next segment is predicted. With
  `prompt=192`, evaluations put that many rows from the start of the series before every look-back (the row `prompted`);
- `system=smetimes,run=RUN`: the same, with a text about every segment, its mean, deviation and change, which the same
  layers read. `RUN` reads bytes (`tokens=bytes`);
- `system=msft,run=RUN`: the patches and layers of a forecaster made by this config with
  `form=bidirectional,inputs=apart`, along with its look-back, `norm` and `gain`. It reads the window at three scales,
  for each of which adapters and a head are trained.

`head` is `affine`, the default, or one of the heads for real numbers that `attnlab zoo --heads` lists; `quantiles`,
`mixture_density`, `c51` and `iqn` predict distributions, whose CRPS and coverage are then reported. `ar_net` and
`olinear` have heads of their own and take no other; that of `olinear` is shared by all variates. `size`, `optimizer`,
`schedule` and `rounding` are as in `configs/images.py`, except that time scales have the same learning rate as other
parameters, where those of images have at most 1e-3 (decision 313).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import arguments, check_choice, check_not_given, choose, plain, spec, takes, whole
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.series.basis import TrainingBasis
from attnlab.data.series.columns import Columns
from attnlab.data.series.drawn import Autoregression, DrawnSeries, Driven, Henon, Lorenz, Regimes, Seasonal
from attnlab.data.series.files import CSVSeries, NPZSeries, ParquetSeries
from attnlab.data.series.labelled import labelled_windows
from attnlab.data.series.published import PUBLISHED, PublishedSeries
from attnlab.data.series.regimes import RegimeWindows
from attnlab.data.series.series import Series
from attnlab.data.series.shipped import SHIPPED, ShippedSeries
from attnlab.data.text.tokenizers import Bytes
from attnlab.errors import UserError
from attnlab.evals.anomalies import Anomalies
from attnlab.evals.by_slice import WHOLE, BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.forecasts import Forecasts
from attnlab.mixers.combine import within
from attnlab.models.forecasters import LinearForecaster, PromptedForecaster, SegmentForecaster, StackForecaster
from attnlab.models.heads.affine import AffineHead, SparseAffineHead
from attnlab.models.heads.orthogonal import OrthogonalHead
from attnlab.models.heads.registry import CLASSIFIERS, REGRESSORS
from attnlab.models.heads.segments import MixedSegmentHead, NextSegmentHead
from attnlab.models.inputs.embedding import Projection
from attnlab.models.inputs.series import (
    OrthogonalVariates,
    VariatesApart,
    VariatesAsTokens,
    VariatesOnGrid,
    VariatesTogether,
)
from attnlab.models.model import Model
from attnlab.models.multiscale import MultiscaleForecaster
from attnlab.models.stack import stack_spec
from attnlab.models.two_rates import TwoRates
from attnlab.nn.decoupled import DecoupledRope, EliteRope, SharedKey
from attnlab.nn.feature_maps import CosFormer
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.pools import MeanPool
from attnlab.nn.positions import LearnedPlaces, Sinusoidal
from attnlab.nn.series_windows import Covariates, InstanceNorm, LastValue, Trend, WindowGain
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.forecasting import Forecasting
from attnlab.tasks.imputation import Imputation
from attnlab.tasks.long_range import Classification
from attnlab.train.optimizer import AdamW, Override
from attnlab.train.run import saved_config
from attnlab.train.schedule import Cosine
from attnlab.train.start import FromRun
from attnlab.train.step import Precision
from attnlab.zoo import Recipe
from attnlab.zoo.chosen import chosen_recipe, convolved, padded_sequence_recipe

DRAWN: Mapping[str, DrawnSeries] = MappingProxyType(
    {
        'seasonal': DrawnSeries(),
        'level_shift': DrawnSeries(Seasonal(shift=2.0)),
        'trend': DrawnSeries(Seasonal(trend=1 / 1200)),
        'regimes': DrawnSeries(Regimes()),
        'henon': DrawnSeries(Henon()),
        'lorenz': DrawnSeries(Lorenz()),
        'autoregression': DrawnSeries(Autoregression(), rows=20_000),
        'driven': DrawnSeries(Driven()),
    }
)
ARRAYS = ('.npy', '.npz')
TABLES = ('.csv', '.csv.gz', '.txt', '.txt.gz', '.tsv')


@dataclasses.dataclass(frozen=True)
class System:
    """A published forecaster as a row: the paper, the arguments that make it, and how it departs from the paper.

    Attributes:
      cite: the paper.
      arguments: arguments of this config that it sets.
      notes: departures from the paper.
      decomposition: for linear systems, how the window is split into parts; `None`: it is not.
      linear: whether the head reads the window directly, without layers.
      share: for AR-Net, the expected fraction of nonzero weights; `None`: no penalty.
      repeat_last: how many times the last step is repeated before patches are cut.
      orthogonal: whether windows and horizons are transformed into an orthogonal basis found on the training rows.
      frozen: the kind of run whose layers it takes, and does not train; empty: it takes none.
      scales: the number of coarser scales at which those layers also read the window.
      texts: whether those layers also read a text about every segment.
    """

    cite: str
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: str = ''
    decomposition: Trend | None = None
    linear: bool = False
    share: float | None = None
    repeat_last: int = 0
    orthogonal: bool = False
    frozen: str = ''
    scales: int = 0
    texts: bool = False


ZENG = 'Zeng et al. 2023, https://arxiv.org/abs/2205.13504'
ONE_RUN = 'fixed steps with a cosine, without early stopping'
PRE_NORM = 'RMS norms before the branches, gated MLPs, no dropout'

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        'linear': System(ZENG, {'norm': 'none'}, ONE_RUN, linear=True),
        'nlinear': System(ZENG, {'norm': 'last_value'}, ONE_RUN, linear=True),
        'dlinear': System(
            ZENG,
            {'norm': 'none'},
            f'{ONE_RUN}; one intercept, where the paper adds up two',
            decomposition=Trend(),
            linear=True,
        ),
        'rlinear': System(
            'Li et al. 2023, https://arxiv.org/abs/2305.10721',
            {'norm': 'instance', 'gain': '1'},
            f'{ONE_RUN}, no dropout of the window',
            linear=True,
        ),
        'olinear': System(
            'Yue et al. 2025, https://arxiv.org/abs/2505.08550',
            {'zoo': 'norm_lin', 'inputs': 'variates', 'form': 'bidirectional', 'gain': '1', 'ahead': '0'},
            f'{ONE_RUN}; {PRE_NORM}, where the paper has layer norms after the branches; correlations of training rows '
            'alone, divided by both deviations',
            orthogonal=True,
        ),
        'ar_net': System(
            'Triebe, Laptev and Rajagopal 2019, https://arxiv.org/abs/1911.12436',
            {'norm': 'none'},
            f'{ONE_RUN}; the penalty is whole from the first step; the paper has horizon=1, longer by eval --multiples',
            linear=True,
            share=0.3,
        ),
        'patch_tst': System(
            'Nie et al. 2023, https://arxiv.org/abs/2211.14730',
            {'zoo': 'mha', 'inputs': 'apart', 'patch': '16', 'stride': '8', 'form': 'bidirectional'},
            f'{PRE_NORM}, where the paper has batch norms after the branches; rotary positions besides the learned; '
            'scores of attention are not added up over layers, as the released code does',
            repeat_last=8,
        ),
        'itransformer': System(
            'Liu et al. 2024, https://arxiv.org/abs/2310.06625',
            {'zoo': 'mha', 'inputs': 'variates', 'form': 'bidirectional', 'ahead': '0'},
            f'{PRE_NORM}, where the paper has layer norms after the branches; marks of time, tokens too, with marks=1',
        ),
        's_mamba': System(
            'Wang et al. 2024, https://arxiv.org/abs/2403.11144',
            {'zoo': 's_mamba', 'inputs': 'variates', 'form': 'bidirectional', 'ahead': '0'},
            f'{ONE_RUN}; {PRE_NORM}, where the paper has layer norms after the branches and plain channel mixers',
        ),
        'chimera': System(
            'Behrouz, Santacatterina and Zabih 2024, https://arxiv.org/abs/2406.04320',
            {'zoo': 'chimera', 'inputs': 'grid', 'patch': '4', 'form': 'bidirectional'},
            f'{ONE_RUN}; patches of four steps; forecasts from all tokens of a variate, where the paper feeds its own '
            'back; no code was released (docs/zoo.md)',
        ),
        'informer': System(
            'Zhou et al. 2021, https://arxiv.org/abs/2012.07436',
            {'zoo': 'mha', 'inputs': 'together', 'patch': '1', 'form': 'bidirectional', 'norm': 'none'},
            f'{ONE_RUN}; with full attention, a baseline of the paper, and its encoder alone: no decoder, no '
            f'distilling between layers, no convolution of the inputs; {PRE_NORM}; marks=1 for its marks of time',
        ),
        'hiss': System(
            'Bhirangi et al. 2024, https://arxiv.org/abs/2402.10211',
            {'zoo': 'mamba', 'fast': 's4', 'rate': '10', 'inputs': 'together', 'patch': '1', 'form': 'causal'},
            f'{ONE_RUN}; {PRE_NORM}; forecasts from the summary of the last window, where the paper predicts another '
            'signal at every window, of series in their own units (norm=none) with differences of steps beside them',
        ),
        'autotimes': System(
            'Liu et al. 2024, https://arxiv.org/abs/2402.02370',
            {'form': 'causal'},
            f'{ONE_RUN}; a language model of ours in the place of LLaMA, no text of the time of a segment; with '
            'prompt=ROWS the beginning of the series before every window, in evaluations',
            frozen='a causal language model (configs/language.py)',
        ),
        'smetimes': System(
            'Fan et al. 2025, https://arxiv.org/abs/2503.03594',
            {'form': 'causal'},
            f'{ONE_RUN}; a language model of ours in the place of one of up to 3 billion parameters; texts of the '
            'statistics of every variate in units of its window, where the released code has those of the last one, '
            'raw, and no text of the time; texts of forecasts, where it has those of the rows to come',
            frozen='a causal language model of bytes (configs/language.py)',
            texts=True,
        ),
        'msft': System(
            'Qiao et al. 2025, https://arxiv.org/abs/2506.14087',
            {'form': 'bidirectional'},
            f'{ONE_RUN}; an encoder of ours in the place of Moirai, Moment or UniTS, new heads at every scale; '
            'from abstract and summaries, without the code: adapters and maps to finer scales start at zero, sums run '
            'from scale to scale, coarse forecasts are repeated',
            frozen='a forecaster of this config with inputs=apart,form=bidirectional',
            scales=2,
        ),
    }
)
"""Published systems by the value of `system=`."""

OWN = System('')
"""The system of no paper: arguments and defaults decide everything."""

DEFAULTS = MappingProxyType(
    {
        'zoo': 'mha',
        'conv': '0',
        'inputs': 'apart',
        'patch': '8',
        'stride': '',
        'form': '',
        'norm': 'instance',
        'gain': '0',
        'individual': '0',
        'targets': '',
        'known': '',
        'marks': '0',
        'ahead': '1',
        'fast': '',
        'rate': '10',
    }
)
"""Arguments that systems may set, with their values where neither a system nor the user does."""

TASKS = ('forecasting', 'imputation', 'anomalies', 'classification')
FORECASTS = ('horizon', 'prompt', 'head', 'individual', 'targets', 'known', 'marks', 'ahead')
"""Arguments that only forecasting takes."""

FORECASTING_DEFAULTS = MappingProxyType({'data': 'seasonal', 'horizon': '96', 'head': 'affine'})
"""Defaults of these arguments of forecasting."""

SET_BY_RUN = (
    'zoo',
    'conv',
    'fast',
    'rate',
    'inputs',
    'patch',
    'stride',
    'form',
    'head',
    'individual',
    'known',
    'marks',
    'targets',
)
"""Arguments already fixed by a run whose layers are taken."""

LANGUAGE = ('embedding/*', 'head/*')
"""Parameters that are not taken from a language model."""

WRITTEN = ('patches/*', 'gate', 'head/*')
"""Parameters that are not taken from a language model that also reads texts."""

SCALES = ('tuned/*', 'head/*')
"""Parameters that are not taken from a forecaster that reads several scales."""

CLASSIFIES = ('task', 'zoo', 'conv', 'fast', 'rate', 'form', 'lookback', 'head', 'size', *CHOICES)
"""Arguments that classification takes."""

LOOKBACK = '96'
"""The default number of rows that are read."""

EXAMPLES = 500
"""The number of windows that classification is evaluated on."""

NORMS = {'instance': InstanceNorm, 'last_value': LastValue, 'none': lambda: None}
INPUTS = {
    'apart': VariatesApart,
    'together': VariatesTogether,
    'variates': VariatesAsTokens,
    'grid': VariatesOnGrid,
}
ACROSS = ('variates', 'grid')
"""Inputs that put several variates, which have no order, into one row."""

FORMS = ('causal', 'bidirectional')
SWITCH = {'0': False, '1': True}


@dataclasses.dataclass(frozen=True)
class Size:
    """The model and its training; `window`, in tokens, is for mixers that have one."""

    steps: int
    batch_size: int
    peak_lr: float
    dim: int
    depth: int
    heads: int
    window: int = 8
    linear_lr: float = 5e-3
    weight_decay: float = 0.0
    activations: str = 'float32'


SIZES = {
    'tiny': Size(steps=1_000, batch_size=32, peak_lr=1e-3, dim=32, depth=2, heads=4),
    'small': Size(
        steps=10_000, batch_size=64, peak_lr=5e-4, dim=128, depth=3, heads=8, window=16, activations='bfloat16'
    ),
}


def get_config(arg: str = '') -> ConfigDict:
    """The config for `task=...,data=...,lookback=...,horizon=...,system=...`, the other arguments named above, and
    `CHOICES`."""
    given = arguments(
        arg,
        task='forecasting',
        data='',
        lookback=LOOKBACK,
        horizon='',
        system='',
        head='',
        size='tiny',
        run='',
        prompt='',
        **dict.fromkeys(DEFAULTS, ''),
        **CHOICES,
    )
    check_choice(TASKS, 'task', given['task'])
    if given['task'] == 'classification':
        return _classification(given)
    system = choose(SYSTEMS, 'system', given['system']) if given['system'] else OWN
    chosen = _chosen(system, given)
    size = choose(SIZES, 'size', chosen['size'])
    lookback, series = whole('lookback', chosen['lookback']), _series(chosen['data'])
    columns = Columns(
        targets=tuple(filter(None, chosen['targets'].split('+'))),
        known=tuple(filter(None, chosen['known'].split('+'))),
        marks=choose(SWITCH, 'marks', chosen['marks']),
    )
    linear = system.linear and not given['zoo']
    _check_parts(system, given, chosen['inputs'], columns, linear=linear)
    task, beside, counts = _task(system, chosen, series, columns, lookback)
    windows = _windows(chosen, lookback, *counts)
    _check_own_head(system, given, chosen['inputs'])
    basis = TrainingBasis(series, columns) if system.orthogonal else None
    stacked = functools.partial(_stacked, system, windows, basis, size, chosen)
    if system.scales:
        stacked = functools.partial(_multiscale, windows, system, given)
    elif system.frozen:
        stacked = functools.partial(_frozen, windows, system, whole('horizon', chosen['horizon']), chosen['run'])
    model = _linear(system, windows, chosen) if linear else stacked()
    return run_config(
        chosen,
        **_run(size, WHOLE, *beside),
        length=lookback,
        task=task,
        model=model,
        optimizer=AdamW(
            peak_lr=size.linear_lr if linear else size.peak_lr,
            schedule=Cosine(warmup=0.1),
            weight_decay=size.weight_decay,
            overrides=_frozen_groups(system, model),
        ),
        start=spec(FromRun, run=chosen['run'], leave=_left(system)) if system.frozen else None,
    )


def _chosen(system: System, given: Mapping[str, str]) -> dict[str, str]:
    """The arguments, with those of the system and the defaults where they are not given.

    Raises `UserError` for arguments that do not go with the task or the system.
    """
    _check_frozen(system, given)
    if given['task'] != 'forecasting':
        _check_filling(system, given)
    chosen = {**given, **{name: given[name] or system.arguments.get(name, value) for name, value in DEFAULTS.items()}}
    chosen |= {name: given[name] or value for name, value in FORECASTING_DEFAULTS.items()}
    _check_rate(given, chosen['fast'])
    return chosen


def _check_parts(system: System, given: Mapping[str, str], inputs: str, columns: Columns, *, linear: bool) -> None:
    """Raises `UserError` for arguments of parts that the model does not have."""
    if linear:
        unread = ('conv', 'fast', 'inputs', 'form', 'patch', 'stride')
        check_not_given(given, unread, f'is of layers; system={given["system"]} has none: leave it out')
    elif system.decomposition is not None:
        check_not_given(given, ('zoo',), f'has layers, and system={given["system"]} divides windows for a linear map')
    elif inputs == 'variates':
        check_not_given(
            given, ('patch', 'stride'), 'is of patches; with inputs=variates a variate is a token: leave it out'
        )
    if not (columns.known or columns.marks):
        check_not_given(given, ('ahead',), 'is of known=NAMES and marks=1, which are not given')


def _task(
    system: System, chosen: Mapping[str, str], series: Series, columns: Columns, lookback: int
) -> tuple[ConfigDict, tuple[ConfigDict, ...], tuple[int, int, int]]:
    """The task, its own evaluators, and how many variates, observed and known columns it has.

    Raises `UserError` for a prompt of systems that read no segments.
    """
    variates, observed, known = columns.counts(series)
    prompt = whole('prompt', chosen['prompt']) if chosen['prompt'] else None
    if prompt and (not system.frozen or system.scales):
        raise UserError(f'prompt={prompt} is for systems whose tokens are segments: {_segmented()}')
    if chosen['task'] == 'forecasting':
        task = spec(
            Forecasting, data=series, horizon=whole('horizon', chosen['horizon']), columns=columns, prompt=prompt
        )
        return task, (spec(Forecasts, cadence=spec(AtEnd)),), (variates, observed, known)
    beside = (spec(Anomalies, cadence=spec(AtEnd)),) if chosen['task'] == 'anomalies' else ()
    # Which values are there is read beside them.
    return spec(Imputation, data=series, steps=lookback), beside, (variates, variates, known)


def _windows(chosen: Mapping[str, str], lookback: int, variates: int, observed: int, known: int) -> dict[str, Any]:
    """What a forecaster is told of its windows."""
    return {
        'lookback': lookback,
        'variates': variates,
        'covariates': Covariates(observed, known, ahead=choose(SWITCH, 'ahead', chosen['ahead'])),
        'window_norm': choose(NORMS, 'norm', chosen['norm'])(),
        'window_gain': WindowGain if choose(SWITCH, 'gain', chosen['gain']) else None,
    }


def _check_own_head(system: System, given: Mapping[str, str], inputs: str) -> None:
    """Raises `UserError` for another head, or inputs, than those of a system that has its own."""
    if system.orthogonal or system.share is not None:
        why = f'is not that of system={given["system"]}, which has one of its own; leave it out'
        check_not_given(given, ('head',), why)
    if system.orthogonal and inputs != 'variates':
        raise UserError(f'inputs={inputs} has no whole windows; system={given["system"]} needs inputs=variates')


def _run(size: Size, examples: int, *beside: ConfigDict) -> dict[str, Any]:
    """What all tasks share: the test split at the end, validation in between, and further evaluators."""
    evaluated = max(1, size.steps // 5)
    every: dict[str, Any] = {'multiples': (1,), 'examples': examples}
    return {
        'steps': size.steps,
        'batch_size': size.batch_size,
        'evals': (
            spec(BySlice, cadence=spec(AtEnd), split='test', **every),
            spec(BySlice, cadence=spec(EveryNSteps, n=evaluated), split='valid', name='valid', **every),
            *beside,
        ),
        'save_every': evaluated,
        'precision': Precision(activations=size.activations),
    }


def _classification(given: Mapping[str, str]) -> ConfigDict:
    """Of drawn windows, whose rows are tokens. Raises `UserError` for arguments of other tasks."""
    for name, value in given.items():
        if value and name not in CLASSIFIES and not (name == 'data' and value.endswith('.npz')):
            raise UserError(f'{name}={value} is for other tasks; leave it out with task=classification')
    chosen = given | {name: given[name] or DEFAULTS[name] for name in ('zoo', 'conv', 'rate')} | {'inputs': 'apart'}
    _check_rate(given, given['fast'])
    drawn = Drawn(RegimeWindows(steps=whole('lookback', chosen['lookback'])), train=20_000, held_out=EXAMPLES)
    data = labelled_windows(str(pathlib.Path(chosen['data']))) if chosen['data'] else drawn
    size, steps = choose(SIZES, 'size', chosen['size']), data.kind.length
    if steps != int(chosen['lookback']) and chosen['lookback'] != LOOKBACK:
        raise UserError(f'lookback={chosen["lookback"]} is not that of data={chosen["data"]}, {steps}; leave it out')
    recipe = padded_sequence_recipe(chosen['zoo'], chosen['conv'])
    causal = _causal(recipe, chosen)
    stack = _stack(recipe, size, steps, causal, chosen)
    head = choose(CLASSIFIERS, 'head', chosen['head'] or 'linear').made(classes=data.kind.classes)
    model = spec(
        Model,
        dim=size.dim,
        stack=stack,
        inputs=spec(Projection, features=data.kind.channels),
        # A mixer that cannot tell left from right is told.
        positions=Sinusoidal() if _unordered(chosen, causal) else None,
        head=head,
        pool=MeanPool(),
        streaming=False,
    )
    return run_config(
        chosen,
        **_run(size, EXAMPLES),
        length=steps,
        task=spec(Classification, data=data),
        model=model,
        optimizer=AdamW(peak_lr=size.peak_lr, schedule=Cosine(warmup=0.1), weight_decay=size.weight_decay),
    )


def _stack(recipe: Recipe, size: Size, places: int, causal: bool, chosen: Mapping[str, str]) -> ConfigDict:
    """The stack, or two where windows are summarised. Raises `UserError` for rows of several variates with it."""
    across = chosen['inputs'] in ACROSS

    def stacked(recipe: Recipe, places: int, causal: bool) -> ConfigDict:
        mixers = recipe.sized(heads=size.heads, window=size.window, length=places, causal=causal)
        for mixer in (each for outer in mixers for each in within(outer) if across and not (causal or recipe.grid)):
            # Variates have no order that a position could tell; times are told by the inputs.
            if 'position' in takes(mixer):
                mixer.position = _unplaced(mixer.position, chosen)
            if 'feature_map' in mixer and getattr(mixer.feature_map, 'target', None) == spec(CosFormer).target:
                raise _placed(chosen)
        return stack_spec(mixers, layer=recipe.layer, depth=size.depth, mlp=spec(GatedMLP))

    if not chosen['fast']:
        return stacked(recipe, places, causal)
    if across:
        raise UserError(
            f'fast={chosen["fast"]} reads windows of time, and rows of inputs={chosen["inputs"]} go on from one '
            'variate to the next; choose inputs=apart or inputs=together, or leave fast out'
        )
    rate = whole('rate', chosen['rate'])
    # The last window may be shorter than others, and is then filled up.
    fast, slow = (padded_sequence_recipe(chosen[name], chosen['conv']) for name in ('fast', 'zoo'))
    return spec(
        TwoRates,
        fast=stacked(fast, rate, fast.causal),
        slow=stacked(slow, -(-places // rate), causal),
        window=rate,
    )


def _unplaced(position: ConfigDict | None, chosen: Mapping[str, str]) -> ConfigDict | None:
    """What is left of a mixer's positions without places; raises `UserError` where its keys are made of them."""
    if position is None or position.target not in {spec(kind).target for kind in (DecoupledRope, EliteRope, SharedKey)}:
        return None
    if position.target == spec(EliteRope).target:
        raise _placed(chosen)
    return spec(SharedKey, ratio=position.ratio)


def _placed(chosen: Mapping[str, str]) -> UserError:
    return UserError(
        f'zoo={chosen["zoo"]} tells keys by their places in a row, and variates have none; choose another recipe, '
        'or inputs=apart or inputs=together'
    )


def _check_frozen(system: System, given: Mapping[str, str]) -> None:
    """Raises `UserError` for a frozen system without a run, and for a run or arguments that go with no such one."""
    if system.frozen and not given['run']:
        raise UserError(
            f'system={given["system"]} needs run=WORKDIR, that of {system.frozen}; other systems take no run'
        )
    if given['run'] and not system.frozen:
        names = ' or '.join(name for name, one in SYSTEMS.items() if one.frozen)
        raise UserError(f'run={given["run"]} goes with system={names}; other systems take no run')
    if system.frozen:
        check_not_given(given, SET_BY_RUN, f'does not go with system={given["system"]}; leave it out')


def _frozen(windows: Mapping[str, Any], system: System, horizon: int, run: str) -> ConfigDict:
    """The layers of a run, reading segments. Raises `UserError` for a run of another kind, and parts of segments."""
    saved = saved_config(pathlib.Path(run))
    model = saved.model
    if model.target != spec(Model).target or not (model.streaming and 'depth' in model.stack):
        raise UserError(f'run={run} is no causal language model of one stack; name one of configs/language.py')
    if system.texts and ('tokenizer' not in saved.task or saved.task.tokenizer.target != spec(Bytes).target):
        raise UserError(f'run={run} does not read bytes, as texts are given; name one with tokens=bytes')
    if windows['lookback'] % horizon:
        raise UserError(f'lookback={windows["lookback"]} is not a multiple of horizon={horizon}, the rows of a segment')
    return spec(
        PromptedForecaster if system.texts else SegmentForecaster,
        dim=model.dim,
        stack=model.stack.copy_and_resolve_references(),
        norm=model.norm.copy_and_resolve_references(),
        **windows,
        inputs=spec(VariatesApart, patch=horizon, stride=horizon, read_from='all'),
        head=spec(MixedSegmentHead if system.texts else NextSegmentHead),
    )


def _multiscale(windows: Mapping[str, Any], system: System, given: Mapping[str, str]) -> ConfigDict:
    """The layers of a run, reading several scales of windows normalised as there.

    Raises `UserError` for a run of another kind, or look-back, and for a norm or gain of windows that is not the run's.
    """
    run = given['run']
    model = saved_config(pathlib.Path(run)).model
    kinds = model.target, model.inputs.target if 'inputs' in model else None
    if kinds != (spec(StackForecaster).target, spec(VariatesApart).target) or 'depth' not in model.stack:
        raise UserError(f'run={run} is not {system.frozen}')
    if model.inputs.read_from != 'all':
        raise UserError(f'run={run} reads its last token alone; name one with form=bidirectional')
    if model.lookback != windows['lookback']:
        raise UserError(f'lookback={windows["lookback"]} is not that of run={run}, {model.lookback}')
    made = spec(
        MultiscaleForecaster,
        dim=model.dim,
        stack=model.stack.copy_and_resolve_references(),
        norm=model.norm.copy_and_resolve_references(),
        **windows,
        inputs=model.inputs.copy_and_resolve_references(),
        scales=system.scales,
    )
    for name, part in (('norm', 'window_norm'), ('gain', 'window_gain')):
        had = model[part]
        if given[name] and plain(made[part]) != plain(had):
            kind = 'none' if had is None else had.target.rpartition('.')[2]
            raise UserError(f'{name}={given[name]} is not that of run={run}, {kind}; leave it out')
        made[part] = None if had is None else had.copy_and_resolve_references()
    if made.window_gain is not None and model.variates != made.variates:
        raise UserError(
            f'run={run} has a gain for every variate ({model.variates}), and '
            f'data={given["data"] or FORECASTING_DEFAULTS["data"]} has {made.variates}; name a run made with gain=0'
        )
    return made


def _segmented() -> str:
    """The systems that read any number of segments."""
    return ' and '.join(name for name, one in SYSTEMS.items() if one.frozen and not one.scales)


def _left(system: System) -> tuple[str, ...]:
    """What is not taken of the run."""
    if system.texts:
        return WRITTEN
    return SCALES if system.scales else LANGUAGE


def _frozen_groups(system: System, model: ConfigDict) -> tuple[Override, ...]:
    """Overrides of what is taken of a run and not trained."""
    if not system.frozen:
        return ()
    taken = ['stack/*', 'norm/*']
    if system.scales or system.texts:
        taken.append('embedding/*')
    if system.scales and model.window_gain is not None:
        taken.append('window_gain/*')
    return tuple(Override(pattern, lr=0.0, weight_decay=0.0) for pattern in taken)


def _check_filling(system: System, given: Mapping[str, str]) -> None:
    """Raises `UserError` for arguments and systems of forecasting alone."""
    check_not_given(given, FORECASTS, f'is for task=forecasting; leave it out with task={given["task"]}')
    if system.orthogonal or system.frozen or system.share is not None:
        raise UserError(f'system={given["system"]} is for task=forecasting; choose another with task={given["task"]}')


def _series(name: str) -> Series:
    if name in DRAWN:
        return DRAWN[name]
    if name in SHIPPED:
        return ShippedSeries(name)
    if name in PUBLISHED:
        return PublishedSeries(name)
    if name.endswith(TABLES):
        return CSVSeries(str(pathlib.Path(name)))
    if name.endswith('.parquet'):
        return ParquetSeries(str(pathlib.Path(name)))
    if name.endswith(ARRAYS):
        return NPZSeries(str(pathlib.Path(name)))
    return choose({**DRAWN, **dict.fromkeys(SHIPPED), **dict.fromkeys(PUBLISHED)}, 'data', name)


def _linear(system: System, windows: Mapping[str, Any], chosen: Mapping[str, str]) -> ConfigDict:
    head = _head(system, windows['variates'], chosen)
    return spec(LinearForecaster, **windows, decomposition=system.decomposition, head=head)


def _stacked(
    system: System, windows: Mapping[str, Any], basis: TrainingBasis | None, size: Size, chosen: Mapping[str, str]
) -> ConfigDict:
    if chosen['conv'] not in ('0', 'none') and chosen['inputs'] in ACROSS:
        raise UserError(f'conv={chosen["conv"]} reads neighbours, and variates have none; choose other inputs')
    recipe = chosen_recipe(chosen['zoo'])
    if recipe.grid and chosen['inputs'] != 'grid':
        raise UserError(f'zoo={chosen["zoo"]} mixes tokens on a grid; choose inputs=grid, variates by times')
    recipe = convolved(recipe, chosen['conv'])
    causal = _causal(recipe, chosen)
    inputs, places = _inputs(system, windows, basis, causal, chosen)
    return spec(
        StackForecaster,
        dim=size.dim,
        stack=_stack(recipe, size, places, causal, chosen),
        **windows,
        inputs=inputs,
        head=_head(system, windows['variates'], chosen, basis),
    )


def _causal(recipe: Recipe, chosen: Mapping[str, str]) -> bool:
    """Whether mixers read from left to right; raises `UserError` where the recipe does not."""
    form = chosen['form']
    if not form:
        # Variates have no order, so that none is the last; gaps have something behind them too.
        both = chosen['inputs'] in ACROSS or chosen['task'] != 'forecasting'
        return recipe.causal and not (both and recipe.bidirectional)
    check_choice(FORMS, 'form', form)
    causal = form == 'causal'
    if not (recipe.causal if causal else recipe.bidirectional):
        raise UserError(f'form={form} is not one of zoo={chosen["zoo"]}; leave it out, or choose another recipe')
    return causal


def _inputs(
    system: System, windows: Mapping[str, Any], basis: TrainingBasis | None, causal: bool, chosen: Mapping[str, str]
) -> tuple[ConfigDict, int]:
    """The inputs, and how many tokens a row of theirs has."""
    kind = choose(INPUTS, 'inputs', chosen['inputs'])
    if kind is VariatesAsTokens:
        made = spec(kind) if basis is None else spec(OrthogonalVariates, basis=basis)
        return made, windows['variates'] + windows['covariates'].count
    patch = whole('patch', chosen['patch'])
    stride = whole('stride', chosen['stride']) if chosen['stride'] else patch
    places = (windows['lookback'] + system.repeat_last - patch) // stride + 1
    made = spec(
        kind,
        patch=patch,
        stride=stride,
        repeat_last=system.repeat_last,
        # Windows are all alike, and the last summary has seen all others or stands for them; in an order that a mixer
        # which cannot tell left from right must be told.
        positions=None if chosen['fast'] and not _unordered(chosen, causal) else spec(LearnedPlaces),
        read_from='last' if causal or chosen['fast'] else 'all',
    )
    return made, places * (windows['variates'] if kind is VariatesOnGrid else 1)


def _unordered(chosen: Mapping[str, str], causal: bool) -> bool:
    """Whether the order of what is read is nothing to the recipe, or to that of windows."""
    if not causal and padded_sequence_recipe(chosen['zoo'], chosen['conv']).mirrored:
        return True
    if not chosen['fast']:
        return False
    fast = padded_sequence_recipe(chosen['fast'], chosen['conv'])
    return fast.mirrored and not fast.causal


def _head(system: System, variates: int, chosen: Mapping[str, str], basis: TrainingBasis | None = None) -> ConfigDict:
    individual = choose(SWITCH, 'individual', chosen['individual'])
    if chosen['head'] != 'affine' or basis is not None:
        if individual:
            which = f'head={chosen["head"]}' if basis is None else f'the head of system={chosen["system"]}'
            raise UserError(f'{which} is one for all variates; leave individual=1 out')
        if basis is not None:
            return spec(OrthogonalHead, basis=basis, variates=variates)
        return choose({'affine': None, **REGRESSORS}, 'head', chosen['head']).made()
    sizes = {
        'variates': variates if individual else None,
        'parts': 1 if system.decomposition is None else 2,
    }
    if system.share is None:
        return spec(AffineHead, **sizes)
    return spec(SparseAffineHead, share=system.share, **sizes)


def _check_rate(given: Mapping[str, str], fast: str) -> None:
    if not fast:
        check_not_given(given, ('rate',), 'is of fast=RECIPE, which is not given')
