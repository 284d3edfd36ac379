"""The benchmark training step in attnlab, from an ordinary config."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from step_size import StepSize

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.train.optimizer import AdamW
from attnlab.train.schedule import Constant
from attnlab.train.setup import prepare
from attnlab.train.state import TrainState
from attnlab.train.step import make_step


def contender(size: StepSize) -> tuple:
    """Returns (step, state, batch); the step is the trainer's own, with its metrics and its guard."""
    config = config_of(pathlib.Path('language'), 'zoo=mha')
    with config.unlocked():
        config.update(batch_size=size.batch, length=size.length)
        config.model.dim = size.dim
        config.model.stack.depth = size.depth
        config.model.stack.blocks[0].mixer.heads = size.heads
        config.optimizer = spec(
            AdamW, peak_lr=size.learning_rate, schedule=spec(Constant, warmup=0.0), weight_decay=size.weight_decay
        )
    setup = prepare(config)
    numbered = make_step(setup.graphdef, setup.task, setup.transform, seed=0)

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, metrics = numbered(state, batch, state.step + 1)
        return state, metrics['loss'].mean()

    return jax.jit(step, donate_argnums=0), setup.initialize(), random_batch(size.batch, size.length, size.vocab)


def random_batch(rows: int, length: int, vocab: int) -> dict[str, jax.Array]:
    """A batch of random tokens, a document a row."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, length + 1), np.int32)
    ones = np.ones((rows, length), np.int32)
    batch = {
        'tokens': tokens[:, :-1],
        'targets': tokens[:, 1:],
        'segments': ones,
        'positions': np.broadcast_to(np.arange(length, dtype=np.int32), ones.shape),
        'weights': ones.astype(np.float32),
        'bytes': ones,
    }
    return jax.tree.map(jnp.asarray, batch)
