import threading

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attention, dispatch, linear_scan
from pallas_kernels.dispatch import Candidate


def candidates(**refusals):
    return {name: Candidate(lambda name=name: name, refusal) for name, refusal in refusals.items()}


EVERY = candidates(mosaic_gpu=None, mosaic_tpu=None, xla=None, reference=None)


@pytest.mark.parametrize(('platform', 'chosen'), [('cpu', 'xla'), ('gpu', 'mosaic_gpu'), ('tpu', 'mosaic_tpu')])
def test_the_platform_chooses(platform, chosen):
    assert dispatch.select('core', None, EVERY, platform=platform)() == chosen


@pytest.mark.parametrize('name', dispatch.PREFERENCE)
def test_a_named_implementation_serves_on_any_platform(name):
    assert dispatch.select('core', name, EVERY, platform='cpu')() == name


def test_a_refusal_passes_the_call_on_and_is_written_down():
    with dispatch.ledger() as entries:
        some = candidates(mosaic_gpu='key_dim is 24; expected 64 or 128', xla=None, reference=None)
        assert dispatch.select('core', None, some, platform='gpu')() == 'xla'
    assert entries == [
        dispatch.Entry(
            'core',
            'xla',
            (
                ('mosaic_gpu', 'key_dim is 24; expected 64 or 128'),
                ('mosaic_tpu', 'this version has no mosaic_tpu form of core'),
            ),
        )
    ]


def test_the_platform_is_a_reason_too():
    with dispatch.ledger() as entries:
        dispatch.select('core', None, EVERY, platform='cpu')
    assert entries[0].refused == (('mosaic_gpu', 'the platform is cpu'), ('mosaic_tpu', 'the platform is cpu'))


def test_a_named_implementation_never_falls_back():
    refusing = candidates(mosaic_gpu='windows are not served', xla=None)
    with dispatch.ledger() as entries:
        with pytest.raises(
            NotImplementedError, match="core: implementation 'mosaic_gpu' cannot serve: windows are not"
        ):
            dispatch.select('core', 'mosaic_gpu', refusing, platform='gpu')
        with pytest.raises(NotImplementedError, match='this version has no reference form of core'):
            dispatch.select('core', 'reference', refusing)
    assert entries == []


def test_when_none_can_serve_every_reason_is_given():
    with pytest.raises(
        NotImplementedError, match=r'no implementation can serve: .*xla: too long; reference: this version'
    ):
        dispatch.select('core', None, candidates(xla='too long'), platform='cpu')


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"core: implementation is 'triton'; expected None or one of \('mosaic_gpu'"):
        dispatch.select('core', 'triton', EVERY)


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
    assert outer[2:] == [dispatch.Entry('linear_scan', 'xla', ())]
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
    dispatch.select('core', None, EVERY, platform='cpu')
    assert entries == []
