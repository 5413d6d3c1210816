"""Steps and guidance of a request that names none, where a model wants others than its pipeline class.

A distilled model needs few steps and little or no guidance, but its folder names the class of the model it came from.
So the folder may hold a `generation_config.json`, with the names that the pipelines' `__call__` has; the configured
ones go before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from triptych.core.errors import InvalidRequest

FILE_NAME = "generation_config.json"


class Defaults(msgspec.Struct, frozen=True):
    """None: what the pipeline class has."""

    num_inference_steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None


def read_defaults(folder: Path) -> Defaults:
    """Of the folder's file; without one, the pipeline's own. Raises InvalidRequest, naming the file and the field."""
    try:
        return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Defaults)
    except FileNotFoundError:
        return Defaults()
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{folder.name}/{FILE_NAME}: {error}") from error
