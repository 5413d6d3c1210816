"""What a CPU gives one thread of ours: how many cores its products may use, and whether freed memory is kept.

Both reach into the C libraries that torch runs on, for what torch sets for the whole process or not at all. Where they
are other ones, `can_limit_threads` is False and `keep_freed_memory` does nothing.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
LARGEST_MMAP_THRESHOLD_BYTES = 32 * 2**20  # glibc refuses more
KEPT_FREE_BYTES = 2**30


@cache
def _libraries() -> ctypes.CDLL | None:
    """libtorch, through which its OpenMP and MKL are found; None where either is missing."""
    name = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(name))
        library.omp_set_num_threads.argtypes = (ctypes.c_int,)
        library.omp_set_num_threads.restype = None
        library.MKL_Set_Num_Threads_Local.argtypes = (ctypes.c_int,)
    except (OSError, AttributeError):
        return None
    return library


def can_limit_threads() -> bool:
    """Whether `on_cores` has a say here."""
    return _libraries() is not None


@contextmanager
def on_cores(num_threads: int) -> Iterator[None]:
    """Let what torch computes on the calling thread use so many cores meanwhile; other threads are not touched."""
    library = _libraries()
    if library is None:
        yield
        return
    before = torch.get_num_threads()  # the thread's own; its first call sets the thread up, so it comes first
    library.omp_set_num_threads(num_threads)
    mkl_before = library.MKL_Set_Num_Threads_Local(num_threads)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)
        library.MKL_Set_Num_Threads_Local(mkl_before)


def keep_freed_memory() -> None:
    """Keep what is freed in the process, up to a gigabyte an arena, for the whole process (glibc).

    By default every large intermediate is given back to the system and faulted in again, page by page: a third of the
    time of a diffusion step of eight 256-token branches, a twelfth of that of a vision tower over 1024 patches.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
    libc.mallopt(M_TOP_PAD, LARGEST_MMAP_THRESHOLD_BYTES)
