"""Configures the devices and compilation cache of a process, once, before JAX starts."""

import ctypes
import errno
import logging
import os
import pathlib
import sys

import jax

from attnlab.errors import UserError

MALLOPT = {
    'one arena, so that threads reuse what others freed': (-8, 1),
    'no blocks mapped directly from the kernel': (-4, 0),
    'the end of the heap is never returned': (-1, 2**31 - 1),
}
"""Options of glibc's `mallopt` (M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD) and their values."""

HEARTBEAT = 60
"""Seconds without a heartbeat after which JAX gives a process up; `attnlab.train.processes` notices much earlier."""


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
    """Configures JAX for a command. Raises `UserError` where the requested devices are not available."""
    if platform is not None:
        jax.config.update('jax_platforms', platform)
    if cpu_devices is not None:
        jax.config.update('jax_num_cpu_devices', cpu_devices)
    if compilation_cache:
        keep_compiled(pathlib.Path(compilation_cache).expanduser())
    logging.getLogger('absl').setLevel(logging.WARNING)
    logging.getLogger('matplotlib').addFilter(_says_more_than_where_it_keeps_fonts)
    keep_freed_memory()
    check_processes(coordinator, processes, process)
    try:
        if coordinator is not None:
            jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT)
        elif distributed:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        hint = f'--coordinator={coordinator}' if coordinator else '--distributed needs a cluster that JAX knows'
        raise UserError(
            f'the processes cannot connect: {_first_line(error)}; {hint}; elsewhere give each process '
            '--coordinator=HOST:PORT --processes=N --process=I'
        ) from error
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'JAX finds no device for --platform={platform} ({_first_line(error)}); it must be one that is here and '
            f'whose support is installed{SUPPORT.get(platform or "", "")}, or be left out'
        ) from error


def check_processes(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Raises `UserError` for flags of one process of several that do not go together."""
    if coordinator is not None and (processes is None or process is None):
        raise UserError('--coordinator needs --processes and --process beside it')
    if coordinator is None and (processes is not None or process is not None):
        raise UserError(
            '--processes and --process need --coordinator=HOST:PORT beside them; with --distributed the cluster '
            'says all three'
        )
    if processes is not None and process is not None and process >= processes:
        raise UserError(
            f'--process is {process}, of {processes} processes; it must be a number from 0 to {processes - 1}'
        )


SUPPORT = {
    name: f': pip install "attnlab[{extra}]"' for name, extra in (('cuda', 'gpu'), ('gpu', 'gpu'), ('tpu', 'tpu'))
}
"""What installs the support of a platform."""


def keep_compiled(folder: pathlib.Path) -> None:
    """Keeps compiled programs in a folder; where it cannot be written, a line says so, and they are compiled anew."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        reason = None if os.access(folder, os.W_OK) else os.strerror(errno.EACCES)
    if reason is not None:
        print(
            f'{folder} cannot be written ({reason}), so programs are compiled anew; --compilation_cache=DIR keeps them',
            file=sys.stderr,
        )
        return
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def _says_more_than_where_it_keeps_fonts(record: logging.LogRecord) -> bool:
    """Whether a message of matplotlib is not of the folder it makes where it cannot write to that of the user."""
    return not str(record.msg).startswith(('mkdir -p failed for path', 'Matplotlib created a temporary cache'))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory rather than return it to the kernel; on Linux with glibc only.

    XLA on CPU allocates the temporaries of a program for every call. A large block comes from the kernel,
    page by page on first access, which costs up to half of a training step.
    """
    if not sys.platform.startswith('linux'):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, 'mallopt'):
        for option, value in MALLOPT.values():
            library.mallopt(option, value)
