import sys
import threading
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attention, cost, dispatch, linear_scan, target
from pallas_kernels.dispatch import Candidate


def candidates(**refusals):
    return {name: Candidate(lambda name=name: name, refusal) for name, refusal in refusals.items()}


NOTHING = cost.Passes(cost.Cost(), cost.Cost())


def free(implementation):
    return cost.CallCost(NOTHING, NOTHING)


EVERY = candidates(mosaic_gpu=None, mosaic_tpu=None, xla=None, reference=None)


@pytest.fixture
def kernels(monkeypatch):
    """A core 'core' that has a kernel for each platform; even lengths alone are served."""

    def module(name):
        refusal = lambda here, t: f't is {t}; expected an even length' if t % 2 else None  # noqa: E731
        return types.SimpleNamespace(form=lambda here: lambda: (name, here), refusal=refusal)

    for name in dispatch.PLATFORM:
        monkeypatch.setitem(sys.modules, f'pallas_kernels.core.{name}', module(name))
    monkeypatch.setitem(sys.modules, 'pallas_kernels.core', types.ModuleType('core'))

    def choose(implementation, here, t=2):
        kernels = {name: dispatch.kernel('core', name, here, t) for name in dispatch.PLATFORM}
        return dispatch.select('core', implementation, {**kernels, **candidates(xla=None)}, free)()

    return choose


def test_the_platform_chooses(kernels):
    assert kernels(None, target.H100) == ('mosaic_gpu', target.H100)
    assert kernels(None, target.TPU_V5E) == ('mosaic_tpu', target.TPU_V5E)
    assert kernels(None, target.Target('cpu', 'cpu')) == 'xla'


def test_a_kernel_refuses_the_call_or_the_platform_and_a_named_one_never_falls_back(kernels):
    with dispatch.ledger() as entries:
        assert kernels(None, target.H100, t=3) == 'xla'
    assert entries[0].refused == (
        ('mosaic_gpu', 't is 3; expected an even length'),
        ('mosaic_tpu', 'the platform is gpu'),
    )
    with pytest.raises(NotImplementedError, match=r"core: implementation 'mosaic_tpu' cannot serve: t is 3; expected"):
        kernels('mosaic_tpu', target.TPU_V5E, t=3)
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' cannot serve: the platform is cpu"):
        kernels('mosaic_gpu', target.Target('cpu', 'cpu'))


def test_the_target_is_this_device_unless_named():
    assert target.current() == target.Target('cpu', 'cpu')
    with target.compiling_for(target.H100):
        with target.compiling_for(target.TPU_V5E):
            assert target.current() == target.TPU_V5E
        assert target.current() == target.H100
    assert target.current().platform == 'cpu'


def test_a_refusal_passes_the_call_on_and_is_written_down():
    with dispatch.ledger() as entries:
        some = candidates(mosaic_gpu='key_dim is 24; expected 64 or 128', xla=None, reference=None)
        assert dispatch.select('core', None, some, free)() == 'xla'
    assert entries == [
        dispatch.Entry(
            'core',
            'xla',
            (
                ('mosaic_gpu', 'key_dim is 24; expected 64 or 128'),
                ('mosaic_tpu', 'this version has no mosaic_tpu form of core'),
            ),
            free('xla'),
        )
    ]


def test_a_named_implementation_never_falls_back():
    refusing = candidates(mosaic_gpu='windows are not served', xla=None)
    with dispatch.ledger() as entries:
        with pytest.raises(
            NotImplementedError, match="core: implementation 'mosaic_gpu' cannot serve: windows are not"
        ):
            dispatch.select('core', 'mosaic_gpu', refusing, free)
        with pytest.raises(NotImplementedError, match='this version has no reference form of core'):
            dispatch.select('core', 'reference', refusing, free)
    assert entries == []


def test_when_none_can_serve_every_reason_is_given():
    with pytest.raises(
        NotImplementedError, match=r'no implementation can serve: .*xla: too long; reference: this version'
    ):
        dispatch.select('core', None, candidates(xla='too long'), free)


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"core: implementation is 'triton'; expected None or one of \('mosaic_gpu'"):
        dispatch.select('core', 'triton', EVERY, free)


def test_the_ledger_has_one_line_for_every_call_traced():
    x = jnp.ones((1, 3, 2))

    @jax.jit
    def both(x):
        h, _ = linear_scan(x, x)
        return attention(h[:, :, None], x[:, :, None], x[:, :, None], implementation='reference')

    with dispatch.ledger() as outer:
        with dispatch.ledger() as inner:
            both(x)
        both(x)
        linear_scan(x, x, implementation='xla')
    assert [entry[:2] for entry in inner] == [('linear_scan', 'xla'), ('attention', 'reference')]
    assert outer[:2] == inner
    assert outer[2:] == [dispatch.Entry('linear_scan', 'xla', (), cost.linear_scan(b=1, t=3, d=2, itemsize=4))]
    linear_scan(x, x)
    assert len(outer) == 3


def test_the_ledger_of_one_thread_is_its_own():
    x = jnp.ones((1, 3, 2))
    with dispatch.ledger() as entries:
        thread = threading.Thread(target=lambda: linear_scan(x, x))
        thread.start()
        thread.join()
    assert entries == []


def test_the_ledger_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), dispatch.ledger() as entries:
        raise ZeroDivisionError
    dispatch.select('core', None, EVERY, free)
    assert entries == []
