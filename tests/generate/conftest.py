"""Toy diffusers folders, made once a session, and requests for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.request import GenerateRequest
from triptych.testing.toy_diffusion import make_diffusion_folder


class Toys:
    """Folders and loaded kinds by name, made on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kinds: dict[str, Kind] = {}

    def folder(self, kind: str) -> Path:
        folder = self._root / kind
        return folder if folder.exists() else make_diffusion_folder(kind, folder)

    def kind(self, kind: str) -> Kind:
        if kind not in self._kinds:
            self._kinds[kind] = load_kind(self.folder(kind), name=kind)
        return self._kinds[kind]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Toys are so small that a second thread only adds barriers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def request_of(request_id: str = "r", **changes: Any) -> GenerateRequest:
    form: dict[str, Any] = dict(
        request_id=request_id,
        prompt="two green circles above a red square",
        width_px=32,
        height_px=32,
        num_steps=4,
        guidance_scale=5.0,
        seed=7,
    )
    return GenerateRequest(**(form | changes))
