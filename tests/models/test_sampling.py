import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.models.model import LanguageModel
from attnlab.models.sampling import generate, nucleus, sample
from attnlab.models.stack import Stack
from attnlab.zoo import ZOO

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1], [0.1, 0.15, 0.25, 0.5]]))


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    np.testing.assert_array_equal(nucleus(LOGITS, 0.6), [[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(nucleus(LOGITS, 0.01), [[1, 0, 0, 0], [0, 0, 0, 1]])
    assert nucleus(LOGITS, 1.0).all()


def test_samples_follow_the_tempered_distribution():
    keys = jax.random.split(jax.random.key(0), 4096)
    drawn = jax.vmap(lambda key: sample(LOGITS, key, temperature=0.5, top_p=1.0))(keys)[:, 0]
    expected = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    expected /= expected.sum()
    found = np.bincount(np.asarray(drawn), minlength=4) / len(keys)
    np.testing.assert_allclose(found, expected, atol=4 * (0.25 / len(keys)) ** 0.5)


def test_temperature_zero_takes_the_likeliest():
    np.testing.assert_array_equal(sample(LOGITS, jax.random.key(0), temperature=0.0, top_p=1.0), [0, 3])


def test_greedy_generation_follows_the_parallel_logits():
    mixers = (ZOO['mingru'].spec, ZOO['nope'].spec.copy_and_resolve_references())
    mixers[1].heads = 2
    blocks = tuple(spec(Block, mixer=mixer) for mixer in mixers)
    model = build(spec(LanguageModel, dim=16, stack=spec(Stack, depth=2, blocks=blocks)))(
        11, dtype='float32', rngs=nnx.Rngs(0)
    )
    prompt = np.array([3, 1, 4, 1, 5])
    drawn = list(generate(model, prompt, 6, temperature=0.0))
    tokens = jnp.asarray([*prompt, *drawn])[None]
    hidden, _ = model.hidden(tokens, Context.full(1, tokens.shape[1]))
    expected = jnp.argmax(model.logits(hidden), axis=-1)[0, len(prompt) - 1 : -1]
    np.testing.assert_array_equal(drawn, expected)


def test_the_same_seed_draws_the_same_tokens():
    blocks = (spec(Block, mixer=ZOO['mingru'].spec),)
    model = build(spec(LanguageModel, dim=8, stack=spec(Stack, depth=1, blocks=blocks)))(
        50, dtype='float32', rngs=nnx.Rngs(0)
    )
    draws = [list(generate(model, np.array([1]), 12, seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
