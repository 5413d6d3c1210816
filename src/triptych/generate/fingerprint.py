"""A name for a model folder's contents: its configurations in full, its weights by size and samples.

Reading every byte of a large model at each start would take longer than loading it. A training run changes all weights,
so samples tell.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

NUM_SAMPLES = 16
SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path) -> str:
    """32 hex digits over the parts that decide what is drawn: the index and every component's JSON and safetensors."""
    digest = blake3()
    for path in sorted([folder / "model_index.json", *folder.glob("*/*.json"), *folder.glob("*/*.safetensors")]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() if path.suffix == ".json" else _samples(path))
    return digest.hexdigest(length=16)


def _samples(path: Path) -> bytes:
    size_bytes = path.stat().st_size
    parts = [size_bytes.to_bytes(8, "little")]
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(max(0, size_bytes - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
            parts.append(file.read(SAMPLE_BYTES))
    return b"".join(parts)
