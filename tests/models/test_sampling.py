import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.functional.sampling import Sampling
from attnlab.models.model import Model
from attnlab.models.sampling import generate
from attnlab.models.stack import Stack
from attnlab.zoo import ZOO


def test_greedy_generation_follows_the_parallel_logits():
    mixers = (ZOO['mingru'].spec, ZOO['nope'].spec.copy_and_resolve_references())
    mixers[1].heads = 2
    blocks = tuple(spec(Block, mixer=mixer) for mixer in mixers)
    model = build(spec(Model, dim=16, stack=spec(Stack, depth=2, blocks=blocks)))(11, dtype='float32', rngs=nnx.Rngs(0))
    prompt = np.array([3, 1, 4, 1, 5])
    drawn = list(generate(model, prompt, 6, Sampling(0.0)))
    tokens = jnp.asarray([*prompt, *drawn])[None]
    hidden, _ = model.hidden(tokens, Context.full(1, tokens.shape[1]))
    expected = jnp.argmax(model.logits(hidden), axis=-1)[0, len(prompt) - 1 : -1]
    np.testing.assert_array_equal(drawn, expected)


def test_the_same_seed_draws_the_same_tokens():
    blocks = (spec(Block, mixer=ZOO['mingru'].spec),)
    model = build(spec(Model, dim=8, stack=spec(Stack, depth=1, blocks=blocks)))(50, dtype='float32', rngs=nnx.Rngs(0))
    draws = [list(generate(model, np.array([1]), 12, seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
