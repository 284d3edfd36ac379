"""The programs of a recipe, of sizes that kernels accept: training steps, evaluation, prefill, a decoding step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from attnlab.config import spec
from attnlab.models import sampling
from attnlab.models.stack import stack_spec
from attnlab.nn.mlps import GatedMLP
from attnlab.train.partition import Axes
from attnlab.train.setup import Setup, prepare
from attnlab.zoo import ZOO
from configs import images, language, long_range

ROWS, LENGTH, WIDTH, HEADS = 2, 512, 256, 2
"""Sizes of a batch, of the model, and of the heads of mixers that leave them open: 128 channels each."""

PERIODS = 2
"""How often the pattern of layers is repeated: where it is scanned, that is a loop."""

CONFIGS = {
    'language': lambda zoo: language.get_config(f'{zoo},size=10m'),
    'long_range': lambda zoo: long_range.get_config(f'{zoo},size=smoke,task=authorship'),
    'images': lambda zoo: images.get_config(f'{zoo},data=count'),
}
"""What a recipe is trained by, in any size; images have 256 patches."""


def setup_for(recipe: str, devices: Sequence[jax.Device], mesh: str = '', *, remat: bool = False) -> Setup:
    """The setup of a recipe in bfloat16 on the first of `devices`: a language model or a classifier.

    With a mesh, such as `data=2,tensor=2`, on all of `devices`.
    """
    row = ZOO[recipe]
    config = CONFIGS[row.config](f'zoo={recipe}').unlock()
    config.precision.activations = 'bfloat16'
    sizes = {axis: int(size) for axis, size in (item.split('=') for item in mesh.split(',') if item)}
    axes = Axes(**{'data': 1} | sizes)
    config.batch_size, config.model.dim = max(ROWS, axes.data * axes.fsdp), WIDTH
    if not row.grid:
        config.length = LENGTH
    layers = sum(mixer.layers if 'layers' in mixer else 1 for mixer in row.pattern)
    heads = max(HEADS, row.small.get('heads', HEADS))  # Some need more.
    mixers = row.sized(heads=heads, window=LENGTH // 4, length=LENGTH)
    config.model.stack = stack_spec(mixers, layer=row.layer, depth=PERIODS * layers, mlp=spec(GatedMLP))
    config.model.stack.remat = remat
    return dataclasses.replace(prepare(config.lock()), mesh=axes.make(devices if mesh else devices[:1]))


def training(setup: Setup) -> jax.stages.Traced:
    """A training step."""
    return setup.trace()


def evaluation(setup: Setup) -> jax.stages.Traced:
    """The metrics of a batch."""
    return setup.measure.trace(setup.abstract.variables, setup.abstract_batch())


def prefill(setup: Setup) -> jax.stages.Traced:
    """Reading a prompt."""
    return _advance(setup, LENGTH)


def decode(setup: Setup) -> jax.stages.Traced:
    """One token more."""
    return _advance(setup, 1)


def _advance(setup: Setup, tokens: int) -> jax.stages.Traced:
    graphdef, variables = nnx.split(setup.model)
    state = jax.eval_shape(lambda variables: nnx.merge(graphdef, variables).init_state(ROWS, 2 * LENGTH), variables)
    here = NamedSharding(setup.mesh, PartitionSpec())
    arguments = (
        variables,
        jax.ShapeDtypeStruct((ROWS, tokens), jnp.int32),
        state,
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), arguments)
    run = setup.jit(functools.partial(sampling.advance, graphdef), donate_argnums=2)
    return run.trace(*placed)


PROGRAMS: dict[str, tuple[Callable[[Setup], jax.stages.Traced], bool]] = {
    'training step': (training, False),
    'recomputing step': (training, True),
    'evaluation': (evaluation, False),
    'prefill': (prefill, False),
    'decoding step': (decode, False),
}
"""Every program, and whether blocks are computed again on the way back."""


def programs_of(recipe: str) -> tuple[str, ...]:
    """The names of the programs that a recipe has: without a state it neither reads a prompt nor decodes."""
    return tuple(name for name in PROGRAMS if ZOO[recipe].streaming or name not in ('prefill', 'decoding step'))


def trace(recipe: str, program: str, devices: Sequence[jax.Device], mesh: str = '') -> jax.stages.Traced:
    """A program of a recipe, traced for `devices` as in `setup_for`; their kind is the target's, which callers name."""
    make, remat = PROGRAMS[program]
    return make(setup_for(recipe, devices, mesh, remat=remat))
