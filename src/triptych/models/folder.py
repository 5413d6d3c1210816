"""A model folder, opened and checked: configuration, tokenizer, processors and the revision that names its weights.

Everything a family needs from disk comes through here. Safetensors only: nothing is unpickled or executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from triptych.core.errors import InvalidRequest, UnknownModel

DOWNLOADED_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
SAMPLES_PER_FILE = 16
MAX_HEADER_BYTES = 64 * 2**20
SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True)
class ModelFolder:
    """An existing folder with a readable config.json. Properties read on first use and may raise InvalidRequest."""

    path: Path
    raw_config: dict[str, Any]

    @property
    def architecture(self) -> str:
        return str((self.raw_config.get("architectures") or [""])[0])

    @cached_property
    def config(self) -> PreTrainedConfig:
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                self.path, trust_remote_code=False, local_files_only=True
            )
        except (ValueError, KeyError, OSError) as error:
            raise InvalidRequest(f"config.json of {self.path.name}: {error}") from error
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """With the folder's chat template, wherever the folder keeps it."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
        except (ValueError, OSError, ImportError) as error:
            raise InvalidRequest(f"tokenizer of {self.path.name} cannot be read: {error}") from error
        if not tokenizer.chat_template:
            tokenizer.chat_template = self.read_json("chat_template.json").get("chat_template")
        return tokenizer

    def image_processor(self, overrides: dict[str, Any]) -> Any:
        """The PIL processor (torchvision is never used), with `overrides` on top of the folder's parameters."""
        return self._processor(AutoImageProcessor, overrides, backend="pil")

    def feature_extractor(self, overrides: dict[str, Any]) -> Any:
        return self._processor(AutoFeatureExtractor, overrides)

    def _processor(self, kind: Any, overrides: dict[str, Any], **options: Any) -> Any:
        try:
            return kind.from_pretrained(
                self.path, trust_remote_code=False, local_files_only=True, **options, **overrides
            )
        except (ValueError, OSError, TypeError, ImportError) as error:
            raise InvalidRequest(f"processor of {self.path.name} cannot be read: {error}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, or {} where there is none."""
        file = self.path / name
        return json.loads(file.read_text()) if file.is_file() else {}

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        files = tuple(sorted(self.path.glob("*.safetensors")))
        if not files:
            raise InvalidRequest(f"{self.path.name} has no *.safetensors file; other weight formats are not read")
        return files

    @cached_property
    def revision(self) -> bytes:
        """32 bytes that change with the configuration or the weights: config.json and samples of each weight file."""
        digest = blake3((self.path / "config.json").read_bytes())
        for file in self.weight_files:
            digest.update(_sample(file))
        return digest.digest()

    @cached_property
    def num_params(self) -> int:
        """Values in the weight files, by their headers."""
        return sum(prod(entry["shape"]) for file in self.weight_files for entry in _tensors(file).values())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Of generation_config.json, else of the configuration, else the tokenizer's."""
        text_config = self.config.get_text_config()
        for value in (
            self.read_json("generation_config.json").get("eos_token_id"),
            self.raw_config.get("eos_token_id"),
            getattr(text_config, "eos_token_id", None),
            self.tokenizer.eos_token_id,
        ):
            if value is not None:
                return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
        return ()


def _tensors(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype, shape and place of each tensor."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(stream.read(min(header_bytes, MAX_HEADER_BYTES)))
        except ValueError as error:
            raise InvalidRequest(f"{file.name} is not a safetensors file") from error
    header.pop("__metadata__", None)
    return header


def _sample(file: Path) -> bytes:
    """BLAKE3 of the file's size, its safetensors header and evenly spaced pieces, so that fine-tunes differ."""
    num_bytes = file.stat().st_size
    digest = blake3(f"{file.name}:{num_bytes}".encode())
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header_bytes, MAX_HEADER_BYTES)))
        for index in range(SAMPLES_PER_FILE):
            stream.seek(index * max(0, num_bytes - SAMPLE_BYTES) // (SAMPLES_PER_FILE - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()


def open_folder(name: str | Path) -> ModelFolder:
    """A folder on disk, else a hub name. Raises UnknownModel when there is neither, InvalidRequest for a bad config."""
    path = Path(name)
    if not path.is_dir():
        path = _download(str(name))
    try:
        raw_config = json.loads((path / "config.json").read_text())
    except FileNotFoundError as error:
        raise InvalidRequest(f"{path.name} has no config.json") from error
    except ValueError as error:
        raise InvalidRequest(f"config.json of {path.name} is not JSON: {error}") from error
    return ModelFolder(path, raw_config)


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(DOWNLOADED_PATTERNS)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnknownModel(f"{name!r} is neither a folder nor a model that the hub can give") from error
