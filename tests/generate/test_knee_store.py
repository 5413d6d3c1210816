"""Step times outlive the engine: per model, device, threads and torch version, and never at the cost of a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from triptych.core.config import GenerateConfig
from triptych.generate import build, knee_store
from triptych.generate.build import build_engine
from triptych.generate.engine import GenerateEngine
from triptych.generate.knee_store import MAX_SHAPES, KneeStore
from triptych.generate.schedule import BatchSizer, ShapeTimes, ways_of

from .conftest import Toys, request_of
from .test_engine import final_of

CONFIG = GenerateConfig(max_step_branches=4)


def store_of(toys: Toys, folder: Path, fingerprint: str = "f") -> KneeStore:
    return KneeStore(folder, toys.kind("pixart"), fingerprint)


async def test_a_restart_measures_only_what_is_missing(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second engine starts with the first one's table, sizes met while serving included, and measures nothing."""
    monkeypatch.setattr(build, "default_folder", lambda: tmp_path)
    first = build_engine(toys.folder("pixart"), name="pixart", config=CONFIG)
    await first.start()
    await final_of(first, request_of(width_px=48))
    await first.close()
    second = build_engine(toys.folder("pixart"), name="pixart", config=CONFIG)
    monkeypatch.setattr(second._kind, "forward", lambda *args: pytest.fail("measured again"))
    await second.start()
    recalled = second.step_table()
    await second.close()

    assert set(recalled) == {"64x64", "32x32", "48x32"}
    assert recalled == first.step_table()
    assert {way for times in recalled.values() for by_way in times.ms.values() for way in by_way} == {"1x1"}
    assert len(os.listdir(tmp_path)) == 1


async def test_without_warm_up_nothing_is_kept(toys: Toys, tmp_path: Path):
    """A command that draws one picture neither reads nor writes step times."""
    engine = GenerateEngine(toys.kind("pixart"), GenerateConfig(warm_up=False), knees=lambda: store_of(toys, tmp_path))
    await engine.start()
    await final_of(engine, request_of())
    await engine.close()

    assert not os.listdir(tmp_path)


def test_files_are_apart_by_model_threads_and_torch(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another model, another number of threads, another torch: another file each, and none reads a stranger's."""
    store = store_of(toys, tmp_path)
    table = {"64x64": ShapeTimes(16, {1: {"1x2": 2.0}, 2: {"1x2": 3.0, "2x1": 2.5}})}
    store.save(table)
    others = [store_of(toys, tmp_path, "g")]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        others.append(store_of(toys, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        others.append(store_of(toys, tmp_path))

    assert store.load() == table
    assert len({store.path, *(other.path for other in others)}) == 4
    for other in others:
        assert other.load() == {}
        other.path.write_bytes(store.path.read_bytes())
        assert other.load() == {}


def test_a_broken_file_or_folder_costs_nothing(toys: Toys, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Half a file is measured anew, a folder that cannot be made is said once, and both starts go on."""
    store = store_of(toys, tmp_path)
    store.path.write_text('{"model": ')
    (tmp_path / "file").write_text("")
    nowhere = store_of(toys, tmp_path / "file" / "sub")
    nowhere.save({"64x64": ShapeTimes(16, {1: {"1x1": 2.0}})})

    assert store.load() == {}
    assert "measured anew" in caplog.text
    assert "cannot be kept" in caplog.text


def test_the_newest_shapes_are_kept(toys: Toys, tmp_path: Path):
    """Callers choose sizes: the file holds a bounded number of them."""
    store = store_of(toys, tmp_path)
    store.save({f"{index}x8": ShapeTimes(16, {1: {"1x1": 1.0}}) for index in range(MAX_SHAPES + 3)})

    assert len(store.load()) == MAX_SHAPES
    assert f"{MAX_SHAPES + 2}x8" in store.load()


def test_a_sizer_takes_only_sound_times_back():
    """Rungs that are no power of two, ways that are not this machine's and times that are none are left out."""
    sizer = BatchSizer(ways=ways_of(2))
    sound = {1: {"1x2": 10.0}, 2: {"1x2": 12.0, "2x1": 11.0}, 4: {"2x1": 40.0}}
    broken = {3: {"1x2": 1.0}, 8: {"1x2": -1.0, "4x4": 1.0, "x": 1.0}}
    sizer.restore({"a": ShapeTimes(16, sound | broken), "b": ShapeTimes(16, {0: {"1x2": 1.0}})})
    sizer.restore({"c": ShapeTimes(0, {1: {"1x2": 1.0}}), "d": ShapeTimes(16, {16: {"1x2": float("nan")}})})

    assert sizer.table() == {"a": ShapeTimes(16, sound)}
    assert sizer.max_branches("a", 16) == 2


def test_a_device_has_a_name():
    """On this machine the processor's."""
    assert knee_store.device_name(torch.device("cpu"))
