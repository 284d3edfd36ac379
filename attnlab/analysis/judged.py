"""Images that a diffusion model draws, judged by a classifier that was trained on images of the same data."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.special import log_softmax

from attnlab.analysis.outputs import outputs, stacked
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.drawn import Drawings
from attnlab.files import check_own, figures_of, write_results
from attnlab.mixers.softmax.reused import Reuse
from attnlab.runs.loading import Loaded, load_checked
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.diffusion import Diffusion
from attnlab.tasks.long_range import Classification
from attnlab.train.run import check_data

OF_DATA = '_of_data'


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a classifier says of images.

    Attributes:
      confidence: mean probability of the likeliest class.
      score: `exp(E KL(p(class | image) || p(class)))`, from 1 to the number of classes: how sure it is of every image
        and how many classes there are among them (Salimans et al. 2016, https://arxiv.org/abs/1606.03498, with this
        classifier in the place of one of ImageNet). It grows with the number of images.
      shares: of the images, of which each class is the likeliest.
      accuracy: share of images whose likeliest class is their label; `None` where they have none.
    """

    confidence: float
    score: float
    shares: Float[np.ndarray, 'o']
    accuracy: float | None

    @classmethod
    def of(cls, logits: Float[np.ndarray, 'n o'], labels: Int[np.ndarray, 'n'] | None) -> 'Judgement':
        """The judgement of images with these logits."""
        logs = log_softmax(logits, axis=1)
        likely, found = np.exp(logs), logits.argmax(axis=1)
        mean = likely.mean(axis=0, keepdims=True)
        # A class of no probability adds nothing.
        apart = np.where(likely > 0, likely * (logs - np.log(np.maximum(mean, np.finfo(float).tiny))), 0).sum(axis=1)
        return cls(
            confidence=float(likely.max(axis=1).mean()),
            score=float(np.exp(apart.mean())),
            shares=np.bincount(found, minlength=logits.shape[1]) / len(found),
            accuracy=None if labels is None else float(np.mean(found == labels)),
        )

    def numbers(self, others: Float[np.ndarray, 'o']) -> dict[str, float]:
        """Its numbers by name; `classes_error` is half the sum of how far shares of classes are from `others`."""
        accuracy = {} if self.accuracy is None else {'accuracy': self.accuracy}
        error = float(np.abs(self.shares - others).sum() / 2)
        return {**accuracy, 'confidence': self.confidence, 'score': self.score, 'classes_error': error}


def judge(
    loaded: Loaded,
    judging: pathlib.Path,
    workdir: pathlib.Path,
    printer: Printer,
    *,
    split: str | None = None,
    count: int | None = None,
    reuse: Reuse | None = None,
    other_data: bool = False,
) -> dict[str, float]:
    """Draws images with a run and has another run classify them; writes `evals/<name>-judged.json` and the images.

    With `reuse` attention reads few keys in most steps of drawing, and the name says so, `<name>-judged-reuse0.1`.

    Beside what the classifier says of `count` drawn images stands what it says of as many of a split, `..._of_data`, or
    of all where it has fewer, as `examples_of_data` in the record says; shares of classes are compared with those of
    all its training images, at most a thousand. Where the run draws the images of a label, `accuracy` is how often the
    classifier finds that label. `split` and `count` are by default those that the run draws beside at its end.

    Raises `UserError` for a run that draws no images, for one to judge that is no classifier, or one of other data,
    and where data have changed unless `other_data` allows it.
    """
    setup, task = loaded.setup, loaded.setup.task
    if not isinstance(task, Diffusion):
        raise UserError(f'--judge is for runs that draw images; {workdir} was trained for {type(task).__name__}')
    check_data(workdir, task.describe(), other=other_data)
    judged_by, asked = _classifier(judging, other_data)
    if asked.data != task.data:
        raise UserError(f'{judging} classifies images of {asked.data}; a judge of {workdir} was trained on {task.data}')
    own = next((evaluator for evaluator in setup.evals if isinstance(evaluator, Drawings)), Drawings(AtEnd()))
    drawings = dataclasses.replace(own, split=split or own.split, count=count or own.count, reuse=reuse or own.reuse)
    images, length = drawings.drawn(setup, loaded.variables), judged_by.setup.length
    compared, labels = drawings.compared(setup, images), task.asked(drawings.count)

    def said_of(rows: Mapping[str, np.ndarray], labels: np.ndarray | None) -> Judgement:
        return Judgement.of(outputs(judged_by, rows).logits, labels)

    there, known = (
        stacked(judged_by, name, min(most, len(asked.source(name, length))), 1)
        for name, most in ((drawings.split, drawings.count), ('train', 1_000))
    )
    shares = np.bincount(known['label'], minlength=asked.data.kind.classes) / len(known['label'])
    of_data = said_of(there, there['label']).numbers(shares)
    of_drawn = said_of(_rows(images), labels).numbers(shares)
    found = {**compared.numbers, **of_drawn, **{f'{name}{OF_DATA}': value for name, value in of_data.items()}}
    if jax.process_index() == 0:
        name = f'{loaded.name}-judged' + ('' if reuse is None else f'-reuse{reuse.share:g}')
        folder = workdir / 'evals'
        check_own(workdir, ('evals', f'evals/{name}'))
        record = {'step': loaded.step, 'ema': loaded.ema, 'split': drawings.split, 'examples': drawings.count}
        by = {'judge': str(judging), 'judge_step': judged_by.step, 'other_data': other_data}
        if drawings.reuse is not None:
            by |= {'reuse': dataclasses.asdict(drawings.reuse)}
        path = write_results(
            folder / f'{name}.json', {**record, **by}, {f'examples{OF_DATA}': len(there['label']), **found}
        )
        figures = figures_of(path)
        compared.draw(figures)
        printer.table(compared.table(f'{workdir}, step {loaded.name}'))
        title = f'{drawings.count} drawn images, and {len(there["label"])} of data, as {judging} sees them'
        printer.table(_table(of_drawn, of_data, title))
        printer.line(f'written: {path}, {figures / "drawn.png"}')
    return found


def _classifier(workdir: pathlib.Path, other_data: bool) -> tuple[Loaded, Classification]:
    """A run and its task, which must be of one label a row."""
    loaded = load_checked(workdir, other_data=other_data)
    task = loaded.setup.task
    if not isinstance(task, Classification):
        raise UserError(
            f'--judge must name a classifier, with one label a row; {workdir} was trained for {type(task).__name__}'
        )
    return loaded, task


def _rows(images: Float[np.ndarray, 'n t c']) -> dict[str, np.ndarray]:
    """Images as rows of a classifier, without labels that are known."""
    count, length = images.shape[:2]
    return {
        'tokens': images.astype(np.float32),
        'segments': np.ones((count, length), np.int32),
        'positions': np.tile(np.arange(length, dtype=np.int32), (count, 1)),
        'label': np.zeros(count, np.int32),
        'weights': np.ones(count, np.float32),
    }


def _table(drawn: Mapping[str, float], data: Mapping[str, float], title: str) -> Table:
    columns = (Column('statistic'), Column('drawn', digits('.3f'), True), Column('data', digits('.3f'), True))
    rows = [(name.replace('_', ' '), drawn.get(name), value) for name, value in data.items()]
    return Table('judged', columns, rows, title)
