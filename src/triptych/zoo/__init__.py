"""The embedded models: small, trained here, kept in the package as ordinary Hugging Face folders.

`folder("tiny-vl")` is a path that any loader of such folders takes. Nothing is loaded here, and nothing downloaded.
"""

from __future__ import annotations

from pathlib import Path

from triptych.core.errors import UnknownModel

_HERE = Path(__file__).parent


def names() -> list[str]:
    """The embedded models that are there, in alphabetical order."""
    return sorted(entry.name for entry in _HERE.iterdir() if is_model_folder(entry))


def is_model_folder(path: Path) -> bool:
    """A transformers folder has a config.json, a diffusers one a model_index.json."""
    return (path / "config.json").is_file() or (path / "model_index.json").is_file()


def folder(name: str) -> Path:
    """The folder of an embedded model; UnknownModel names those that exist."""
    if name not in names():
        raise UnknownModel(f"no embedded model {name!r}; there are: {', '.join(names())}")
    return _HERE / name
