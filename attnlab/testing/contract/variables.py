"""Parameters and buffers are annotated."""

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.nn.parameter import AXES, GROUPS, Buffer
from attnlab.testing.contract.subject import Subject, full, require


def check_parameters(subject: Subject) -> None:
    """Every parameter starts in float32, and names its logical axes and its optimiser group."""
    mixer = subject.fresh()
    for path, variable in nnx.to_flat_state(nnx.state(mixer, nnx.Param)):
        name = '.'.join(map(str, path))
        metadata = variable.get_metadata()
        axes = metadata.get('axes')
        require(variable.dtype == jnp.float32, f'parameters: {name} is {variable.dtype}, not float32')
        require(
            axes is not None and len(axes) == variable.ndim and set(axes) <= set(AXES),
            f'parameters: the axes of {name} are {axes}; it has {variable.ndim} dimensions, and axes are among {AXES}',
        )
        group = metadata.get('group')
        require(group in GROUPS, f'parameters: the group of {name} is {group!r}, not one of {GROUPS}')


def check_buffers(subject: Subject) -> None:
    """Variables other than parameters are buffers that name their logical axes, and a call does not change them."""
    mixer = subject.fresh()
    others = dict(nnx.to_flat_state(nnx.state(mixer, nnx.Not(nnx.Param))))
    for path, variable in others.items():
        name, axes = '.'.join(map(str, path)), variable.get_metadata().get('axes')
        require(isinstance(variable, Buffer), f'buffers: {name} is {type(variable).__name__}; see attnlab.nn.parameter')
        require(
            axes is not None and len(axes) == variable.ndim and set(axes) <= set(AXES),
            f'buffers: the axes of {name} are {axes}; it has {variable.ndim} dimensions, and axes are among {AXES}',
        )
    if not others:
        return
    before = jax.tree.map(jnp.array, nnx.state(mixer, Buffer))
    mixer(subject.x(), full())
    unchanged = jax.tree.map(jnp.array_equal, before, nnx.state(mixer, Buffer))
    require(all(jax.tree.leaves(unchanged)), 'buffers: a call changed one; a mixer is a pure function')
