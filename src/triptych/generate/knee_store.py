"""Step times by size and batch, kept between runs: a restart plans batches at once and measures only what is missing.

One small JSON file for each model, device, number type, number of threads and torch version: times of one say nothing
of another. What is not such a file, or cannot be read or written, is as if it were not there.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from triptych.generate.kinds.base import Kind
from triptych.generate.picture_files import write_whole
from triptych.generate.schedule import StepTable

MAX_SHAPES = 256  # callers choose sizes: the newest are kept

log = logging.getLogger(__name__)

VERSION = 2  # of the file's form


class KneeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file holds; all but the table is its key, in words."""

    model: str
    device: str
    dtype: str
    num_threads: int
    torch: str
    version: int = VERSION
    shapes: StepTable = {}


def default_folder() -> Path:
    return Path.home() / ".cache" / "triptych" / "steps"


class KneeStore:
    """Made once the number of threads is set; see `KneeFile` for what tells files apart."""

    def __init__(self, folder: Path, kind: Kind, fingerprint: str) -> None:
        self._key = KneeFile(
            model=fingerprint,
            device=device_name(kind.device),
            dtype=str(kind.dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads(),
            torch=str(torch.__version__),
        )
        self.path = folder / f"{blake3(msgspec.json.encode(self._key)).hexdigest(length=12)}.json"

    def load(self) -> StepTable:
        """What was measured before; empty where nothing was."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=KneeFile)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("%s is not used, steps are measured anew: %s", self.path.name, error)
            return {}
        is_ours = msgspec.structs.replace(found, shapes={}) == self._key
        return {shape: times for shape, times in found.shapes.items() if is_ours}

    def save(self, table: StepTable) -> None:
        """Write the newest shapes, whole or not at all."""
        if not table:
            return
        newest = dict(list(table.items())[-MAX_SHAPES:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, msgspec.json.encode(msgspec.structs.replace(self._key, shapes=newest)))
        except OSError as error:
            log.warning("step times cannot be kept: %s", error.strerror)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
