"""What this machine has, whether a model can be loaded, and what will be used and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
import transformers

from triptych.core.config import ModelConfig
from triptych.core.errors import TriptychError
from triptych.launch import resolve_model
from triptych.models.facts import as_text, load_with_facts
from triptych.models.registry import find_folder, list_supported, read_model_info
from triptych.models.served import choose_device, choose_dtype, is_emulated, saved_dtype

NEEDED = ("torch", "transformers", "safetensors", "msgspec", "pyzmq", "starlette", "uvicorn", "av", "pillow", "numpy")
HELPFUL = {
    "simplejpeg": "faster JPEG, scaled decode",
    "pillow_heif": "HEIF and AVIF pictures",
    "soxr": "audio resampling",
    "llguidance": "JSON schemas and grammars",
    "uvloop": "a faster event loop",
    "httptools": "a faster HTTP parser",
    "diffusers": "generation",
    "opentelemetry-sdk": "traces",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `is_good` None is for information alone."""

    topic: str
    what: str
    is_good: bool | None = None


def examine(model: ModelConfig, *, load: bool = True) -> Iterator[Finding]:
    """Every finding. With `load` the weights are loaded as a server would, which decides the runner."""
    yield from _machine()
    yield from _libraries()
    yield from _model(model, load)


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("cores", f"{len(os.sched_getaffinity(0))} usable, torch uses {torch.get_num_threads()} threads")
    yield Finding(
        "memory", f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}", memory.available > 2**30
    )
    yield Finding("cpu", torch.backends.cpu.get_cpu_capability() + (", AMX" if _has_amx() else ""))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield Finding("gpu", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True)
    else:
        yield Finding("gpu", "none that torch can use")


def _has_amx() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return "amx_bf16" in file.read()
    except OSError:
        return False


def _libraries() -> Iterator[Finding]:
    for name in NEEDED:
        found = _version(name)
        yield Finding("library", f"{name} {found or 'is missing'}", found is not None)
    for name, purpose in HELPFUL.items():
        found = _version(name)
        yield Finding("library", f"{name} {found or 'is not here'} ({purpose})", True if found else None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _model(model: ModelConfig, load: bool) -> Iterator[Finding]:
    try:
        model = resolve_model(model)
        info = read_model_info(model.path)
    except TriptychError as error:
        yield Finding("model", error.message, False)
        yield Finding("supported", ", ".join(list_supported()))
        return
    yield Finding("model", f"{model.name}: {info.architecture}, {info.num_params / 1e6:.1f} M parameters", True)
    yield Finding("context", f"{info.max_tokens} tokens, {len(info.kv)} layers, {info.hidden_size} wide")
    engine = model.engine
    device = choose_device(engine.device)
    yield Finding("device", f"{device}, because {_why_device(engine.device, device.type)}", True)
    yield _dtype(model, device)
    if load:
        yield _runner(model)


def _dtype(model: ModelConfig, device: torch.device) -> Finding:
    folder, wanted = find_folder(model.path), model.engine.dtype
    try:
        chosen = choose_dtype(folder, wanted, device)
    except TriptychError as error:
        return Finding("dtype", error.message, False)
    name, saved = str(chosen).removeprefix("torch."), saved_dtype(folder)
    if wanted != "auto":
        slow = is_emulated(chosen, device)
        reason = "this CPU only emulates it, and is far faster in float32" if slow else "as configured"
        return Finding("dtype", f"{name}: {reason}", not slow)
    if name != saved:
        return Finding("dtype", f"{name}: saved in {saved}, which this CPU only emulates", True)
    return Finding("dtype", f"{name}: what the model was saved in", True)


def _runner(model: ModelConfig) -> Finding:
    engine = model.engine
    transformers.utils.logging.disable_progress_bar()
    try:
        served = load_with_facts(model.path, dtype=engine.dtype, device=engine.device, runner=engine.runner)
    except TriptychError as error:
        return Finding("runner", error.message, False)
    return Finding("runner", as_text(served.info.extra), True)


def _why_device(wanted: str, chosen: str) -> str:
    if wanted != "auto":
        return "the configuration says so"
    return "torch has a GPU" if chosen == "cuda" else "torch has no GPU here"
