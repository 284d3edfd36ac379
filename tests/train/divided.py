"""Training steps whose work is divided over virtual devices, compared with the same steps on one.

On more devices than the tests have, in a process of its own, on one mesh after another:

    python -m tests.train.divided gla sequence=4 sequence=8
    python -m tests.train.divided gla mosaic_gpu tensor=2 data=2,fsdp=2,tensor=2

The second in sizes that kernels accept, by interpreted kernels on one device as on several.
"""

import dataclasses
import importlib.util
import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from attnlab.train.optimizer import named_parameters
from attnlab.train.partition import Axes
from attnlab.train.setup import Setup, prepare
from attnlab.train.state import TrainState
from attnlab.zoo import ZOO
from configs import language
from pallas_kernels import dispatch, target
from tests.functional.interpreter import let_devices_run_apart

EDGES = ((10,), (24,), (7, 30), ())
"""Where documents begin in four rows of 48 tokens, besides at their beginning: within one of two devices that share
the time of a row, at the edge between them, and within both."""

SHAKEN = 4e-6
"""How far parameters are moved to see what rounding does, as parts of themselves: some thirty of the last bit."""


def small(
    zoo: str,
    mixer: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    heads: int | None = None,
    causal: bool = True,
    **sizes: int,
) -> Setup:
    """A small model of a recipe, its mixers changed by `mixer`, on a mesh of two rows unless sizes are given."""
    config = language.get_config(f'zoo={zoo},size=tiny').unlock()
    config.batch_size, config.length, config.steps = 4, 48, 2
    config.model.dim, config.model.stack.depth = 64, len(config.model.stack.blocks)
    for block in config.model.stack.blocks:
        # Not every block calls what it mixes with so.
        if mixer:
            block.mixer.update(mixer)
        if heads is not None:
            block.mixer.heads = heads
        if not causal:
            block.mixer.causal = False
    return _on(config, sizes)


def for_kernels(zoo: str, form: str, **sizes: int) -> Setup:
    """A model of one layer of a recipe on a mesh, in sizes and types that kernels accept: two heads of 128 channels."""
    config = language.get_config(f'zoo={zoo},size=tiny').unlock()
    config.batch_size, config.length, config.steps = 4, 128, 2
    config.model.dim, config.model.stack.depth = 256, len(config.model.stack.blocks)
    for block in config.model.stack.blocks:
        if 'heads' in block.mixer:
            block.mixer.heads = 2
    # The matrix units of GPUs take 16-bit numbers.
    config.precision.activations = 'bfloat16' if form == 'mosaic_gpu' else 'float32'
    return _on(config, sizes)


def _on(config: ConfigDict, sizes: dict[str, int]) -> Setup:
    """The setup on the first devices, as many as a mesh of these sizes has; on all if none is given."""
    for axis, size in ({'data': 1} | sizes).items() if sizes else ():
        config.mesh[axis] = size
    return prepare(config.lock(), jax.devices()[: math.prod(sizes.values())] if sizes else None)


def documents(rows: int, length: int) -> dict[str, np.ndarray]:
    """Segments and positions of the rows."""
    starts = np.zeros((rows, length), np.int32)
    for row, edges in zip(starts, EDGES, strict=True):
        row[list(edges)] = 1
    segments, tokens = 1 + np.cumsum(starts, axis=1, dtype=np.int32), np.arange(length, dtype=np.int32)
    return {'segments': segments, 'positions': tokens - np.maximum.accumulate(starts * tokens, axis=1)}


def trained(setup: Setup, *, packed: bool = True, steps: int = 2, shaken: float = 0.0) -> dict[str, Any]:
    """Losses and norms of the gradients of some steps, and the gradient of every parameter in the first.

    Gradients are the first momentum of Adam: times a number that is one for all parameters. Parameters start `shaken`,
    each times one plus that times noise.
    """
    shape = (setup.batch_size, setup.length)
    state, found = shaken_by(shaken, setup.initialize()), {}
    for number in range(1, steps + 1):
        noise = np.random.default_rng(number).integers(0, 256, shape).astype(np.int32)
        rows = {
            name: noise if name in ('tokens', 'targets') else np.ones(shape, array.dtype)
            for name, array in setup.abstract_batch().items()
        }
        rows['positions'] = np.tile(np.arange(setup.length, dtype=np.int32), (setup.batch_size, 1))
        rows |= documents(*shape) if packed else {}
        state, metrics = setup.step(state, setup.place(rows), np.int32(number))
        found[f'loss {number}'] = float(metrics['loss'].total)
        found[f'gradient {number}'] = float(metrics['grad_norm'])
        if number == 1:
            momenta = named_parameters(optax.tree.get(state.opt_state, 'mu'))
            found |= {f'gradient of {path}': np.asarray(momentum[...]) for path, momentum in momenta.items()}
    return found


def shaken_by(size: float, state: TrainState) -> TrainState:
    """The state, every parameter times one plus noise of a size."""
    random = np.random.default_rng(0)

    def shake(param: jax.Array) -> jax.Array:
        noise = (1 + size * random.standard_normal(param.shape)).astype(np.float32)
        return jax.device_put(param * noise, param.sharding)

    return dataclasses.replace(state, params=jax.tree.map(shake, state.params)) if size else state


def assert_same(divided: dict[str, Any], alone: dict[str, Any], shaken: dict[str, Any] | None = None) -> None:
    """Numbers agree by themselves; gradients by the root mean square of the parameter's, or where a parameter has next
    to none, as keys' biases have under a softmax, by a hundred-thousandth of the greatest.

    `shaken` has what one device finds of parameters that differ by about what operations round: all agree within twice
    what that moves besides. A norm of heads whose first token reads next to nothing magnifies it a thousand times.
    """
    assert divided.keys() == alone.keys()
    sizes = {name: float(np.sqrt(np.mean(np.square(value)))) for name, value in alone.items()}
    greatest = max(size for name, size in sizes.items() if name.startswith('gradient of'))
    for name, value in alone.items():
        bound = 1e-3 * sizes[name] + 1e-5 * greatest if name.startswith('gradient of') else 2e-4 * sizes[name]
        if shaken is not None:
            bound += 2 * float(np.max(np.abs(shaken[name] - value)))
        assert np.max(np.abs(divided[name] - value)) <= bound, name


def assert_near(divided: dict[str, Any], alone: dict[str, Any]) -> None:
    """All agree to a twentieth of their norm, which is a few times what activations of 16 bits round of gradients."""
    assert divided.keys() == alone.keys()
    norms = {name: float(np.linalg.norm(value)) for name, value in alone.items()}
    greatest = max(norm for name, norm in norms.items() if name.startswith('gradient of'))
    for name, value in alone.items():
        assert np.linalg.norm(divided[name] - value) <= 0.05 * norms[name] + 1e-4 * greatest, name


def on_one_device(setup: Setup) -> Setup:
    """The setup on one device of its mesh."""
    if setup.mesh.size == 1:
        return setup
    return dataclasses.replace(setup, mesh=Axes().make(list(setup.mesh.devices.flat[:1])))


def with_kernels(setup: Setup, form: str) -> dict[str, Any]:
    """What `trained` finds in one step whose cores are served by interpreted kernels wherever there are some.

    But for short convolutions: half the channels of two heads of 96 are too few for theirs.
    """
    with target.compiling_for(target.interpreted(form)), dispatch.ledger() as entries:
        found = trained(setup, steps=1)
    served = {(entry.core, entry.implementation) for entry in entries if entry.core != 'short_conv'}
    others = {
        core for core, name in served if name != form and importlib.util.find_spec(f'pallas_kernels.{core}.{form}')
    }
    assert not others, served
    return found


def check(zoo: str, meshes: Sequence[dict[str, int]], form: str | None = None) -> None:
    """Compares steps of a recipe on every mesh with those on one device."""

    def found(sizes: dict[str, int], shaken: float = 0.0) -> dict[str, Any]:
        print(f'{zoo} on {sizes}', file=sys.stderr)
        setup = small(zoo, **sizes) if form is None else for_kernels(zoo, form, **sizes)
        setup.check()
        packed = ZOO[zoo].packed
        return trained(setup, packed=packed, shaken=shaken) if form is None else with_kernels(setup, form)

    alone = found({'data': 1})
    shaken = found({'data': 1}, SHAKEN) if form is None else None
    for sizes in meshes:
        if form == 'mosaic_gpu':
            assert_near(found(sizes), alone)
        else:
            assert_same(found(sizes), alone, shaken)


if __name__ == '__main__':
    zoo, *words = sys.argv[1:]
    form = words.pop(0) if words[0] in dispatch.PLATFORM else None
    meshes = [{axis: int(size) for axis, size in (item.split('=') for item in word.split(','))} for word in words]
    jax.config.update('jax_num_cpu_devices', max(math.prod(sizes.values()) for sizes in meshes))
    if form is not None:
        let_devices_run_apart()
    check(zoo, meshes, form)
