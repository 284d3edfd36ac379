"""The cores of sequence mixing, as mixers, heads and losses call them: attnlab's only way to call `pallas_kernels`.

A core computes on one device, and no compiler can divide a kernel over several. Under a mesh (see `on`) each call is
wrapped in `jax.shard_map`: rows over `data`, `fsdp` and `expert`, heads, or the channels of a scan, over `tensor`, the
classes of the loss over `tensor`, and time over `sequence`, by the versions in `attnlab.functional.sequence` and
`attnlab.functional.ring`. Everything else is replicated. On one device calls are not wrapped. Weight maps, dispatch and
targets are imported directly.

A dimension whose size an axis does not divide is replicated along it, so that all devices of the axis do the same work;
`undivided` collects such cases. Key and value heads that the axis does not divide are repeated to the least number
that it divides, if it divides the query heads.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int

import pallas_kernels
from attnlab.functional import sequence
from attnlab.functional.sequence import SEQUENCE
from pallas_kernels.ledger import Ledger

EXPERT = 'expert'
"""Mesh axis that experts are divided over."""

ROWS = ('data', 'fsdp', EXPERT)
"""Mesh axes that rows are divided over."""

TENSOR = 'tensor'
"""Mesh axis that heads, channels of scans and of experts, and classes are divided over."""

AXES: Mapping[str, tuple[str, ...]] = {
    'b': ROWS,
    't': (SEQUENCE,),
    'h': (TENSOR,),
    'd': (TENSOR,),
    'o': (TENSOR,),
    'e': (EXPERT,),
    'm': (TENSOR,),
}
"""Mesh axes by the letter of a dimension; dimensions with other letters are replicated."""

SAME = str.maketrans('gs', 'ht')
"""Letters that are divided like another: key-value heads like query heads, the keys' time like the queries'."""

WORDS = {
    'b': 'rows',
    't': 'tokens',
    'h': 'heads',
    'd': 'channels',
    'o': 'classes',
    'e': 'experts',
    'm': 'hidden channels',
}


class Undivided(NamedTuple):
    """A dimension of a call that is replicated along mesh axes that do not divide its size."""

    core: str
    letter: str
    size: int
    axes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        over = ', '.join(f'{axis} {devices}' for axis, devices in self.axes)
        return f'{self.core}: {WORDS[self.letter]} {self.size} over {over}'


_UNDIVIDED = Ledger[Undivided]('undivided')


def undivided() -> contextlib.AbstractContextManager[list[Undivided]]:
    """Collects the undivided dimensions of all core calls traced inside the `with` block, in this thread."""
    return _UNDIVIDED.collecting()


def on(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with its cores dividing their work over `mesh`, for compilation on its devices."""
    if mesh.size == 1:
        return function

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


class Division:
    """The mesh axes over which the dimensions of one call are divided.

    Args:
      core: its name.
      sizes: of the letters in `AXES` that the call has; for 'h', the most heads of any argument.
      mesh: devices of every axis.
    """

    def __init__(self, core: str, sizes: Mapping[str, int], mesh: Mapping[str, int]):
        self.axes: dict[str, tuple[str, ...]] = {}
        self.parts: dict[str, int] = {}
        for letter, size in sizes.items():
            self.axes[letter], self.parts[letter] = (), 1
            left = []
            for axis in AXES[letter]:
                devices = mesh.get(axis, 1)
                if size % (self.parts[letter] * devices):
                    left.append((axis, devices))
                elif devices > 1:
                    self.axes[letter] += (axis,)
                    self.parts[letter] *= devices
            if left:
                _UNDIVIDED.record(Undivided(core, letter, size, tuple(left)))

    def spec(self, letters: str, shape: tuple[int, ...] = ()) -> Spec:
        """The mesh axes of every dimension of an array; dimensions of size 1 are broadcast, hence replicated."""
        axes = [self.axes.get(letter) for letter in letters.translate(SAME).split()]
        for place, size in enumerate(shape):
            axes[place] = None if size == 1 else axes[place]
        return Spec(*axes)

    def repeated(self, letters: str, array: Array) -> Array:
        """Key-value heads, 'g', repeated to the least number that is divided like 'h'."""
        if 'g' not in letters:
            return array
        axis = letters.split().index('g')
        groups = array.shape[axis]
        return jnp.repeat(array, math.lcm(groups, self.parts['h']) // groups, axis=axis)


def _letters(argument: str, alternatives: str, array: Array) -> str:
    """The signature of an argument, of several alternatives, that matches the rank of the array."""
    found = [letters.strip() for letters in alternatives.split('|') if len(letters.split()) == array.ndim]
    if not found:
        raise ValueError(f'{argument} has shape {array.shape}; expected {alternatives.strip(" |")}')
    return found[0]


def _sizes(letters: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, int]:
    """The size of every letter that the mesh divides: the largest, as smaller ones are broadcast or key-value heads.

    Where the numbers of queries and keys differ, time counts as 1: it is not divided. The first argument, what is mixed
    or asked, is not broadcast over time.
    """
    sizes: dict[str, int] = {}
    times: set[int] = set()
    for names, array in zip(jax.tree.leaves(letters), jax.tree.leaves(arrays), strict=True):
        for name, size in zip(names.split(), array.shape, strict=True):
            letter = name.translate(SAME)
            if letter in AXES:
                sizes[letter] = max(size, sizes.get(letter, 1))
            # One key is one key, and not broadcast: every device would read it, as if it were another.
            if letter == 't' and (size > 1 or name == 's'):
                times.add(size)
    first = next(iter(arrays))
    own = dict(zip(letters[first].split(), arrays[first].shape, strict=True))
    return sizes | ({'t': 1} if times - {own.get('t')} else {})


def _on_mesh(
    core: Callable[..., Any], over_time: Callable[..., Any], arguments: Mapping[str, str], *results: str
) -> Callable[..., Any]:
    """Returns `core` with its calls wrapped in `jax.shard_map` where there is a mesh.

    Args:
      core: a function of `pallas_kernels`.
      over_time: the version for divided time.
      arguments: the letters of every array argument, or a tree of them; alternatives of other rank after a vertical
        bar.
      results: the letters of every result.
    """
    signature = inspect.signature(core)

    @functools.wraps(core)
    def call(*args: Any, **kwargs: Any) -> Any:
        mesh = devices()
        if not mesh:
            return core(*args, **kwargs)
        given = {name: value for name, value in signature.bind(*args, **kwargs).arguments.items() if value is not None}
        options = {name: value for name, value in given.items() if name not in arguments}
        arrays = {name: value for name, value in given.items() if name in arguments}
        letters = {
            name: jax.tree.map(functools.partial(_letters, f'{core.__name__}: {name}', arguments[name]), array)
            for name, array in arrays.items()
        }
        division = Division(core.__name__, _sizes(letters, arrays), mesh)
        arrays = jax.tree.map(division.repeated, letters, arrays)
        local = over_time if division.parts['t'] > 1 else core
        specs = tuple(division.spec(names) for names in results)
        run = jax.shard_map(
            lambda arrays: local(**arrays, **options),
            in_specs=(jax.tree.map(lambda names, array: division.spec(names, array.shape), letters, arrays),),
            out_specs=specs if len(specs) > 1 else specs[0],
            check_vma=False,
        )
        return run(arrays)

    return call


def devices() -> dict[str, int]:
    """The size of every mesh axis of the current trace; empty on one device, and inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return {}
    return dict(mesh.shape)


def parts(letter: str, size: int) -> int:
    """Over how many devices a dimension of this letter is divided in this trace: 1 if they do not divide its size."""
    mesh = devices()
    count = math.prod(mesh.get(axis, 1) for axis in AXES[letter])
    return 1 if size % count else count


linear_scan = _on_mesh(
    pallas_kernels.linear_scan,
    sequence.linear_scan,
    {'x': 'b t d', 'decay': '| d | t d | b t d', 'state': 'b d', 'segments': 'b t'},
    'b t d',
    'b d',
)

long_conv = _on_mesh(
    pallas_kernels.long_conv, sequence.long_conv, {'x': 'b t d', 'kernel': 'w d', 'segments': 'b t'}, 'b t d'
)

short_conv = _on_mesh(
    pallas_kernels.short_conv,
    sequence.short_conv,
    {'x': 'b t d', 'taps': 'w d', 'bias': 'd', 'segments': 'b t'},
    'b t d',
)

selective_scan = _on_mesh(
    pallas_kernels.selective_scan,
    sequence.selective_scan,
    {
        'x': 'b t d',
        'dt': 'b t d',
        'A': 'd n',
        'B': 'b t n',
        'C': 'b t n',
        'D': 'd',
        'state': 'b d n',
        'segments': 'b t',
    },
    'b t d',
    'b d n',
)

MEMORY = {
    'q': 'b t g k',
    'k': 'b t g k',
    'v': 'b t g v',
    'beta': 'b t h',
    'log_decay': 'h | b t h | b t h k',
    'erase': 'b t g k',
    'a': 'b t g k',
    'b': 'b t g k',
    'state': 'b h k v',
    'segments': 'b t',
}
"""The arguments of the cores whose state is one matrix per head."""

linear_attention = _on_mesh(pallas_kernels.linear_attention, sequence.linear_attention, MEMORY, 'b t h v', 'b h k v')

linear_attention_rows = _on_mesh(
    pallas_kernels.linear_attention_rows,
    sequence.linear_attention_rows,
    {
        'q': 'b t h v',
        'k': 'b t h k',
        'v': 'b t h v',
        'log_decay': 'b t h k',
        'state': 'b h k v',
        'segments': 'b t',
    },
    'b t h k',
    'b h k v',
)

linear_attention_sums = _on_mesh(
    pallas_kernels.linear_attention_sums,
    sequence.linear_attention_sums,
    {
        'q': 'b t g k',
        'k': 'b t g k',
        'log_decay': 'h | b t h | b t h k',
        'state': 'b h k',
        'segments': 'b t',
    },
    'b t h',
    'b h k',
)

delta_rule = _on_mesh(pallas_kernels.delta_rule, sequence.delta_rule, MEMORY, 'b t h v', 'b h k v')

diagonal_low_rank = _on_mesh(pallas_kernels.diagonal_low_rank, sequence.diagonal_low_rank, MEMORY, 'b t h v', 'b h k v')

attention = _on_mesh(
    pallas_kernels.attention,
    sequence.attention,
    {
        'q': 'b t h k',
        'k': 'b s g k',
        'v': 'b s g v',
        'segments': 'b t',
        'slopes': 'h',
        'log_forget': 'b t h',
        'bias': 'b h t _',
        'temperature': 'h | b t h',
        'sink_scores': 'h',
        'chosen': 'b t g _',
    },
    'b t h v',
)


def cross_entropy(
    hidden: Float[Array, '*b d'],
    embedding: Float[Array, 'o d'],
    labels: Int[Array, '*b'],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, '*b']:
    """The loss of a linear head, `pallas_kernels.cross_entropy` for any leading dimensions.

    Where classes are divided over devices, each computes the normaliser over its own, and the logits of labels that it
    has; two numbers per token are exchanged.
    """

    def flat(x: Array) -> Array:
        return x.reshape(-1, *x.shape[labels.ndim :])

    def losses(hidden: Array, embedding: Array, labels: Array) -> Array:
        found = pallas_kernels.cross_entropy(
            flat(hidden),
            embedding,
            flat(labels),
            z_loss=z_loss,
            soft_cap=soft_cap,
            implementation=implementation,
        )
        return found.reshape(labels.shape)

    def losses_apart(hidden: Array, embedding: Array, labels: Array) -> Array:
        labels = pallas_kernels.arguments.class_numbers(labels)
        labels = jnp.where(labels < 0, labels + classes, labels)
        first = jax.lax.axis_index(TENSOR) * embedding.shape[0]
        found = pallas_kernels.cross_entropy_part(
            flat(hidden), embedding, flat(labels - first), soft_cap=soft_cap, implementation=implementation
        )
        parts = jax.lax.all_gather([each.reshape(labels.shape) for each in found], TENSOR)
        whole, own = jax.nn.logsumexp(parts[0], axis=0), jnp.sum(parts[1], axis=0)
        exists = (labels >= 0) & (labels < classes)
        return whole - jnp.where(exists, own, jnp.nan) + z_loss * whole**2

    mesh, classes = devices(), embedding.shape[0]
    if not mesh:
        return losses(hidden, embedding, labels)
    sizes = dict(zip('bt', labels.shape, strict=False)) | {'o': classes}
    division = Division('cross_entropy', sizes, mesh)
    rows = ' '.join(('b', 't', *'_' * labels.ndim)[: labels.ndim])
    run = jax.shard_map(
        losses_apart if division.parts['o'] > 1 else losses,
        in_specs=(division.spec(f'{rows} _'), division.spec('o _'), division.spec(rows)),
        out_specs=division.spec(rows),
        check_vma=False,
    )
    return run(hidden, embedding, labels)
