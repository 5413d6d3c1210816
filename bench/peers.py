"""Who is measured, and how each is started: the same folder, two threads, one dtype, no picture splitting.

`triptych` and `vllm` are servers that the load client talks to. `transformers` and `openvino` are called in a process
of their own (`bench.stock`), because that is how they are used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.servers import free_port, started

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "bench"
NUM_THREADS = 2


class Absent(RuntimeError):
    """This peer is not on this machine; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Options:
    """Where things are; from the command line. `preload` are libraries for LD_PRELOAD, by peer. `takes_pictures` is
    False for a text model, which has no processor to set."""

    folder: Path
    vllm_env: Path | None = None
    vllm_preload: tuple[Path, ...] = ()
    triptych_preload: tuple[Path, ...] = ()
    openvino_env: Path | None = None
    openvino_folder: Path | None = None
    takes_pictures: bool = True
    num_threads: int = NUM_THREADS
    dtype: str = "bfloat16"
    engine: tuple[str, ...] = ()  # further settings of triptych's engine, NAME=VALUE as in its config file


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    url: str
    start_s: float


def environment(preload: tuple[Path, ...] = (), **more: str) -> dict[str, str]:
    """What every measured process sees: two threads, no network, nothing inherited that tunes a maths library."""
    dropped = ("OPENBLAS_", "OMP_", "MKL_", "KMP_", "LD_PRELOAD", "VLLM_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"OMP_NUM_THREADS": str(NUM_THREADS), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if preload:
        env["LD_PRELOAD"] = ":".join(str(path) for path in preload)
    return env | more


@contextmanager
def triptych(options: Options, log: Path) -> Iterator[Running]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(_triptych_config(options, port))
        command = [sys.executable, "-m", "triptych.cli", "serve", "--config", str(config)]
        url = f"http://127.0.0.1:{port}"
        env = environment(options.triptych_preload, OMP_NUM_THREADS=str(options.num_threads))
        with started(command, f"{url}/ready", env, log, timeout_s=300) as start_s:
            yield Running(url, start_s)


def _triptych_config(options: Options, port: int) -> str:
    processor = "processor = { do_image_splitting = false }" if options.takes_pictures else ""
    engine = ", ".join((f'dtype = "{options.dtype}"', f"num_threads = {options.num_threads}", *options.engine))
    return f"""
[http]
port = {port}
[[models]]
path = {json.dumps(str(options.folder))}
name = "{MODEL_NAME}"
engine = {{ {engine} }}
{processor}
"""


@contextmanager
def vllm(options: Options, log: Path) -> Iterator[Running]:
    binary = _tool(options.vllm_env, "vllm", "--vllm-env")
    port = free_port()
    command = [
        str(binary), "serve", str(options.folder), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", MODEL_NAME, "--dtype", options.dtype, "--max-num-seqs", "16", "--skip-mm-profiling",
        "--mm-processor-kwargs", json.dumps({"do_image_splitting": False}),
    ]  # fmt: skip
    env = environment(
        options.vllm_preload,
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{NUM_THREADS - 1}",
        VLLM_HOST_IP="127.0.0.1",
    )
    url = f"http://127.0.0.1:{port}"
    with started(command, f"{url}/health", env, log, timeout_s=420) as start_s:
        yield Running(url, start_s)


SERVERS = {"triptych": triptych, "vllm": vllm}


def transformers(options: Options, log: Path, *, quick: bool) -> dict[str, Any]:
    """Stock `generate` in this environment."""
    return _in_process(Path(sys.executable), "transformers", options.folder, options.dtype, log, quick=quick)


def openvino(options: Options, log: Path, *, quick: bool) -> dict[str, Any]:
    """An export by optimum-intel, in its own environment."""
    python = _tool(options.openvino_env, "python", "--openvino-env")
    if options.openvino_folder is None or not (options.openvino_folder / "config.json").exists():
        raise Absent("no exported folder: give one by --openvino-folder (bench/README.md says how it is made)")
    return _in_process(python, "openvino", options.openvino_folder, options.dtype, log, quick=quick)


IN_PROCESS = {"transformers": transformers, "openvino": openvino}


def _tool(env: Path | None, name: str, flag: str) -> Path:
    if env is None:
        raise Absent(f"no environment was given by {flag}")
    path = env / "bin" / name
    if not path.exists():
        raise Absent(f"{flag} has no bin/{name}")
    return path


def _in_process(python: Path, kind: str, folder: Path, dtype: str, log: Path, *, quick: bool) -> dict[str, Any]:
    command = [str(python), "-m", "bench.stock", kind, str(folder), "--dtype", dtype, *(["--quick"] if quick else [])]
    with log.open("wb") as err:
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=err, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{kind} ended with {done.returncode}:\n{log.read_text('utf-8', 'replace')[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
