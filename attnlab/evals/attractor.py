"""What a model of a dynamical system makes of it when it runs by itself: where it goes, how fast, in which regions."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.ndimage
import scipy.spatial
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.data.series.windows import scaled
from attnlab.errors import UserError
from attnlab.figures import spectrum_curves, trajectory_panels, write_csv
from attnlab.models.predictor import Dynamical
from attnlab.tables import Column, Table, digits
from attnlab.tasks.reconstruction import Reconstruction
from attnlab.train.setup import Cadence, Setup

BINNED = 3
"""Variates up to which densities are in bins; of more there are more bins than rows that could tell them."""

BINS = 30
"""Intervals of every variate, over the range of the true rows."""

NEAREST = 5
"""Which of the nearest neighbours of a row tells a density by its distance."""

LOOKED_AT = 1000
"""Rows at which it does, at equal distances in time, at most."""

SMOOTHED = 20.0
"""Standard deviation of the window that smooths spectra, in frequencies of the Fourier transform."""

SMALLEST = 1e-5
"""Added to the count of every bin, so that none is impossible, and to distances."""

MODEL, TRUTH, GAUSSIAN, AGAIN = 'model', 'truth', 'gaussian', 'truth_again'
"""A run of the model; the rows it is compared with; normal rows of their mean and covariance; the rows before them."""

Rows = Float[np.ndarray, 'n v']
TrueRows = Float[np.ndarray, 'm v']


def divergence(rows: Rows, truth: TrueRows) -> float:
    """How far rows are from where the true ones are: Kullback and Leibler's divergence of their densities, in nats.

        sum_i p_i log(p_i / q_i),   p of the true rows

    Up to three variates, over 30 bins of each within the range of the true rows, and one bin more for what lies outside
    of it or is not finite; `1e-5` is added to every count. Brenner et al. 2022, https://arxiv.org/abs/2207.02542, who
    leave out what lies outside. Of more variates, `v`, it is estimated from distances of up to 1,000 true rows to their
    fifth neighbours among the `n` true rows and the `m` others,

        v mean_i log(d_q / d_p) + log(m / (n - 1))

    and is the mean of this and of the same with both exchanged, at least zero. Wang, Kulkarni and Verdu 2009,
    https://doi.org/10.1109/TIT.2009.2016060.
    """
    if truth.shape[1] <= BINNED:
        return _in_bins(rows, truth)
    # What is not finite is as far away as numbers of float32 go.
    far = float(np.finfo(np.float32).max)
    rows = np.clip(np.nan_to_num(rows, nan=far), -far, far)
    # From true rows alone, a run that rests in the middle is near: with many variates all other rows are far apart.
    return max(0.0, (_by_neighbours(truth, rows) + _by_neighbours(rows, truth)) / 2)


def _in_bins(rows: Rows, truth: TrueRows) -> float:
    low, high = truth.min(axis=0), truth.max(axis=0)
    both = np.concatenate([_bins(each, low, high) for each in (truth, rows)])
    # Of most bins both may have nothing: these are counted, not made.
    _, places = np.unique(both, axis=0, return_inverse=True)
    known = np.split(places.reshape(-1), [len(truth)])
    counts = [np.bincount(each, minlength=int(places.max()) + 1) for each in known]
    empty = BINS ** truth.shape[1] + 1 - len(counts[0])
    wholes = [count.sum() + SMALLEST * (empty + len(count)) for count in counts]
    p, q = ((np.append(count, 0) + SMALLEST) / whole for count, whole in zip(counts, wholes, strict=True))
    return float(np.sum(np.append(np.ones(len(p) - 1), empty) * p * np.log(p / q)))


def _by_neighbours(rows: Rows, others: TrueRows) -> float:
    at = rows[np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).astype(int)]
    k = min(NEAREST, len(rows) - 1, len(others))
    # The nearest of its own is the row itself.
    near, far = (scipy.spatial.KDTree(among).query(at, k=[place])[0] for among, place in ((rows, k + 1), (others, k)))
    ratios = np.log((far + SMALLEST) / (near + SMALLEST))
    return float(rows.shape[1] * np.mean(ratios) + np.log(len(others) / (len(rows) - 1)))


def _bins(rows: Rows, low: Float[np.ndarray, ' v'], high: Float[np.ndarray, ' v']) -> Int[np.ndarray, 'n v']:
    """The bin of every row, by variate; that of rows outside of all is -1."""
    inside = np.all((rows >= low) & (rows <= high), axis=1)
    shares = (np.where(inside[:, None], rows, low) - low) / np.where(high > low, high - low, 1.0)
    return np.where(inside[:, None], np.minimum(shares * BINS, BINS - 1), -1).astype(int)


def spectrum(rows: Rows) -> Float[np.ndarray, 'f v']:
    """The power of every variate less its mean at 1, 2, ... cycles in all rows, smoothed, with a sum of one."""
    power = np.abs(np.fft.rfft(rows - rows.mean(axis=0), axis=0)[1:]) ** 2
    smooth = scipy.ndimage.gaussian_filter1d(power, SMOOTHED, axis=0, mode='nearest')
    return smooth / np.maximum(smooth.sum(axis=0), np.finfo(np.float64).tiny)


def spectral_distance(rows: Rows, truth: Rows) -> float:
    """The Hellinger distance `sqrt(1 - sum_f sqrt(p_f q_f))` of the spectra, the mean over variates, from 0 to 1.

    Of rows that are not finite, 1. Mikhaeil et al. 2022, https://arxiv.org/abs/2110.07238.
    """
    if not np.isfinite(rows).all():
        return 1.0
    common = np.sum(np.sqrt(spectrum(rows) * spectrum(truth)), axis=0)
    return float(np.mean(np.sqrt(np.maximum(1 - common, 0))))


@dataclasses.dataclass(frozen=True)
class AttractorEvaluation:
    """The results of `Attractor`.

    Attributes:
      numbers: by run and measure, `model/divergence`, and those of the model alone.
      runs: the rows of the model and the true ones, by name.
      spectra: mean over variates of the smoothed power, by name.
    """

    numbers: Mapping[str, float]
    runs: Mapping[str, Rows]
    spectra: Mapping[str, Float[np.ndarray, ' f']]

    def draw(self, folder: pathlib.Path) -> None:
        """Writes `attractor` and `powers`, each a figure and the numbers in it as CSV."""
        trajectory_panels(self.runs, folder / 'attractor.png')
        names = [f'{name} {place}' for name, rows in self.runs.items() for place in range(rows.shape[1])]
        lines = np.concatenate(list(self.runs.values()), axis=1).tolist()
        write_csv(folder / 'attractor.csv', tuple(names), lines)
        count = len(self.spectra[TRUTH])
        frequencies = np.arange(1, count + 1) / len(self.runs[TRUTH])
        spectrum_curves(frequencies, self.spectra, folder / 'powers.png', truth=TRUTH)
        powers = np.stack([frequencies, *self.spectra.values()], axis=1).tolist()
        write_csv(folder / 'powers.csv', ('cycles_per_row', *self.spectra), powers)

    def table(self, title: str) -> Table:
        """One row a run, one column a measure that all have; what the model alone has stands below."""
        shown = digits('.3f')
        runs = dict.fromkeys(name.partition('/')[0] for name in self.numbers if '/' in name)
        columns = [Column('run'), *(Column(name.replace('_', ' '), shown, True) for name in MEASURES)]
        rows: list[tuple[Any, ...]] = [
            (run.replace('_', ' '), *(self.numbers[f'{run}/{name}'] for name in MEASURES)) for run in runs
        ]
        alone = ', '.join(f'{name} {value:.4g}' for name, value in self.numbers.items() if '/' not in name)
        return Table('attractor', columns, rows, f'{title}; of the model: {alone}')


MEASURES: Mapping[str, Callable[[Rows, Rows], float]] = {
    'divergence': divergence,
    'spectral_distance': spectral_distance,
}
"""What compares rows with the true ones."""


@dataclasses.dataclass(frozen=True)
class Attractor:
    """Lets a model run by itself from a row of a split, for as many rows as it has, and compares where both go.

    `divergence` is of densities in state space, `spectral_distance` of power spectra, `error` the mean squared error
    `ahead` rows after each of many rows that the model is entered at, and `regions` how many linear regions the run
    visits. `exponent` is its greatest Lyapunov exponent a row, the mean growth of a small difference (Benettin et al.
    1980, https://doi.org/10.1007/BF02128236), left out of a run that is not finite. For scale stand beside them the
    last rows of the training split, and normal ones of the same mean and covariance.

    Attributes:
      cadence: when to run during training.
      split: which split of the series.
      ahead: rows from where the model is entered to where the error is taken.
      starts: how many rows it is entered at, at equal distances.
      transient: rows of the run that are dropped first.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'test'
    ahead: int = 20
    starts: int = 500
    transient: int = 500
    name: str = 'attractor'

    def load_data(self, setup: Setup) -> None:
        """Reads the series. Raises `UserError` for a task of another kind, a model that cannot run, and few rows."""
        if not isinstance(setup.task, Reconstruction) or not isinstance(setup.model, Dynamical):
            raise UserError(
                'Attractor is for a task of Reconstruction and a model that runs by itself; these are '
                f'{type(setup.task).__name__} and {type(setup.model).__name__}'
            )
        series = scaled(setup.task.data)
        rows, trained = series.split(self.split), len(series.split('train'))
        if len(rows) > trained:
            raise UserError(
                f'the {self.split} split has {len(rows)} rows and training {trained}, of which as many are compared '
                'with it; divide the series otherwise'
            )
        if len(rows) <= self.ahead or self.ahead < 1 or self.starts < 1:
            raise UserError(
                f'Attractor has ahead {self.ahead} and starts {self.starts} for {len(rows)} rows of {self.split}; both '
                'are at least 1, and ahead is below the rows'
            )

    def evaluate(self, setup: Setup, variables: nnx.State) -> AttractorEvaluation:
        """Returns the measures, with the runs and spectra that are drawn."""
        task = setup.task
        assert isinstance(task, Reconstruction)
        series = scaled(task.data)
        truth = series.split(self.split).astype(np.float64)
        before = series.split('train')[-len(truth) :].astype(np.float64)
        places = np.linspace(0, len(truth) - 1 - self.ahead, self.starts).astype(int)
        run, regions, exponent, reached = (
            np.asarray(one, np.float64)
            for one in setup.program(_program, self.transient, len(truth), self.ahead)(
                variables, truth[:1].astype(np.float32), truth[places].astype(np.float32)
            )
        )
        drawn = np.random.default_rng(0).multivariate_normal(
            truth.mean(axis=0), np.atleast_2d(np.cov(truth.T)), len(truth)
        )
        runs = {MODEL: run, AGAIN: before, GAUSSIAN: drawn}
        numbers = {f'{name}/{key}': of(rows, truth) for name, rows in runs.items() for key, of in MEASURES.items()}
        apart = np.mean((reached - truth[places + self.ahead]) ** 2)
        numbers |= {'error': float(np.minimum(np.nan_to_num(apart, nan=np.inf), np.finfo(np.float32).max))}
        numbers |= {'regions': float(len(np.unique(regions, axis=0)))}
        if np.isfinite(exponent):
            numbers |= {'exponent': float(exponent)}
        shown = {TRUTH: truth, MODEL: run}
        powers = {name: spectrum(rows).mean(axis=1) for name, rows in shown.items() if np.isfinite(rows).all()}
        return AttractorEvaluation(numbers, shown, powers)


def let_go(
    model: Dynamical, first: Float[Array, '1 v'], transient: int, steps: int
) -> tuple[Float[Array, 't v'], Int[Array, 't w'], Float[Array, '']]:
    """The rows of a run that begins at a row, their regions, and its greatest Lyapunov exponent a row.

    The first `transient` rows are dropped. The exponent is the mean growth of a difference that is made small again
    after every row.
    """

    def go(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        state, tangent = jax.jvp(model.step, carry[:1], carry[1:])
        growth = jnp.linalg.norm(tangent)
        return (state, tangent / growth), (model.observed(state)[0], model.region(state)[0], jnp.log(growth))

    state = model.enter(first)
    carry, _ = jax.lax.scan(go, (state, jnp.full_like(state, state.shape[1] ** -0.5)), None, length=transient)
    _, (run, regions, growths) = jax.lax.scan(go, carry, None, length=steps)
    return run, regions, jnp.mean(growths)


def _program(
    setup: Setup, transient: int, steps: int, ahead: int
) -> Callable[[nnx.State, np.ndarray, np.ndarray], tuple[Array, ...]]:
    """The run from one row, its regions and its exponent, and the rows `ahead` of others."""

    def made(variables: nnx.State, first: Float[Array, '1 v'], starts: Float[Array, 'n v']) -> tuple[Array, ...]:
        model = nnx.merge(setup.graphdef, variables)
        reached = jax.lax.fori_loop(0, ahead, lambda _, state: model.step(state), model.enter(starts))
        return *let_go(model, first, transient, steps), model.observed(reached)

    return setup.jit(made, out_shardings=setup.whole)
