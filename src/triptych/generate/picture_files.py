"""From pixels to files: PNG, JPEG, WebP, MP4. Called in a worker thread; whole files or nothing."""

from __future__ import annotations

import io
import os
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.core.errors import InvalidRequest

FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
DEFAULT_QUALITY = 95


def encode_picture(pixels: npt.NDArray[np.uint8], output_format: str = "png", quality: int | None = None) -> bytes:
    """[H, W, 3] uint8 to a file. `quality` 0 to 100 is for JPEG and WebP. Raises InvalidRequest for other formats."""
    if output_format not in FORMATS:
        raise InvalidRequest(f"output_format must be one of {', '.join(FORMATS)}, got {output_format!r}")
    out = io.BytesIO()
    options = {} if output_format == "png" else {"quality": DEFAULT_QUALITY if quality is None else quality}
    Image.fromarray(pixels).save(out, output_format.upper(), **options)
    return out.getvalue()


def enlarge(pixels: npt.NDArray[np.uint8], width_px: int, height_px: int) -> npt.NDArray[np.uint8]:
    """A preview at the size of the picture it announces."""
    return np.asarray(Image.fromarray(pixels).resize((width_px, height_px), Image.Resampling.BICUBIC))


def encode_video(frames: npt.NDArray[np.uint8], frames_per_s: float) -> bytes:
    """[F, H, W, 3] uint8 to MP4 (H.264, yuv420p, faststart). Odd sizes are padded by one row or column at the edge."""
    pad = ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0))
    frames = np.pad(frames, pad, mode="edge")
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:  # faststart reads the file again: no pipe will do
        _write_video(file.name, frames, frames_per_s)
        return Path(file.name).read_bytes()


def _write_video(path: str, frames: npt.NDArray[np.uint8], frames_per_s: float) -> None:
    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(frames_per_s).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        stream.options = {"crf": "18", "preset": "medium"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())


def sprite_sheet(frames: npt.NDArray[np.uint8], columns: int = 5, rows: int = 5) -> npt.NDArray[np.uint8]:
    """Evenly spread frames, left to right and down: [rows * H, columns * W, 3]."""
    picked = frames[np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)]
    lines = [np.concatenate(list(picked[row * columns : (row + 1) * columns]), axis=1) for row in range(rows)]
    return np.concatenate(lines, axis=0)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside `path`, then rename: a reader sees the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
