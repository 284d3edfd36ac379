"""One of two processes of a device each, which together compute a call of a core by interpreted kernels and compare it
with the same call on one: `python -m tests.functional.processes PORT INDEX AXIS CALL`."""

import sys

import jax

from tests.functional.interpreter import let_devices_run_apart

if __name__ == '__main__':
    port, index, axis, name = sys.argv[1:]
    jax.config.update('jax_num_cpu_devices', 1)
    jax.config.update('jax_default_matmul_precision', 'highest')
    jax.distributed.initialize(f'localhost:{port}', 2, int(index))
    let_devices_run_apart()
    # Only now: the calls are arrays on devices.
    from tests.functional import divided

    divided.check(name, divided.mesh(**{axis: 2}), 'mosaic_tpu')
