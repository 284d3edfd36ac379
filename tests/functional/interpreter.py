"""What the interpreters of kernels ask of several devices more than there is need for."""

import threading
import types
from typing import Any

import jax


def let_devices_end_apart() -> None:
    """Takes a check from the interpreter of GPU kernels: when one ends on a device it wants no barrier left on any,
    while others still use theirs."""
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

    GPUSharedMemory.assert_no_barriers_allocated = lambda self: None


def let_processes_end_apart() -> None:
    """Takes the devices of other processes from those that the interpreter of TPU kernels waits for when one ends: it
    knows them by their threads, which are this process's."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    def barrier(parties: int, **options: Any) -> threading.Barrier:
        del parties
        return threading.Barrier(jax.local_device_count(), **options)

    interpret_pallas_call.threading = types.SimpleNamespace(**vars(threading) | {'Barrier': barrier})
