"""Films against the frames that are known to be in them, sampled, jumped to, turned and timed."""

import numpy as np
import pytest
from PIL import Image

from tests.media.decoding import decode, inspect
from tests.media.made import BLUE, GREEN, RED, WHITE, corner_colors, corners, film, index_of, saved
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia, UnsupportedMedia
from triptych.core.media import DecodeSpec, Modality
from triptych.media.budget import DecodeGuard
from triptych.media.decode.container import open_container, video_stream
from triptych.media.decode.frames import FrameReader
from triptych.media.decode.video import _keyframes
from triptych.media.sniff import sniff

VIDEO = Modality.VIDEO
CONTAINERS = [
    ("libx264", "mp4", "video/mp4"),
    ("libx264", "matroska", "video/x-matroska"),
    ("libx264", "mpegts", "video/mp2t"),
    ("libvpx-vp9", "webm", "video/x-matroska"),
    ("mpeg4", "avi", "video/x-msvideo"),
    ("mpeg4", "mp4", "video/mp4"),
]


def shown(decoded, num_frames):
    return [index_of(frame, num_frames) for frame in decoded.frames]


@pytest.mark.parametrize(("codec", "container", "mime"), CONTAINERS)
def test_header_counts_frames_and_seconds(codec, container, mime):
    """Size, frames, rate and duration are known before decoding, whatever the container leaves out."""
    header = inspect(film(codec=codec, container=container), VIDEO)

    assert (header.mime, header.width_px, header.height_px, header.num_frames) == (mime, 96, 64, 60)
    assert header.duration_s == pytest.approx(2.0, abs=0.04)
    assert header.frames_per_s == pytest.approx(30, rel=0.02)


@pytest.mark.parametrize(("codec", "container", "mime"), CONTAINERS)
@pytest.mark.parametrize("gop", [5, 30])
def test_sampled_frames_are_those_shown_at_their_times(codec, container, mime, gop):
    """Frames of a 30-a-second film at given times, whether they are reached by jumping or by decoding on."""
    data = film(35, codec=codec, container=container, gop=gop)
    times_s = (0.0, 1 / 30, 0.2, 0.5, 0.51, 1.0, 34 / 30)

    decoded = decode(data, VIDEO, DecodeSpec(times_s=times_s))

    assert shown(decoded, 35) == [0, 1, 6, 15, 15, 30, 34]
    assert decoded.times_s == pytest.approx([0, 1 / 30, 0.2, 0.5, 0.5, 1.0, 34 / 30], abs=0.002)


def test_count_rate_and_order():
    """By count evenly, by rate from 0, by timestamps in the caller's order; count before rate before timestamps."""
    data = film(30)

    assert shown(decode(data, VIDEO, DecodeSpec(num_frames=3)), 30) == [0, 10, 20]
    assert shown(decode(data, VIDEO, DecodeSpec(frames_per_s=5)), 30) == [0, 6, 12, 18, 24]
    assert shown(decode(data, VIDEO, DecodeSpec(frames_per_s=30, max_frames=3)), 30) == [0, 10, 20]
    assert shown(decode(data, VIDEO, DecodeSpec(times_s=(0.9, 0.1, 0.1))), 30) == [27, 3, 3]
    assert shown(decode(data, VIDEO, DecodeSpec(num_frames=1, frames_per_s=5, times_s=(0.5,))), 30) == [0]
    assert shown(decode(data, VIDEO, DecodeSpec()), 30) == list(range(30))


def test_times_past_the_end_show_the_last_frame():
    """As many frames come as were asked for."""
    assert shown(decode(film(20), VIDEO, DecodeSpec(times_s=(0.0, 5.0, 99.0))), 20) == [0, 19, 19]


def test_variable_frame_rate_goes_by_time():
    """Frames with uneven times: what is shown at a time, not what a mean rate would guess."""
    stamps = [0, 1, 2, 3, 30, 60, 61, 62, 90, 91]
    data = film(10, stamps=stamps, container="mp4")
    header = inspect(data, VIDEO)

    decoded = decode(data, VIDEO, DecodeSpec(times_s=(0.0, 0.5, 1.0, 1.9, 2.0, 2.5, 3.0)))

    assert header.num_frames == 10
    assert shown(decoded, 10) == [0, 3, 4, 4, 5, 7, 8]
    assert decoded.times_s == pytest.approx([0, 0.1, 1.0, 1.0, 2.0, 62 / 30, 3.0], abs=0.002)


@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_rotation_is_applied(rotation):
    """A film that a phone stored on its side is seen upright, in header and frames."""
    data = film(5, rotation=rotation, paint=lambda i: corners())
    header = inspect(data, VIDEO)

    frames = decode(data, VIDEO, DecodeSpec(num_frames=2)).frames

    turned = {
        0: [RED, GREEN, BLUE, WHITE],
        90: [GREEN, WHITE, RED, BLUE],  # a quarter against the clock
        180: [WHITE, BLUE, GREEN, RED],
        -90: [BLUE, RED, WHITE, GREEN],
    }[rotation]
    assert (header.width_px, header.height_px) == ((96, 64) if rotation in (0, 180) else (64, 96))
    assert frames.shape == (2, header.height_px, header.width_px, 3)
    assert _near(corner_colors(frames[1]), turned)


def test_pixel_aspect_is_applied():
    """A film of wide pixels is as wide as it is seen."""
    header = inspect(film(5, aspect=(2, 1)), VIDEO)
    assert (header.width_px, header.height_px) == (192, 64)


@pytest.mark.parametrize("lines", [64, 720])
def test_colors_follow_the_size(lines):
    """Film without a stated matrix: BT.709 from 720 lines on. A pure red comes back as red from a BT.601 small film."""
    data = film(2, size=(lines, lines), paint=lambda i: np.full((lines, lines, 3), RED, np.uint8), b_frames=0)
    red, green, blue = decode(data, VIDEO, DecodeSpec(num_frames=1)).frames[0, lines // 2, lines // 2].astype(int)

    assert red > 240
    assert blue < 12
    # the encoder wrote BT.601; read as BT.709 its red leans towards green
    assert (green < 12) == (lines < 720)


def test_jumps_yield_the_frames_of_decoding_on():
    """With B-frames and a keyframe every ten frames, a jump gives pixel for pixel what decoding everything gives."""
    data = film(200, gop=10, size=(64, 48), paint=_noise)
    kind, header = sniff(data), inspect(data, VIDEO)
    times_s = [i / 30 for i in (0, 41, 42, 99, 100, 101, 150, 199)]

    found = {}
    for jumping in (True, False):
        with open_container(data, kind, DecodeGuard(Tier())) as container:
            stream = video_stream(container, kind, DecodeGuard(Tier()))
            keyframes = (
                _keyframes(data, kind, DecodeGuard(Tier()))
                if jumping
                else type(_keyframes(data, kind, DecodeGuard(Tier())))()
            )
            reader = FrameReader(container, stream, keyframes, 1 / header.frames_per_s, DecodeGuard(Tier()))
            frames = []
            for time_s in times_s:
                for _ in reader.advance_to(time_s):
                    pass
                frames.append(reader.current.to_ndarray(format="rgb24"))
            found[jumping] = (frames, reader.num_decoded, reader.num_seeks)

    assert all((a == b).all() for a, b in zip(found[True][0], found[False][0], strict=True))
    assert found[True][1] < found[False][1] / 2
    assert found[True][2] >= 3


def _noise(i):
    return np.random.default_rng(i // 3).integers(0, 255, (48, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("options", [{"flags": "+cgop"}, {"x264-params": "open-gop=1:scenecut=0"}])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_closed_and_open_groups_are_equal(options, container):
    """Frames that lean on the group before their keyframe are not taken from a jump."""
    data = film(35, gop=14, b_frames=3, options=options, container=container)
    assert shown(decode(data, VIDEO, DecodeSpec(times_s=tuple(i / 30 for i in (1, 16, 27, 28, 30, 34)))), 35) == [
        1, 16, 27, 28, 30, 34,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_animations_are_films_when_asked(kind):
    """Frame times from the file, the frame shown at each, delays of zero as browsers show them."""
    frames = [Image.new("RGB", (32, 24), color) for color in (RED, GREEN, BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=[100, 300, 100], **options)
    header = inspect(data, VIDEO)

    assert (header.num_frames, header.duration_s, header.width_px, header.height_px) == (3, pytest.approx(0.5), 32, 24)
    decoded = decode(data, VIDEO, DecodeSpec(times_s=(0.0, 0.1, 0.39, 0.45)))
    assert [tuple(frame[0, 0].tolist()) for frame in decoded.frames] == [RED, GREEN, GREEN, BLUE]
    assert decoded.times_s == pytest.approx([0, 0.1, 0.1, 0.4])


def test_still_gif_is_a_film_of_one_frame():
    """A picture without an animation has one frame."""
    data = saved(Image.new("RGB", (8, 8), RED), "GIF")
    assert inspect(data, VIDEO).num_frames == 1
    assert decode(data, VIDEO, DecodeSpec(num_frames=2)).frames.shape == (2, 8, 8, 3)


def test_scaled_frames_are_not_below_what_fits():
    """With fit_px, frames come smaller, in the film's shape."""
    data = film(4, size=(640, 480), paint=lambda i: corners(640, 480))
    frames = decode(data, VIDEO, DecodeSpec(num_frames=2, fit_px=(100, 100))).frames

    assert frames.shape == (2, 150, 200, 3)
    assert _near(corner_colors(frames[0]), [RED, GREEN, BLUE, WHITE])


@pytest.mark.parametrize(
    ("tier", "limit"),
    [
        (Tier(max_width_px=95), "max_width_px"),
        (Tier(max_item_pixels=96 * 64 - 1), "max_item_pixels"),
        (Tier(max_video_duration_s=1.9), "max_video_duration_s"),
        (Tier(max_video_coded_frames=59), "max_video_coded_frames"),
    ],
)
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_films_over_budget_name_the_limit(tier, limit, container):
    """Refused at the header."""
    with pytest.raises(BudgetExceeded) as caught:
        inspect(film(60, container=container), VIDEO, tier)
    assert caught.value.limit == limit
    assert caught.value.requested > caught.value.allowed


@pytest.mark.parametrize(
    ("tier", "limit"),
    [(Tier(max_video_frames=7), "max_video_frames"), (Tier(max_request_pixels=8 * 6144 - 1), "max_request_pixels")],
)
def test_sampling_over_budget_names_the_limit(tier, limit):
    """Refused before a frame is decoded."""
    with pytest.raises(BudgetExceeded) as caught:
        decode(film(60), VIDEO, DecodeSpec(num_frames=8), tier)
    assert caught.value.limit == limit


def test_lying_header_is_caught_while_decoding():
    """A guard stricter than the header's promise stops the decoder at the frame that breaks it."""
    data = film(60)
    header = inspect(data, VIDEO)
    from triptych.media import decode as decoders

    steps = decoders.decode(data, header, DecodeSpec(times_s=(1.9,)), DecodeGuard(Tier(max_video_duration_s=1.0)))
    with pytest.raises(BudgetExceeded, match="max_video_duration_s"):
        for _ in steps:
            pass


@pytest.mark.parametrize(("codec", "container", "mime"), CONTAINERS)
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.95])
def test_cut_films_are_corrupt_or_shorter(codec, container, mime, kept):
    """A film that ends early is refused as corrupt, or shows what is there."""
    data = film(codec=codec, container=container)
    try:
        decoded = decode(data[: int(len(data) * kept)], VIDEO, DecodeSpec(num_frames=4))
    except (InvalidMedia, UnsupportedMedia):
        return
    assert decoded.frames.shape == (4, 64, 96, 3)


def test_film_without_pictures_is_refused():
    """Sound alone in a film's container is no video."""
    from tests.media.made import sound, tone

    data = sound(tone(), codec="aac", container="mp4", sample_format="fltp")
    with pytest.raises(UnsupportedMedia, match="no video"):
        inspect(data, VIDEO)


def _near(found, expected):
    return all(max(abs(a - b) for a, b in zip(x, y, strict=True)) <= 40 for x, y in zip(found, expected, strict=True))
