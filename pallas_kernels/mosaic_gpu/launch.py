"""How Mosaic GPU kernels are started, and on which devices."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.target import Target

WARPGROUP = 128
"""The threads of a warpgroup."""


def capability_refusal(here: Target) -> str | None:
    """Why a device cannot run kernels built on Hopper's matrix and copy instructions; `None`: it can."""
    if here.capability == '9.0':
        return None
    return f'{here.kind} has compute capability {here.capability}; expected 9.0 (Hopper)'


def kernel(body: Callable[..., None], here: Target, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, interpreted where `here` says so; memory nobody wrote then holds NaN."""
    return plgpu.kernel(body, interpret=plgpu.InterpretGPUParams() if here.interpret else None, **options)
