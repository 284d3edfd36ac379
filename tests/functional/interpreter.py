"""What the interpreters of kernels ask of several devices more than there is need for."""

import threading
import types
from collections.abc import Callable
from typing import Any


def let_devices_run_apart() -> None:
    """Gives every device an interpreter of kernels of its own, of GPUs' and of TPUs'.

    JAX's are one each for all, in which a device that begins a kernel, or ends one, waits for the others. But XLA runs
    what does not depend on each other in any order: a device may be in a sum over all devices, and wait there for those
    that wait for it. Devices of other processes are waited for too, and are never there. Races are not looked for.
    """
    from jax import lax
    from jax._src import callback, core
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu
    from jax._src.pallas.mosaic.interpret import thread_map, utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as gpu

    traced, running = threading.local(), threading.local()

    def io_callback(function: Callable[..., Any], result: Any, *args: Any, ordered: bool = False, **named: Any) -> Any:
        """`callback.io_callback` of a function that is told, besides, which device calls it."""
        device = getattr(traced, 'device', None)
        if device is None:
            return callback.io_callback(function, result, *args, ordered=ordered, **named)

        def on(device: Any, *args: Any, **named: Any) -> Any:
            running.device = int(device)
            return function(*args, **named)

        return callback.io_callback(on, result, device, *args, ordered=ordered, **named)

    def apart(interpreter: types.ModuleType, callbacks: types.ModuleType) -> None:
        """Has an interpreter keep what is in the memory of every device by itself."""
        interpret, initialize = interpreter.interpret_pallas_call, callbacks._initialize_shared_memory
        lock, memories = threading.Lock(), dict[int, Any]()

        def on_this_device(*args: Any, **options: Any) -> Any:
            sizes = core.get_axis_env().axis_sizes
            indices = {axis: lax.axis_index(axis) for axis in sizes}
            traced.device = utils.device_coords_to_logical_id(tuple(indices.values()), sizes, indices)
            try:
                return interpret(*args, **options)
            finally:
                traced.device = None

        def begin(*args: Any, **options: Any) -> Any:
            with lock:
                callbacks._shared_memory = None
                token = initialize(*args, **options)
                memories[running.device] = callbacks._shared_memory
            return token

        interpreter.interpret_pallas_call = on_this_device
        callbacks._initialize_shared_memory = begin
        callbacks._get_shared_memory = lambda: memories[running.device]

    apart(gpu, gpu_callbacks)
    apart(tpu, tpu)
    for module in (gpu, gpu_callbacks, jaxpr_interpret, tpu, thread_map):
        module.callback = types.SimpleNamespace(io_callback=io_callback)
    # As on one device that has no others.
    alone = types.SimpleNamespace(**vars(core) | {'get_axis_env': lambda: types.SimpleNamespace(axis_sizes={})})
    jaxpr_interpret.jax_core = tpu.jax_core = alone
