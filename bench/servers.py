"""A server in a process group of its own: started, waited for, and gone at the end, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class DidNotStart(RuntimeError):
    """The process ended, or was not ready in time. The message has the end of its log."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str], ready_url: str, env: Mapping[str, str], log: Path, *, timeout_s: float
) -> Iterator[float]:
    """Run `command`, yield the seconds it took until `ready_url` answered 200, stop the whole group at the end: also
    when this process is told to end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begin_s = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env), start_new_session=True
        )
        try:
            _wait(process, ready_url, log, begin_s + timeout_s)
            yield time.perf_counter() - begin_s
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], ready_url: str, log: Path, until_s: float) -> None:
    while not _answers(ready_url):
        if process.poll() is not None:
            raise DidNotStart(f"ended with {process.returncode}:\n{_tail(log)}")
        if time.perf_counter() > until_s:
            raise DidNotStart(f"not ready in time:\n{_tail(log)}")
        time.sleep(0.25)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait(5)


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-3000:]
