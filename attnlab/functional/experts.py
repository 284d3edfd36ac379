"""The networks of experts, of which every token is sent to a few, on one device or on a mesh.

On a mesh every device has the tokens of its own rows. Along the axis `expert` devices share the experts: they gather
their rows, each computes what falls on its experts, and sums of outputs go back to the rows' own devices. Along
`tensor` they share the hidden channels.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.functional import by_group, cores
from attnlab.functional.cores import EXPERT, TENSOR, Division
from attnlab.functional.needed import needing
from pallas_kernels import target
from pallas_kernels.cost import Cost, Passes

Networks = tuple[Float[Array, 'e d m'], Float[Array, 'e d m'], Float[Array, 'e m d']]
"""The matrices of all networks: of gates, of what they gate, and of outputs."""


def mixed(
    x: Float[Array, 'b t d'],
    experts: Int[Array, 'b t k'],
    weights: Float[Array, 'b t k'],
    kept: Bool[Array, 'b t k'],
    networks: Networks,
    *,
    activation: Callable[[Array], Array],
) -> Float[Array, 'b t d']:
    """`y = sum_k w_k f_{e_k}(x)`, `f_e(x) = (a(x G_e) * (x U_e)) D_e`.

    A choice that is not kept adds nothing, whatever its network gives. Under a mesh (`cores.on`) the work is divided as
    above; sizes that an axis does not divide are replicated along it, see `cores.undivided`.
    """
    local = functools.partial(_local, activation=activation)
    mesh = cores.devices()
    if not mesh:
        return local(x, experts, weights, kept, networks, first=None)
    sizes = {'b': x.shape[0], 't': x.shape[1], 'e': networks[0].shape[0], 'm': networks[0].shape[2]}
    division = Division('experts', sizes, mesh)
    together = division.parts['e'] > 1
    rows_apart = EXPERT in division.axes['b']

    def run(x: Array, experts: Array, weights: Array, kept: Array, networks: Networks) -> Array:
        if together and rows_apart:
            x, experts, weights, kept = jax.lax.all_gather((x, experts, weights, kept), EXPERT, axis=0, tiled=True)
        first = jax.lax.axis_index(EXPERT) * networks[0].shape[0] if together else None
        y = local(x, experts, weights, kept, networks, first=first)
        if together and rows_apart:
            y = jax.lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True)
        elif together:
            y = jax.lax.psum(y, EXPERT)
        return jax.lax.psum(y, TENSOR) if division.parts['m'] > 1 else y

    tokens = division.spec('b t _')
    matrices = (division.spec('e _ m'), division.spec('e _ m'), division.spec('e m _'))
    shared = jax.shard_map(run, in_specs=(*[tokens] * 4, matrices), out_specs=tokens, check_vma=False)
    return shared(x, experts, weights, kept, networks)


def _local(
    x: Float[Array, 'b t d'],
    experts: Int[Array, 'b t k'],
    weights: Float[Array, 'b t k'],
    kept: Bool[Array, 'b t k'],
    networks: Networks,
    *,
    first: Int[Array, ''] | None,
    activation: Callable[[Array], Array],
) -> Float[Array, 'b t d']:
    """What the networks add; `first`: the first of them, if not all."""
    here, active = networks[0].shape[0], experts.shape[-1]
    tokens, chosen = x.reshape(-1, x.shape[-1]), experts.reshape(-1, active)
    weights, adds = weights.reshape(-1, active), kept.reshape(-1, active)
    if first is not None:
        own = (chosen >= first) & (chosen < first + here)
        # Choices of other devices' experts come last, beyond the rows of all groups.
        chosen, adds = jnp.where(own, chosen - first, here), adds & own
    if chosen.size <= max(here, active):
        outputs = _few(tokens, chosen, networks, activation)
    else:
        outputs = _many(tokens, chosen, networks, activation, whole=first is None)
    # Before the product, so that the gradient of a weight meets no number of a row that adds nothing.
    outputs = jnp.where(adds[..., None], outputs, 0)
    return jnp.sum(outputs.astype(weights.dtype) * weights[..., None], axis=1).astype(x.dtype).reshape(x.shape)


def _many(
    tokens: Float[Array, 'n d'],
    chosen: Int[Array, 'n k'],
    networks: Networks,
    activation: Callable[[Array], Array],
    *,
    whole: bool,
) -> Float[Array, 'n k d']:
    """What every network chosen makes of a token; `whole` says that all networks are here.

    Choices of networks that are not here have the number of those that are; what is given for them is not said.
    """
    # A product of sorted rows is one of all rows with the matrices of every network where XLA is not for TPUs.
    served = _products_of_sorted if target.current().platform == 'tpu' else _blocks
    return served(tokens, chosen, networks, activation, whole=whole)


def _blocks(
    tokens: Float[Array, 'n d'],
    chosen: Int[Array, 'n k'],
    networks: Networks,
    activation: Callable[[Array], Array],
    *,
    whole: bool,
) -> Float[Array, 'n k d']:
    """By blocks of rows of one network, and so with products of usual kinds."""
    size = by_group.rows_of_a_block(chosen.size, len(networks[0]))

    def network(x: Array, gates: Array, up: Array, down: Array) -> Array:
        return (activation(x @ gates) * (x @ up)) @ down

    def run(tokens: Array, chosen: Array, networks: Networks) -> Array:
        rows = jnp.broadcast_to(tokens[:, None], (*chosen.shape, tokens.shape[-1])).reshape(-1, tokens.shape[-1])
        found = by_group.in_blocks(network, rows, chosen.reshape(-1), networks, size=size, whole=whole)
        return found.reshape(*chosen.shape, -1)

    in_room = by_group.number_of_blocks(chosen.size, len(networks[0]), size) * size
    costs = {
        'model': _cost(chosen.size, networks[0], backward=6),
        # The first two products are computed again.
        'executed': _cost(in_room, networks[0], backward=8),
    }
    return needing(run, 'experts', **costs)(tokens, chosen, networks)


def _cost(rows: int, gates: Float[Array, 'e d m'], *, backward: int) -> Passes:
    """The cost of the three products forward, and of so many backward."""
    product = Cost(flops=2 * rows * gates[0].size)
    return Passes(product * 3, product * backward)


def _products_of_sorted(
    tokens: Float[Array, 'n d'],
    chosen: Int[Array, 'n k'],
    networks: Networks,
    activation: Callable[[Array], Array],
    *,
    whole: bool,
) -> Float[Array, 'n k d']:
    """By products whose rows are sorted by expert; choices of networks that are not here come last."""
    order = by_expert(chosen)
    load = jnp.sum(jax.nn.one_hot(chosen, len(networks[0]), dtype=jnp.int32), axis=(0, 1))
    # Repeated and then permuted: the gradient of a permutation adds nothing up, so its order cannot matter.
    repeated = jnp.broadcast_to(tokens[None], (chosen.shape[1], *tokens.shape)).reshape(-1, tokens.shape[-1])
    given = repeated.at[order].get(unique_indices=True)
    if not whole:
        # What a product gives for rows of no group, forward or backward, is not said.
        given = jnp.where((jnp.arange(len(given)) < jnp.sum(load))[:, None], given, 0)
    gates, up, down = networks

    def network(given: Array) -> Array:
        hidden = activation(jax.lax.ragged_dot(given, gates, load)) * jax.lax.ragged_dot(given, up, load)
        return jax.lax.ragged_dot(hidden, down, load)

    return back(jax.checkpoint(network)(given), order, chosen.shape)


def _few(
    tokens: Float[Array, 'n d'],
    chosen: Int[Array, 'n k'],
    networks: Networks,
    activation: Callable[[Array], Array],
) -> Float[Array, 'n k d']:
    """The same of so few choices, those of a decoded token, that their matrices are taken: no other expert is read.

    It can be mapped over streams, which XLA's product of sorted rows cannot.
    """
    # The last one in the place of those of other devices, whose outputs are not added.
    gates, up, down = (matrices.at[chosen].get(mode='clip') for matrices in networks)
    hidden = activation(jnp.einsum('nd,nkdm->nkm', tokens, gates)) * jnp.einsum('nd,nkdm->nkm', tokens, up)
    return jnp.einsum('nkm,nkmd->nkd', hidden, down)


def by_expert(experts: Int[Array, 'n k']) -> Int[Array, ' m']:
    """The order of choices by expert, among equals first choices first, then in the order of tokens."""
    return jnp.argsort(experts.T.reshape(-1), stable=True)


def back(sorted_: Array, order: Int[Array, ' m'], shape: tuple[int, ...]) -> Array:
    """What was sorted, first choices first, by token and choice again, `n k`."""
    tokens, choices = shape
    found = sorted_.at[jnp.argsort(order)].get(unique_indices=True)
    return jnp.swapaxes(found.reshape(choices, tokens, *sorted_.shape[1:]), 0, 1)
