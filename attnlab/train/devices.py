"""Which devices a process uses, and where compiled programs are kept; said once, before JAX starts."""

import logging
import pathlib

import jax

from attnlab.errors import UserError


def start(
    *,
    platform: str | None = None,
    cpu_devices: int | None = None,
    compilation_cache: str = '',
    distributed: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> None:
    """Configures JAX for a command. Raises `UserError` where the devices asked for are not there."""
    if platform is not None:
        jax.config.update('jax_platforms', platform)
    if cpu_devices is not None:
        jax.config.update('jax_num_cpu_devices', cpu_devices)
    if compilation_cache:
        folder = pathlib.Path(compilation_cache).expanduser()
        jax.config.update('jax_compilation_cache_dir', str(folder))
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    logging.getLogger('absl').setLevel(logging.WARNING)
    if coordinator is not None:
        if processes is None or process is None:
            raise UserError('--coordinator wants --processes and --process beside it')
        jax.distributed.initialize(coordinator, processes, process)
    elif distributed:
        jax.distributed.initialize()
    try:
        jax.devices()
    except RuntimeError as error:
        raise UserError(f'no device for --platform={platform}: {error}') from error
