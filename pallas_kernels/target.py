"""The device that calls are compiled for: the one that JAX runs on, a named one, or an interpreted one."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: 'cpu', 'gpu' or 'tpu'.
      kind: its name, as in `jax.Device.device_kind`.
      capability: the compute capability of a GPU, such as '9.0'; '' elsewhere.
      interpret: kernels are interpreted instead of compiled, on any device; slow, for tests.
    """

    platform: str
    kind: str
    capability: str = ''
    interpret: bool = False


H100 = Target('gpu', 'NVIDIA H100 80GB HBM3', '9.0')
TPU_V5E = Target('tpu', 'TPU v5 lite')

_NAMED: contextvars.ContextVar[Target | None] = contextvars.ContextVar('target', default=None)


def current() -> Target:
    """Returns the target named by `compiling_for`, or the device that JAX runs on."""
    named = _NAMED.get()
    if named is not None:
        return named
    device = jax.local_devices()[0]
    return Target(
        platform='gpu' if device.platform in ('cuda', 'rocm') else device.platform,
        kind=device.device_kind,
        capability=str(getattr(device, 'compute_capability', '')),
    )


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Makes calls traced inside the `with` block, in this thread, choose and build their kernels for `target`.

    It does not determine where they run: lower or compile them for that device, or set `interpret`. A function that was
    compiled before is not traced again.
    """
    token = _NAMED.set(target)
    try:
        yield
    finally:
        _NAMED.reset(token)


def interpreted(implementation: str) -> Target:
    """Returns the target on which kernels called `implementation` are interpreted."""
    device = {'mosaic_gpu': H100, 'mosaic_tpu': TPU_V5E, 'cudnn': H100}[implementation]
    return dataclasses.replace(device, interpret=True)
