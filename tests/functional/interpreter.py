"""What the interpreters of kernels ask of several devices more than there is need for."""

import threading
import types
from collections.abc import Callable
from typing import Any

import jax


def let_devices_run_apart() -> None:
    """Gives every device an interpreter of GPU kernels of its own.

    JAX's is one for all, in which a device that ends a kernel waits for the others. But XLA runs what does not depend
    on each other in any order: a device may be in a sum over all devices, and wait there for those that wait for it.
    """
    from jax._src import callback
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret

    several, interpret = jaxpr_interpret.DeviceInfo, interpret_pallas_call.interpret_pallas_call
    initialize = gpu_callbacks._initialize_shared_memory
    traced, running, lock = threading.local(), threading.local(), threading.Lock()
    memories: dict[int, Any] = {}
    races: dict[int, Any] = {}

    class Alone(several):
        device_id, num_devices = 0, 1

    def interpret_alone(*args: Any, **options: Any) -> Any:
        traced.device = several().device_id
        try:
            return interpret(*args, **options)
        finally:
            traced.device = None

    def io_callback(function: Callable[..., Any], result: Any, *args: Any, ordered: bool = False, **named: Any) -> Any:
        """`callback.io_callback` of a function that is told, besides, which device calls it."""
        device = getattr(traced, 'device', None)
        if device is None:
            return callback.io_callback(function, result, *args, ordered=ordered, **named)

        def on(device: Any, *args: Any, **named: Any) -> Any:
            running.device = int(device)
            return function(*args, **named)

        return callback.io_callback(on, result, device, *args, ordered=ordered, **named)

    def begin(**options: Any) -> Any:
        with lock:
            gpu_callbacks._shared_memory = None
            token = initialize(**options)
            memories[running.device], races[running.device] = gpu_callbacks._shared_memory, gpu_callbacks._races
        return token

    interpret_pallas_call.interpret_pallas_call, jaxpr_interpret.DeviceInfo = interpret_alone, Alone
    for module in (thread_map, gpu_callbacks, interpret_pallas_call, jaxpr_interpret):
        module.callback = types.SimpleNamespace(io_callback=io_callback)
    gpu_callbacks._initialize_shared_memory = begin
    gpu_callbacks._get_shared_memory = lambda: memories[running.device]
    gpu_callbacks.get_races = lambda: races[running.device]


def let_processes_end_apart() -> None:
    """Takes the devices of other processes from those that the interpreter of TPU kernels waits for when one ends: it
    knows them by their threads, which are this process's."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    def barrier(parties: int, **options: Any) -> threading.Barrier:
        del parties
        return threading.Barrier(jax.local_device_count(), **options)

    interpret_pallas_call.threading = types.SimpleNamespace(**vars(threading) | {'Barrier': barrier})
