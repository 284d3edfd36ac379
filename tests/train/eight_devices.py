"""Checks on eight virtual CPU devices, in a process of their own: `python -m tests.train.eight_devices CHECK`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from attnlab.errors import UserError
from attnlab.evals import drawn, pictures
from attnlab.evals import experts as loads
from attnlab.functional import cores
from attnlab.nn.experts import MixtureOfExperts
from attnlab.nn.norms import EvoNormB0
from attnlab.nn.parameter import param
from attnlab.runs import loading
from attnlab.train import partition
from attnlab.train.optimizer import AdamW, Muon, Optimizer
from attnlab.train.partition import Axes
from attnlab.train.setup import Setup, prepare
from configs import images, language


class Layer(nnx.Module):
    """A residual network of one hidden layer, with a width that two devices cannot divide."""

    def __init__(self, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.gain = param(nnx.initializers.ones, (8,), axes=('embed',), group='vector', rngs=rngs)
        self.odd = param(normal, (8, 3), axes=('embed', 'mlp'), rngs=rngs)
        self.back = param(normal, (3, 8), axes=('mlp', 'embed'), rngs=rngs)
        self.up = param(normal, (8, 16), axes=('embed', 'mlp'), rngs=rngs)
        self.down = param(normal, (16, 8), axes=('mlp', 'embed'), rngs=rngs)
        self.square = param(normal, (8, 8), axes=('embed', 'embed'), rngs=rngs)
        self.rate = param(normal, (4,), axes=('state',), group='dynamics', rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh((x * self.gain[None, None]) @ self.up[...]) @ self.down[...]
        return x + hidden @ self.square[...] * jnp.exp(self.rate[0]) + x @ self.odd[...] @ self.back[...]


class Model(nnx.Module):
    """Embedding and two stacked layers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = param(nnx.initializers.normal(1.0), (10, 8), axes=('vocab', 'embed'), group='embedding', rngs=rngs)
        self.layers = nnx.vmap(lambda key: Layer(rngs=nnx.Rngs(params=key)))(jax.random.split(rngs.params(), 2))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        graphdef, stacked = nnx.split(self.layers)
        x = self.embed[tokens]
        for index in range(2):
            x = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=index: leaf[i], stacked))(x)
        return x @ self.embed[...].T


def build() -> tuple[nnx.GraphDef, nnx.State]:
    return jax.jit(lambda key: nnx.split(Model(rngs=nnx.Rngs(params=key))))(jax.random.key(0))


def placements() -> None:
    """Where parameters, moments and batches lie on a mesh of two by two by two."""
    mesh = Axes(data=2, fsdp=2, tensor=2).make()
    _, params = build()
    rows = {row.path: row for row in partition.describe(params, mesh)}
    assert {path: row.spec for path, row in rows.items()} == {
        'embed': P('tensor', 'fsdp'),
        'layers/back': P(None, None, 'fsdp'),
        'layers/down': P(None, 'tensor', 'fsdp'),
        'layers/gain': P(None, 'fsdp'),
        'layers/odd': P(None, 'fsdp', None),
        'layers/rate': P(None, None),
        'layers/square': P(None, 'fsdp', None),
        'layers/up': P(None, 'fsdp', 'tensor'),
    }
    assert rows['layers/odd'].whole == ('mlp 3 over tensor 2',)
    assert rows['layers/odd'].sharding == '- fsdp - (does not divide: mlp 3 over tensor 2)'
    assert rows['layers/rate'].sharding == 'whole'
    assert (rows['embed'].shape, rows['embed'].group) == ((10, 8), 'embedding')
    assert partition.undivided(params, mesh) == [
        'layers/back: mlp 3 over tensor 2',
        'layers/odd: mlp 3 over tensor 2',
    ]
    for optimizer in (AdamW(peak_lr=0.1), Muon(peak_lr=0.1)):
        state = jax.eval_shape(optimizer.transform(params, 4).init, params)
        shardings = partition.state_shardings(state, mesh)
        assert jax.tree.structure(shardings) == jax.tree.structure(state)
        found = {jax.tree_util.keystr(path): leaf.spec for path, leaf in jax.tree.leaves_with_path(shardings)}
        moments = {path: spec for path, spec in found.items() if "['up']" in path}
        assert set(moments.values()) == {P(None, 'fsdp', 'tensor')} and moments, moments
        assert {spec for path, spec in found.items() if 'count' in path} == {P()}


def meshes() -> None:
    """Sizes, the errors for those that do not multiply to eight, and what runs of other sizes are loaded on."""
    assert dict(Axes().make().shape) == {'data': 8, 'fsdp': 1, 'expert': 1, 'tensor': 1, 'sequence': 1}
    sizes = {'data': 2, 'fsdp': 2, 'expert': 1, 'tensor': 2, 'sequence': 1}
    assert dict(Axes(data=2, fsdp=-1, tensor=2).make().shape) == sizes
    mesh = Axes(fsdp=2, sequence=2).make()
    assert partition.batch_sharding(mesh, (8, 6)).spec == P(partition.ROWS, 'sequence')
    assert partition.batch_sharding(mesh, (8, 5)).spec == P(partition.ROWS)
    assert partition.batch_shards(mesh) == 4
    assert partition.feed(mesh) == (0, 1)
    kept, fitted, unsuited = Axes(data=2, fsdp=4), Axes(data=1, fsdp=4), Axes(data=1, fsdp=3)
    assert [loading._here(axes) for axes in (kept, fitted, unsuited)] == [kept, Axes(fsdp=4), Axes()]
    wrong = {
        Axes(fsdp=3): 'the mesh data=-1 fsdp=3 expert=1 tensor=1 sequence=1 needs a multiple of 3 devices; there are 8',
        Axes(data=2, tensor=2): 'the mesh data=2 fsdp=1 expert=1 tensor=2 sequence=1 needs 4 devices; there are 8',
        Axes(data=-1, fsdp=-1): 'the sizes of a mesh must be at least 1, except one that may be -1',
        Axes(tensor=0): 'the sizes of a mesh must be at least 1',
    }
    for axes, message in wrong.items():
        try:
            axes.make()
        except UserError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f'{axes} was accepted')


def training() -> None:
    """Three steps on every kind of mesh end in the parameters of three steps on one device."""
    optimizer = AdamW(peak_lr=0.05, weight_decay=0.1)
    alone = _train(optimizer, None)
    for axes in (
        Axes(),
        Axes(data=2, fsdp=2, tensor=2),
        Axes(data=2, sequence=4),
    ):
        for path, value in _train(optimizer, axes).items():
            np.testing.assert_allclose(value, alone[path], rtol=2e-4, atol=2e-5, err_msg=f'{path} on {axes}')


def experts() -> None:
    """A mixture of experts has the value and the gradients of one device on meshes with every axis."""
    x = jax.random.normal(jax.random.key(1), (8, 4, 8))
    graphdef, params = nnx.split(MixtureOfExperts(8, hidden=4, experts=4, capacity=1.0, rngs=nnx.Rngs(0)))

    def run(params, x):
        return jax.value_and_grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x) ** 2))(params)

    alone = jax.tree.leaves(jax.jit(run)(params, x))
    for axes in (
        Axes(data=1, fsdp=2, expert=2, tensor=2),
        Axes(data=1, expert=4, sequence=2),
        Axes(data=4, expert=2),
    ):
        mesh = axes.make()
        found = partition.describe(params, mesh)
        assert {row.spec[0] for row in found if len(row.shape) == 3} == {'expert'}
        placed = jax.device_put(params, partition.state_shardings(params, mesh))
        rows = jax.device_put(x, partition.batch_sharding(mesh, x.shape))
        for one, other in zip(alone, jax.tree.leaves(jax.jit(cores.on(mesh, run))(placed, rows)), strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5, err_msg=f'{axes}')


def _train(optimizer: Optimizer, axes: Axes | None) -> dict[str, np.ndarray]:
    graphdef, params = build()
    transform = optimizer.transform(params, 3)
    state = (params, transform.init(params))

    def loss(params, tokens):
        return -jnp.mean(jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens[:, :-1]))[..., 3])

    def step(state, tokens):
        params, opt_state = state
        updates, opt_state = transform.update(jax.grad(loss)(params, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    batches = np.random.default_rng(0).integers(0, 10, (3, 16, 9)).astype(np.int32)
    if axes is None:
        step = jax.jit(step)
    else:
        mesh = axes.make()
        shardings = partition.state_shardings(state, mesh)
        rows = jax.sharding.NamedSharding(mesh, P(partition.ROWS))
        state = jax.tree.map(jax.device_put, state, shardings)
        batches = [jax.device_put(batch, rows) for batch in batches]
        step = jax.jit(step, out_shardings=shardings)
    for batch in batches:
        state = step(state, batch)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state[0])}


def measurements() -> None:
    """What a norm measures of a batch whose rows lie on eight devices is of all of them."""
    norm, x = EvoNormB0(4, rngs=nnx.Rngs(0)), np.random.default_rng(0).normal(size=(16, 3, 4)).astype(np.float32)
    graphdef, params, buffers = nnx.split(norm, nnx.Param, ...)

    def gradient(buffers, x):
        return jax.grad(lambda buffers: jnp.sum(nnx.merge(graphdef, params, buffers).in_training(x)))(buffers)

    mesh = Axes(data=8).make()
    divided = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(partition.ROWS)))
    told = jax.jit(gradient)(buffers, divided)['moments'][...]
    np.testing.assert_allclose(told, [*(x.var((0, 1)) * 48 / 47), 1], rtol=1e-5)


def evaluations() -> None:
    """What evaluations draw, find and count of rows on eight devices is whole on each, where its process reads it."""

    def small(config: ConfigDict) -> Setup:
        with config.unlocked():
            config.batch_size, config.model.dim, config.model.stack.depth = 8, 16, 1
        return prepare(config)

    diffusion = small(images.get_config('zoo=mha,data=digits,predict=epsilon'))
    segments = small(images.get_config('zoo=mha,data=segments,pictures=1'))
    mixture = small(language.get_config('zoo=mingru,mlp=moe'))
    rows = {name: np.zeros((8, *row.shape), row.dtype) for name, row in segments.task.example(segments.length).items()}
    tokens = mixture.place({name: np.ones(row.shape, row.dtype) for name, row in mixture.abstract_batch().items()})
    variables = [setup.initialize().variables for setup in (diffusion, segments, mixture)]
    found = {
        'drawn': drawn._program(diffusion, 8, 1, 0.0, None)(variables[0], jax.random.key(0)),
        'classes': pictures._classes(segments)(variables[1], rows),
        'influence': pictures._influence(segments)(variables[1], rows, jax.random.key(0)),
        'loads': loads._program(mixture)(variables[2], tokens),
    }
    for path, array in jax.tree.leaves_with_path(found):
        assert len(array.sharding.device_set) == 8 and array.is_fully_replicated, f'{path} {array.sharding}'


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    {check.__name__: check for check in (placements, meshes, training, experts, measurements, evaluations)}[
        sys.argv[1]
    ]()
