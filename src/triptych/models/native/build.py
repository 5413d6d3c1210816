"""Compile `src/` with the system's C++ compiler on first use, for this very CPU, and keep the result per user.

The library speaks plain C through ctypes: no torch headers, so a build takes seconds and fits any torch. It shares
torch's OpenMP threads by linking to the runtime that torch has loaded. The file's name is a hash of everything that
went into it; builds are made beside it and renamed, so that processes never see half a library.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-w")
COMPILERS = ("g++", "c++", "clang++")
BUILD_TIMEOUT_S = 300.0


class NativeUnavailable(Exception):
    """The native kernels cannot serve here; the message says why, and is fit for `triptych doctor`."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library, built if need be. Raises NativeUnavailable; asked again, it says the same without trying again."""
    result = _load_once()
    if isinstance(result, str):
        raise NativeUnavailable(result)
    return result


@lru_cache(maxsize=1)
def _load_once() -> ctypes.CDLL | str:
    try:
        return ctypes.CDLL(str(build(default_folder())))
    except NativeUnavailable as error:
        return str(error)
    except OSError as error:
        return f"the compiled kernels do not load: {error}"


def default_folder() -> Path:
    base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "triptych" / "native"


def build(folder: Path, compiler: str | None = None) -> Path:
    """The path of the compiled library in `folder`. Raises NativeUnavailable."""
    if sys.platform != "linux":
        raise NativeUnavailable(f"the native kernels are built on Linux only, this is {sys.platform}")
    compiler = compiler or find_compiler()
    _make_private(folder)
    target = folder / f"triptych-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def find_compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeUnavailable(f"no C++ compiler on the path (looked for {', '.join(COMPILERS)})")


def _make_private(folder: Path) -> None:
    """A library is code: the folder must be ours, and writable by nobody else."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise NativeUnavailable(f"the cache folder for compiled kernels cannot be used: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeUnavailable("the cache folder for compiled kernels belongs to, or is writable by, another user")


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *FLAGS, str(SOURCES / "native.cpp"), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailable(f"the compiler did not run: {type(error).__name__}") from error
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise NativeUnavailable(f"{Path(compiler).name} cannot compile the kernels: {first.strip()[:200]}")
        os.replace(made, target)


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (*FLAGS, compiler, _compiler_version(compiler), platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the compiler did not run: {type(error).__name__}") from error
    return done.stdout


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
