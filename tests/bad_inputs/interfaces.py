"""Wrong inputs from Python: one line, which names the thing, what it was, and what it must be.

`test_interfaces.py` runs this file in a process without the checks of shapes that the other tests have, as users do.

The first tables are made from the annotations of every public class, so that a new one is in them from its first day.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
import attnlab.blocks
import attnlab.mixers
import attnlab.models
import attnlab.nn
import pallas_kernels
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.language import LanguageHead
from attnlab.models.inputs.embedding import Embedding, Projection
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.signature import FROM_ZERO, PLAIN, members, parameters

ROOMS = (attnlab.nn, attnlab.mixers, attnlab.blocks, attnlab.models)
LINE = 1200
"""The most characters of a line."""


def own(room: ModuleType) -> list[type]:
    """The public classes that a package defines, without its protocols, tuples and bases that are never made."""
    found = []
    for module in pkgutil.walk_packages(room.__path__, f'{room.__name__}.'):
        inside = vars(importlib.import_module(module.name)).values()
        found += [kind for kind in inside if inspect.isclass(kind) and kind.__module__ == module.name]
    return [kind for kind in found if not kind.__name__.startswith('_')]


def checked() -> list[type]:
    """The classes of the rooms that are made with arguments."""
    kinds = [kind for room in ROOMS for kind in own(room)]
    return [
        kind
        for kind in kinds
        if not inspect.isabstract(kind)
        and ((issubclass(kind, nnx.Module) and '__init__' in vars(kind)) or '__dataclass_fields__' in vars(kind))
    ]


def wrong(name: str, hint: object, default: object) -> list[object]:
    """Values that a parameter cannot have, by its annotation and default."""
    admitted = members(hint)
    if Any in admitted or any(not isinstance(kind, type) or 'jaxtyping' in kind.__module__ for kind in admitted):
        return []
    values: list[object] = []
    if int in admitted:
        values += [True, 1.5, -1, *([] if name in FROM_ZERO or default == 0 else [0])]
    if float in admitted:
        values += [True, float('nan')]
    if str not in admitted:
        values.append('wide')
    if not {int, float} & set(admitted):
        values.append(3)
    return values


@pytest.mark.parametrize('kind', checked(), ids=lambda kind: kind.__name__)
def test_every_parameter_of_every_class(kind):
    taken = parameters(kind).items()
    for name, value in [(each, value) for each, parameter in taken for value in wrong(each, *parameter)]:
        with pytest.raises(UserError) as caught:
            kind(**{name: value})
        said = str(caught.value)
        assert said.startswith(f'{name} of {kind.__name__} is {value!r}') and '; it must be ' in said, said
        assert '\n' not in said and len(said) < LINE


@pytest.mark.parametrize('kind', [k for k in checked() if issubclass(k, nnx.Module)], ids=lambda kind: kind.__name__)
def test_every_module_asks_for_its_random_numbers(kind):
    assert issubclass(kind, Module)
    if 'rngs' in inspect.signature(kind.__init__).parameters:
        with pytest.raises(UserError, match=rf'^rngs of {kind.__name__} is 0, of type int; it must be nnx.Rngs'):
            kind(rngs=0)


def test_the_table_is_made_of_classes_and_parts_of_all_rooms():
    assert len(checked()) > 70 and {kind.__module__.split('.')[1] for kind in checked()} == {
        room.__name__.split('.')[1] for room in ROOMS
    }
    plain = {kind for kind in PLAIN if kind is not type(None)}
    asked = {hint for kind in checked() for item in parameters(kind).values() for hint in members(item.kind)}
    assert plain - {tuple} <= asked


X = np.ones((2, 6, 16), np.float32)
CTX = Context.full(2, 6)


def mixers() -> tuple[Attention, LinearAttention]:
    """Two mixers of different classes."""
    return Attention(16, heads=2, rngs=nnx.Rngs(0)), LinearAttention(16, heads=2, rngs=nnx.Rngs(0))


def stateful(mixer, rows=2, **sizes):
    """A state of a mixer of the same class, of other rows or heads."""
    other = type(mixer)(16, **{'heads': 2, **sizes}, rngs=nnx.Rngs(0))
    return other.init_state(rows, 9, jnp.float32)


CALLS = {
    "another mixer's state": (
        lambda a, b: a(X, CTX, stateful(b)),
        'the state given to Attention is of type LinearAttentionState; it must be what its init_state returns, of type '
        'AttentionState',
    ),
    "another mixer's state, the other way": (lambda a, b: b(X, CTX, stateful(a)), 'of type AttentionState; it must be'),
    'the state of other rows': (lambda a, b: a(X, CTX, stateful(a, 1)), 'or of other rows than the 2 of x'),
    'the state of other rows, added to': (lambda a, b: b(X, CTX, stateful(b, 1)), 'or of other rows than the 2 of x'),
    'the state of other heads': (lambda a, b: a(X, CTX, stateful(a, heads=4)), 'it is of another mixer'),
    "another mixer's state, for no tokens": (
        lambda a, b: a(X[:, :0], Context.full(2, 0), stateful(b)),
        'the state given to Attention is of type LinearAttentionState',
    ),
    'no state at all': (lambda a, b: b(X, CTX, ()), 'is of type tuple; it must be what its init_state returns'),
    'a word as the state': (lambda a, b: b(X, CTX, 'start'), 'is of type str; it must be what its init_state'),
    'a state too short': (lambda a, b: a(X, CTX, a.init_state(2, 3, jnp.float32)), '6 tokens do not fit'),
    'a longer context': (lambda a, b: a(X, Context.full(2, 7)), 'ctx.positions has shape (2, 7); it must be (2, 6)'),
    'a context of other rows': (lambda a, b: b(X, Context.full(1, 6)), 'ctx.positions has shape (1, 6)'),
    'other segments': (
        lambda a, b: a(X, dataclasses.replace(CTX, segments=jnp.ones((2, 5), jnp.int32))),
        'ctx.segments has shape (2, 5); it must be (2, 6)',
    ),
    'no context': (lambda a, b: a(X, None), 'ctx of Attention is of type NoneType; it must be a Context'),
    'one row without its axis': (lambda a, b: a(X[0], CTX), 'x of Attention is of shape (6, 16); it must be an array'),
    'a list': (lambda a, b: a([1.0], CTX), 'x of Attention is of type list'),
    'another width': (lambda a, b: a(X[..., :8], CTX), 'so 8 channels; it must have 16'),
    'another width, linear': (lambda a, b: b(X[..., :8], CTX), 'so 8 channels; it must have 16'),
    'a name where a map is due': (
        lambda a, b: Attention(16, heads=2, weights='softmax', rngs=nnx.Rngs(0)),
        "weights of Attention is 'softmax', of type str; it must be WeightMap or Penalised or a class or function that "
        'makes one, such as Softmax()',
    ),
    'a negative length': (lambda a, b: a.init_state(2, -1, jnp.float32), 'length of Attention.init_state is -1'),
    'a batch that is a word': (
        lambda a, b: b.init_state('2', 9, jnp.float32),
        "batch of LinearAttention.init_state is '2'",
    ),
    'a context of negative length': (lambda a, b: Context.full(2, -1), 'length of Context.full is -1'),
    'a context of words': (lambda a, b: Context.full('2', 6), "batch of Context.full is '2'"),
    'a recipe by number': (lambda a, b: attnlab.make_mixer(3, 16, rngs=nnx.Rngs(0)), 'there is no recipe 3'),
    'a recipe misspelt': (lambda a, b: attnlab.make_mixer('glaa', 16, rngs=nnx.Rngs(0)), "did you mean 'gla'"),
    'a recipe without heads': (lambda a, b: attnlab.make_mixer('gla', 16, rngs=nnx.Rngs(0)), 'heads'),
    'an argument misspelt': (
        lambda a, b: attnlab.make_mixer('gla', 16, head=2, rngs=nnx.Rngs(0)),
        "did you mean 'heads'",
    ),
    'a token outside the vocabulary': (
        lambda a, b: Embedding(5, 8, rngs=nnx.Rngs(0))(jnp.array([[1, 5]])),
        'tokens are from 1 to 5; there are 5 in the vocabulary, so they must be from 0 to 4',
    ),
    'a label beyond the classes': (
        lambda a, b: LanguageHead(8, 5, rngs=nnx.Rngs(0)).losses(jnp.ones((2, 8)), jnp.array([1, 5])),
        'targets are from 1 to 5; there are 5 classes, so they must be from 0 to 4',
    ),
    'a label beyond the classes of sequences': (
        lambda a, b: ClassificationHead(8, 1, classes=3, rngs=nnx.Rngs(0)).losses(jnp.ones((1, 8)), jnp.array([3])),
        'targets are from 3 to 3; there are 3 classes',
    ),
    'other features': (
        lambda a, b: Projection(3, 8, features=4, rngs=nnx.Rngs(0))(X[..., :3]),
        'model.inputs.features is 4; the inputs of the task have 3',
    ),
    'a window of width 0': (
        lambda a, b: Attention(16, heads=2, window=0, rngs=nnx.Rngs(0)),
        'window of Attention is 0',
    ),
    'heads that do not divide': (lambda a, b: Attention(16, heads=3, rngs=nnx.Rngs(0)), 'heads'),
    'an activation misspelt': (lambda a, b: attnlab.nn.preludes.Activation(8, name='silo', rngs=nnx.Rngs(0)), 'silu'),
}


@pytest.mark.parametrize('case', CALLS)
def test_calls(case):
    call, sentence = CALLS[case]
    with pytest.raises(UserError) as caught:
        call(*mixers())
    said = str(caught.value)
    assert sentence in said and '\n' not in said and len(said) < LINE, said


def test_a_state_of_ones_own_is_taken_whatever_it_can_hold():
    for mixer in mixers():
        for length in (6, 7, 100):
            y, state = mixer(X, CTX, mixer.init_state(2, length, jnp.float32))
            assert y.shape == X.shape and state is not None


Q = np.ones((1, 4, 2, 8), np.float32)
LABELS = jnp.array([0, 1, 2])


def attend(**arguments):
    """A call of attention with some arguments of its own."""
    return pallas_kernels.attention(**{'q': Q, 'k': Q, 'v': Q, **arguments})


def loss(labels=LABELS, **arguments):
    """A call of the loss, of three tokens and five classes."""
    return pallas_kernels.cross_entropy(jnp.ones((3, 4)), jnp.ones((5, 4)), labels, **arguments)


KERNELS = {
    'a name where a map is due': (
        lambda: attend(weights='softmax'),
        "weights is 'softmax', of type str; expected WeightMap",
    ),
    'a class where a map is due': (lambda: attend(weights=pallas_kernels.Softmax), 'expected WeightMap'),
    'window of a word': (lambda: attend(window='a'), "window is 'a', of type str; expected a whole number or None"),
    'window of a half': (lambda: attend(window=1.5), 'window is 1.5, of type float; expected a whole number'),
    'window negative': (lambda: attend(window=-1), 'window is -1; expected at least 1'),
    'sinks negative': (lambda: attend(sinks=-1), 'sinks is -1'),
    'scale not a number': (lambda: attend(scale=float('nan')), 'scale is nan; expected a number'),
    'scale of 32 bits not a number': (lambda: attend(scale=np.float32('nan')), 'scale is nan; expected a number'),
    'scale of an array not a number': (lambda: attend(scale=jnp.array(jnp.nan)), 'scale is nan; expected a number'),
    'scale complex': (lambda: attend(scale=np.array(1j)), 'scale is array(0.+1.j), of type ndarray; expected a number'),
    'scale of a truth value': (lambda: attend(scale=jnp.array(True)), 'scale is Array(True, dtype=bool), of type'),
    'scale traced': (
        lambda: jax.jit(lambda scale: attend(scale=scale))(0.5),
        'attention: scale is traced by JAX; expected a number or None; multiply an array, such as q, by what varies',
    ),
    'scale differentiated': (
        lambda: jax.grad(lambda scale: attend(scale=scale).sum())(0.5),
        'attention: scale is traced by JAX',
    ),
    'scale of a recurrence differentiated': (
        lambda: jax.grad(lambda scale: pallas_kernels.linear_attention(Q, Q, Q, scale=scale)[0].sum())(0.5),
        'linear_attention: scale is traced by JAX',
    ),
    'cap of a map traced': (
        lambda: jax.jit(lambda cap: attend(weights=pallas_kernels.Softmax(soft_cap=cap)))(0.5),
        'Softmax: soft_cap is traced by JAX; expected a number or None',
    ),
    'causal a word': (lambda: attend(causal='yes'), "causal is 'yes', of type str; expected a bool"),
    'segments a word': (lambda: attend(segments='a'), "segments is 'a', of type str; expected an array"),
    'segments of three': (lambda: attend(segments=(LABELS,) * 3), 'of type tuple; expected an array or'),
    'bias a number': (lambda: attend(bias=3.0), 'bias is 3.0, of type float; expected an array or None'),
    'slopes a list': (lambda: attend(slopes=[1.0, 2.0]), 'slopes is [1.0, 2.0], of type list; expected an array'),
    'temperature a number': (lambda: attend(temperature=2.0), 'temperature is 2.0, of type float'),
    'keys left out': (lambda: attend(k=None), 'k is None, of type NoneType; expected an array'),
    'queries a list': (lambda: attend(q=[1]), 'q is [1], of type list; expected an array'),
    'no channels': (lambda: attend(q=Q[..., :0], k=Q[..., :0]), 'q and k have 0 channels'),
    'implementation misspelt': (lambda: attend(implementation='xl'), "implementation is 'xl'; expected None or one of"),
    'softmax of a word': (lambda: pallas_kernels.softmax('a'), "x is 'a', of type str; expected an array"),
    'top of none': (lambda: pallas_kernels.softmax_topk(Q, 0), 'k is 0; expected 1 to 8'),
    'top of a truth': (lambda: pallas_kernels.softmax_topk(Q, True), 'k is True, of type bool; expected a whole'),
    'counts of a word': (lambda: pallas_kernels.visible_counts('a'), "t is 'a', of type str"),
    'scan of a word': (lambda: pallas_kernels.linear_scan('x', Q), "x is 'x', of type str; expected an array"),
    'scan backwards': (lambda: pallas_kernels.linear_scan(X, X, reverse='yes'), "reverse is 'yes', of type str"),
    'state a word': (lambda: pallas_kernels.linear_scan(X, X, state='a'), "state is 'a', of type str"),
    'decay a number': (lambda: pallas_kernels.linear_attention(Q, Q, Q, -1.0), 'log_decay is -1.0, of type float'),
    'strength a number': (lambda: pallas_kernels.delta_rule(Q, Q, Q, 0.5), 'beta is 0.5, of type float'),
    'rates a number': (lambda: pallas_kernels.selective_scan(X, X, 1.0, X, X), 'A is 1.0, of type float'),
    'labels a list': (lambda: loss([0, 1, 2]), 'labels is [0, 1, 2], of type list; expected an array'),
    'labels real': (lambda: loss(LABELS * 1.0), 'labels has type float32'),
    'labels beyond the classes': (
        lambda: loss(LABELS + 3),
        'labels has entries from 3 to 5; expected 0 to 4',
    ),
    'labels below the classes': (
        lambda: loss(LABELS - 6, implementation='reference'),
        'labels has entries from -6 to -4; expected 0 to 4',
    ),
    'cap negative': (lambda: loss(soft_cap=-1.0), 'soft_cap is -1.0; expected a positive, finite number'),
    'cap not a number': (lambda: loss(soft_cap=float('nan')), 'soft_cap is nan; expected a number'),
    'cap differentiated': (lambda: jax.grad(lambda cap: loss(soft_cap=cap).sum())(9.0), 'soft_cap is traced by JAX'),
    'weight of a word': (lambda: loss(z_loss='a'), "z_loss is 'a', of type str; expected a number"),
}


@pytest.mark.parametrize('case', KERNELS)
def test_cores(case):
    call, sentence = KERNELS[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    said = str(caught.value)
    assert sentence in said and '\n' not in said and len(said) < LINE, said


MAPS = [getattr(pallas_kernels, name) for name in pallas_kernels.__all__]
MAPS = [kind for kind in MAPS if isinstance(kind, type) and issubclass(kind, pallas_kernels.WeightMap)]
MAPS.remove(pallas_kernels.WeightMap)


@pytest.mark.parametrize('kind', MAPS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_weight_map(kind):
    for field in dataclasses.fields(kind):
        for value in ('a', float('nan')):
            with pytest.raises((ValueError, TypeError), match=rf'^{kind.__name__}: {field.name} is .*; expected '):
                kind(**{field.name: value})


def test_a_norm_of_another_width():
    with pytest.raises(UserError, match=r'the input of a RMSNorm has shape .*, so 16 channels; it must have 8'):
        RMSNorm(8, rngs=nnx.Rngs(0))(X)
