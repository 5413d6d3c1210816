"""Opens a picture with the one Pillow plugin that its first bytes name, and reads what can be known without decoding.

The plugin's class is called directly: `Image.open` would try other formats, and check sizes against its own global.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile
from pillow_heif.as_plugin import HeifImageFile

from triptych.core.errors import BudgetExceeded, InvalidMedia
from triptych.core.media import MediaHeader, Modality
from triptych.media.budget import DecodeGuard
from triptych.media.decode.animation import frame_delays_s
from triptych.media.decode.source import PICTURE_BYTES_A_READ, PictureFile, Pieces
from triptych.media.sniff import GIF, JPEG, PNG, WEBP, Kind

MAX_JPEG_SCANS = 100  # a progressive file may ask for thousands of passes over the whole picture

_PLUGINS: dict[str, Callable[[PictureFile], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "GIF": GifImageFile,
    "WEBP": WebPImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
    "AVIF": AvifImageFile,
    "HEIF": HeifImageFile,
}
_ORIENTATION = 0x0112


@contextmanager
def picture_errors(kind: Kind) -> Iterator[None]:
    """What Pillow raises for bad bytes, as leaves of our tree. Its own texts may hold addresses, and are not shown."""
    try:
        yield
    except Image.DecompressionBombError as error:
        found = re.search(r"\((\d+) pixels\)", str(error))
        requested = float(found[1]) if found else float("inf")
        raise BudgetExceeded(
            "max_item_pixels", allowed=2 * (Image.MAX_IMAGE_PIXELS or 0), requested=requested
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error) as error:
        raise InvalidMedia(f"the {kind.mime} file is corrupt or cut off") from error
    except (RuntimeError, ArithmeticError, AttributeError, AssertionError, NotImplementedError) as error:
        raise InvalidMedia(f"the {kind.mime} file cannot be decoded") from error


def open_picture(data: bytes, kind: Kind, bytes_a_read: int = PICTURE_BYTES_A_READ) -> ImageFile:
    """Parse the header; no pixels yet. Call within `picture_errors`. `bytes_a_read`: see `source.PictureFile`."""
    if kind is JPEG and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise ValueError("too many scans")
    picture = _PLUGINS[kind.opener](PictureFile(data, kind, bytes_a_read))
    if kind is PNG:
        # Pillow would decode the whole picture to look for a block that may come after the pixels.
        picture.info["exif"] = _png_exif(data)
    return picture


def _png_exif(data: bytes) -> bytes:
    """The eXIf chunk's content, or nothing."""
    at = 8
    pieces = Pieces(len(data), PNG)
    while at + 8 <= len(data):
        pieces.take()
        num_bytes, name = struct.unpack_from(">I4s", data, at)
        if name == b"eXIf":
            return b"Exif\0\0" + data[at + 8 : at + 8 + num_bytes]
        at += 12 + num_bytes
    return b""


def orientation_of(picture: ImageFile) -> int:
    """EXIF's 1 to 8; 1 where there is none, or where the plugin turns the picture itself."""
    if isinstance(picture, TiffImageFile):
        return 1
    try:
        orientation = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block is no reason to refuse a good picture
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def inspect_picture(data: bytes, kind: Kind, modality: Modality, guard: DecodeGuard) -> MediaHeader:
    """The header of a picture, or of an animation that is asked for as a video. Raises InvalidMedia, BudgetExceeded."""
    with picture_errors(kind):
        picture = open_picture(data, kind)
        width_px, height_px = picture.size
        guard.see_picture(width_px, height_px)
        if orientation_of(picture) >= 5:
            width_px, height_px = height_px, width_px
    if width_px < 1 or height_px < 1:
        raise InvalidMedia(f"the {kind.mime} file has {width_px} x {height_px} pixels")
    guard.see_picture(width_px, height_px)
    size = dict(mime=kind.mime, num_bytes=len(data), width_px=width_px, height_px=height_px)
    if modality is Modality.IMAGE:
        return MediaHeader(modality, **size)  # type: ignore[arg-type]
    assert kind in (GIF, WEBP), kind
    delays_s = frame_delays_s(data, kind)
    duration_s = sum(delays_s)
    return MediaHeader(
        modality,
        **size,  # type: ignore[arg-type]
        num_frames=len(delays_s),
        frames_per_s=len(delays_s) / duration_s,
        duration_s=duration_s,
    )
