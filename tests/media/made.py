"""Small real files, made in memory: pictures, films and sounds with known content."""

import io
import struct
import wave
import zlib
from fractions import Fraction

import av
import numpy as np

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def saved(picture, kind, **options):
    """A Pillow picture as a file's bytes."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def corners(width=96, height=64):
    """Red, green, blue and white quarters: left to right, top to bottom. [H, W, 3] uint8."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = WHITE
    return pixels


def corner_colors(pixels):
    """The four quarters' colours, rounded to 0 or 255 where near."""
    height, width = pixels.shape[:2]
    places = [(height // 4, width // 4), (height // 4, 3 * width // 4), (3 * height // 4, width // 4)]
    places.append((3 * height // 4, 3 * width // 4))
    return [
        tuple(int(round(v / 255) * 255) if min(v, 255 - v) <= 12 else int(v) for v in pixels[y, x]) for y, x in places
    ]


def photo(width, height, seed=0):
    """Smooth shapes with some noise: compresses like a photograph. [H, W, 3] uint8."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    planes = []
    for _ in range(3):
        fx, fy, phase = random.uniform(2, 9, 3)
        planes.append(127 + 70 * np.sin(x / width * fx * 3 + phase) * np.cos(y / height * fy * 3))
    pixels = np.stack(planes, axis=2)
    for _ in range(12):
        cx, cy, radius = random.uniform(0, width), random.uniform(0, height), random.uniform(0.03, 0.15) * width
        pixels[(x - cx) ** 2 + (y - cy) ** 2 < radius**2] = random.uniform(0, 255, 3)
    pixels += random.normal(0, 6, pixels.shape)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def png(header, *chunks):
    """A PNG from a raw IHDR (width, height, depth, colour type) and (name, bytes) chunks."""
    body = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0)), *chunks, (b"IEND", b"")):
        body += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return body


def rgb16_png(pixels):
    """[H, W, 3] uint16 as a 16-bit PNG, which Pillow cannot write."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return png((width, height, 16, 2), (b"IDAT", zlib.compress(rows)))


def film(
    num_frames=60,
    *,
    codec="libx264",
    container="mp4",
    size=(96, 64),
    rate=30,
    gop=12,
    b_frames=2,
    rotation=0,
    stamps=None,
    paint=None,
    aspect=None,
    sound=False,
    options=None,
):
    """A film whose frame i shows the grey level of `level(i)`, or what `paint(i)` draws. `stamps`: ticks of 1/rate."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = gop
        if codec == "libx264":
            stream.options = {"bf": str(b_frames), "crf": "12", "preset": "veryfast", **(options or {})}
        elif codec == "mpeg4":
            stream.bit_rate = 4_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        if aspect:
            stream.codec_context.sample_aspect_ratio = Fraction(*aspect)
        voice = output.add_stream("aac", rate=16_000, layout="mono") if sound else None
        for i in range(num_frames):
            pixels = paint(i) if paint else np.full((size[1], size[0], 3), level(i), np.uint8)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = stamps[i] if stamps else i
            frame.time_base = Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if voice is not None:
            _encode_tone(output, voice, num_frames / rate)
    return file.getvalue()


def level(i):
    """Grey levels 7 apart, so that neighbouring frames are told apart after compression."""
    return (i * 7) % 251


def index_of(pixels, num_frames):
    """Which frame of `film` this is, by its grey level; only for films of at most 35 frames a cycle."""
    grey = float(pixels.mean())
    return min(range(num_frames), key=lambda i: abs(level(i) - grey))


def tone(seconds=1.0, rate=16_000, hertz=440.0, amplitude=0.5):
    """[N] float32."""
    return (amplitude * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav(samples, rate=16_000):
    """[N] or [N, C] float as 16-bit WAV."""
    samples = np.atleast_2d(np.asarray(samples).T).T
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(samples.shape[1])
        output.setsampwidth(2)
        output.setframerate(rate)
        output.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def sound(samples, *, codec="flac", container="flac", rate=16_000, layout="mono", sample_format="s16"):
    """[N, C] float through an encoder of FFmpeg."""
    samples = np.atleast_2d(np.asarray(samples, np.float32).T).T
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout, format=sample_format)
        block = stream.codec_context.frame_size or 4096
        for at in range(0, len(samples), block):
            output.mux(stream.encode(_audio_frame(samples[at : at + block], rate, layout, sample_format, at)))
        output.mux(stream.encode())
    return file.getvalue()


def _audio_frame(samples, rate, layout, sample_format, at):
    if sample_format.startswith("s16"):
        samples = (np.clip(samples, -1, 1) * 32767).astype(np.int16)
    elif sample_format.startswith("s32"):
        samples = (np.clip(samples, -1, 1) * (2**31 - 1)).astype(np.int32)
    planar = sample_format.endswith("p")
    data = np.ascontiguousarray(samples.T if planar else samples.reshape(1, -1))
    frame = av.AudioFrame.from_ndarray(data, format=sample_format, layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
    return frame


def _encode_tone(output, stream, seconds):
    samples = tone(seconds)
    for at in range(0, len(samples), 1024):
        output.mux(stream.encode(_audio_frame(samples[at : at + 1024, None], 16_000, "mono", "fltp", at)))
    output.mux(stream.encode())
