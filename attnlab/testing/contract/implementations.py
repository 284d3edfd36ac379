"""Implementations of a core are interchangeable."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from attnlab.testing.contract.subject import LENGTH, PACKED, Subject, context
from attnlab.testing.tolerances import assert_close


def check_implementations(subject: Subject, *, names: Sequence[str]) -> None:
    """Built with `implementation=name`, outputs and gradients equal those of 'reference', for every name."""
    ctx, x, weights = context(*PACKED), subject.x(), subject.x(seed=1)
    found = {}
    for name in ('reference', *names):
        made = Subject(functools.partial(subject.make, implementation=name), subject.dim)

        def loss(inputs: tuple[Any, Array], made: Subject = made) -> tuple[Array, Array]:
            y, _ = made.run(*inputs, ctx)
            return jnp.vdot(weights, y), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))((made.params, x))
        found[name] = [('y', y)] + [
            (jax.tree_util.keystr(p), g) for p, g in jax.tree_util.tree_leaves_with_path(gradients)
        ]
    for name in names:
        for (what, actual), (_, expected) in zip(found[name], found['reference'], strict=True):
            assert_close(
                actual, expected, dtype=x.dtype, reduction=LENGTH * x.size, what=f'implementations: {name}, {what}'
            )
