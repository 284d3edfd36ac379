"""How the C library hands memory back, which decides a third of a training step on CPU."""

import ctypes
import platform

# Of glibc's malloc.h; ctypes sees functions, not macros.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation, in this process, until it ends.

    XLA allocates the temporaries of one call in one piece, some hundred megabytes for a training step. By default glibc
    maps such a piece afresh and unmaps it after the call, so every step pays a page fault for each 4 KiB that it uses.
    One arena that may grow without bound and never shrinks is faulted in once.

    Call it before JAX starts its backend (`jax.devices()`, or any computation): arenas belong to threads. Raises
    NotImplementedError where the C library is not glibc, RuntimeError where glibc refuses.
    """
    if platform.libc_ver()[0] != 'glibc':
        raise NotImplementedError(
            f'keeping freed memory needs glibc; this is {platform.libc_ver() or platform.system()}'
        )
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        if libc.mallopt(parameter, value) != 1:
            raise RuntimeError(f'mallopt({parameter}, {value}) was refused')
