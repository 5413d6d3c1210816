"""Every kind of picture against the pixels that a person would see."""

import io

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms

from tests.media.decoding import inspect, pixels
from tests.media.made import (
    BLUE,
    GREEN,
    RED,
    WHITE,
    corner_colors,
    corners,
    photo,
    png,
    rgb16_png,
    saved,
)
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia, UnsupportedMedia
from triptych.core.media import DecodeSpec, Modality

PLAIN = [RED, GREEN, BLUE, WHITE]


def heif(picture, **options):
    return saved(picture, "HEIF", **options)


@pytest.fixture(autouse=True, scope="module")
def heif_writer():
    """Pillow learns to write HEIF for these tests; the reader under test does not need it."""
    pillow_heif.register_heif_opener()


@pytest.mark.parametrize(
    ("kind", "options", "mime"),
    [
        ("PNG", {}, "image/png"),
        ("BMP", {}, "image/bmp"),
        ("TIFF", {}, "image/tiff"),
        ("TIFF", {"compression": "tiff_lzw"}, "image/tiff"),
        ("TIFF", {"compression": "jpeg"}, "image/tiff"),
        ("GIF", {}, "image/gif"),
        ("WEBP", {"lossless": True}, "image/webp"),
        ("WEBP", {"quality": 90}, "image/webp"),
        ("JPEG", {"quality": 95}, "image/jpeg"),
        ("JPEG", {"quality": 95, "progressive": True}, "image/jpeg"),
        ("JPEG", {"quality": 95, "subsampling": 0}, "image/jpeg"),
        ("AVIF", {"quality": 95}, "image/avif"),
        ("HEIF", {"quality": 95}, "image/heif"),
    ],
)
def test_formats_yield_their_pixels(kind, options, mime):
    """Each format: type by content, size by header, four known colours."""
    data = saved(Image.fromarray(corners()), kind, **options)
    header = inspect(data)

    assert (header.mime, header.width_px, header.height_px, header.num_bytes) == (mime, 96, 64, len(data))
    assert corner_colors(pixels(data)) == PLAIN


ORIENTED = {
    1: PLAIN,
    2: [GREEN, RED, WHITE, BLUE],
    3: [WHITE, BLUE, GREEN, RED],
    4: [BLUE, WHITE, RED, GREEN],
    5: [RED, BLUE, GREEN, WHITE],
    6: [BLUE, RED, WHITE, GREEN],
    7: [WHITE, GREEN, BLUE, RED],
    8: [GREEN, WHITE, RED, BLUE],
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(kind, orientation):
    """EXIF's eight orientations, in header and pixels, equal to Pillow's own transposition."""
    picture = Image.fromarray(corners())
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture, kind, exif=exif, **({"quality": 95} if kind != "TIFF" else {}))
    header = inspect(data)

    assert (header.width_px, header.height_px) == ((96, 64) if orientation < 5 else (64, 96))
    found = pixels(data)
    assert found.shape == (header.height_px, header.width_px, 3)
    assert corner_colors(found) == ORIENTED[orientation]


def test_exif_does_not_turn_a_heif():
    """A HEIF container says by its own boxes how it is shown, and libheif obeys them; its EXIF is for information."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(corners()), "HEIF", exif=exif, quality=95)

    assert corner_colors(pixels(data)) == PLAIN


@pytest.mark.parametrize("orientation", range(1, 9))
def test_heif_is_turned_once(orientation):
    """Telephones write both: boxes (`irot`, `imir`) that turn the picture, and EXIF that says so. Both are in the file,
    and the picture is turned once, in header and pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(corners()), "HEIF", exif=exif.tobytes(), quality=95)
    assert exif.tobytes()[6:] in data
    assert (b"irot" in data or b"imir" in data) == (orientation != 1)

    header = inspect(data)
    found = pixels(data)

    assert (header.width_px, header.height_px) == ((96, 64) if orientation < 5 else (64, 96))
    assert found.shape == (header.height_px, header.width_px, 3)
    assert corner_colors(found) == ORIENTED[orientation]


def test_boxes_of_an_avif_go_before_its_exif():
    """An AVIF whose boxes turn it and whose EXIF claims the same: turned once."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0128] = 6, 6
    data = saved(Image.fromarray(corners()), "AVIF", exif=exif, quality=95)
    left = exif.tobytes()[6:]  # the writer takes orientation out of the EXIF; a like entry takes its place
    entry = left[left.index(b"\x28\x01") : left.index(b"\x28\x01") + 12] if left[:2] == b"II" else None
    entry = entry or left[left.index(b"\x01\x28") : left.index(b"\x01\x28") + 12]
    both = data.replace(entry, (b"\x12\x01" if left[:2] == b"II" else b"\x01\x12") + entry[2:])
    assert both != data
    assert b"irot" in both

    assert corner_colors(pixels(both)) == ORIENTED[6]


def test_scaled_decode_is_turned_too():
    """A JPEG that is scaled while decoding keeps its orientation, and is not below what fits."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(corners(960, 640)), "JPEG", exif=exif)

    found = pixels(data, DecodeSpec(fit_px=(64, 100)))
    assert found.shape == (240, 160, 3)

    assert corner_colors(found) == ORIENTED[6]
    assert found.shape[0] >= 96
    assert found.shape[0] < 960


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (10, 200, 30)])
def test_alpha_is_laid_over_the_background(background):
    """Transparent parts show the stated background, half-transparent ones a mixture."""
    rgba = np.zeros((4, 3, 4), np.uint8)
    rgba[:, 0] = (255, 0, 0, 255)
    rgba[:, 1] = (255, 0, 0, 0)
    rgba[:, 2] = (255, 0, 0, 128)

    found = pixels(saved(Image.fromarray(rgba), "PNG"), DecodeSpec(background_rgb=background))

    half = [round((255 * (i == 0) * 128 + background[i] * 127) / 255) for i in range(3)]
    assert found[0].tolist() == [[255, 0, 0], list(background), half]


@pytest.mark.parametrize("mode", ["LA", "P", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "GIF"])
def test_hidden_colors_stay_hidden(mode, kind):
    """What is fully transparent shows as background, whatever colour lies beneath it."""
    rgba = np.full((8, 8, 4), 255, np.uint8)
    rgba[:, :4] = (90, 90, 90, 0)
    picture = Image.fromarray(rgba)
    if mode == "P" or kind == "GIF":
        picture = Image.fromarray(np.where(rgba[:, :, 3] == 0, 1, 0).astype(np.uint8), "P")
        picture.putpalette([255, 255, 255, 90, 90, 90])
        picture.info["transparency"] = 1
    elif mode == "LA":
        picture = picture.convert("LA")
    if kind == "WEBP" or (kind == "TIFF" and mode == "P"):
        picture = picture.convert("RGBA")

    found = pixels(saved(picture, kind, **({"lossless": True} if kind == "WEBP" else {})))

    assert found.min() == 255


def test_palette_and_grey_become_rgb():
    """P, L and 1-bit pictures."""
    picture = Image.fromarray(corners())
    assert corner_colors(pixels(saved(picture.quantize(8), "PNG"))) == PLAIN
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert (pixels(saved(Image.fromarray(grey), "PNG")) == grey[:, :, None]).all()
    assert (pixels(saved(Image.fromarray(grey), "JPEG", quality=100))[:, :, 0].astype(int) - grey).max() <= 4
    bits = saved(Image.fromarray(grey > 100), "PNG")
    assert set(np.unique(pixels(bits))) == {0, 255}


def test_sixteen_bits_are_scaled_not_cut():
    """16-bit grey and colour keep their brightness."""
    grey = np.array([[0, 257, 32_896, 65_535]], np.uint16)
    assert pixels(saved(Image.fromarray(grey), "PNG"))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert pixels(saved(Image.fromarray(grey), "TIFF"))[0, :, 0].tolist() == [0, 1, 128, 255]
    color = np.array([[[0, 32_896, 65_535]]], np.uint16)
    assert pixels(rgb16_png(color))[0, 0].tolist() == [0, 128, 255]


def test_float_samples_are_refused_by_name():
    """A float TIFF has no defined range, so no guess is made."""
    data = saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(UnsupportedMedia, match="'F'"):
        pixels(data)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(kind):
    """Four inks, inverted by Adobe's convention in JPEG or not."""
    picture = Image.fromarray(corners()).convert("CMYK")
    data = saved(picture, kind, **({"quality": 95} if kind == "JPEG" else {}))

    assert corner_colors(pixels(data)) == PLAIN


def _swapped_profile():
    """A valid RGB profile whose red and green primaries are exchanged: its effect cannot be missed."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    profile[:] = profile.replace(b"rXYZ", b"tXYZ").replace(b"gXYZ", b"rXYZ").replace(b"tXYZ", b"gXYZ")
    for text in ("sRGB built-in".encode("utf-16-be"), b"sRGB built-in"):
        profile[:] = profile.replace(text, text.replace(b"s", b"x"))
    return bytes(profile)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_profiles_are_applied(kind):
    """Pixels of another colour space arrive in sRGB."""
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    data = saved(Image.fromarray(corners()), kind, icc_profile=_swapped_profile(), **options)

    assert corner_colors(pixels(data)) == [GREEN, RED, BLUE, WHITE]


def test_profile_leaves_alpha_alone():
    """Colour conversion of a transparent picture, then the background in sRGB."""
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0] = (255, 0, 0, 255)
    data = saved(Image.fromarray(rgba), "PNG", icc_profile=_swapped_profile())

    found = pixels(data, DecodeSpec(background_rgb=(9, 8, 7)))

    assert found[0, 0, 1] > 240
    assert found[1, 0].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    "profile", [b"", b"junk", b"\0" * 200, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()]
)
def test_broken_profiles_are_passed_over(profile):
    """A profile that cannot be used does not cost the picture."""
    data = saved(Image.fromarray(corners()), "PNG", icc_profile=profile)
    assert corner_colors(pixels(data)) == PLAIN


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_as_image_is_its_first_frame(kind):
    """An animated file that is sent as an image shows its first frame."""
    frames = [Image.new("RGB", (32, 32), color) for color in (RED, GREEN, BLUE)]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)

    assert corner_colors(pixels(data)) == [RED] * 4


def test_scaled_jpeg_is_near_the_full_one():
    """What a model sees after its own shrinking differs by less than one level in the mean."""
    picture = Image.fromarray(photo(2000, 1500))
    data = saved(picture, "JPEG", quality=90)
    full, scaled = pixels(data), pixels(data, DecodeSpec(fit_px=(224, 224)))

    assert scaled.shape[0] >= 2 * 168
    assert scaled.size < full.size / 8
    kept = [
        np.asarray(Image.fromarray(each).resize((224, 168), Image.Resampling.BICUBIC), np.float32)
        for each in (full, scaled)
    ]
    assert np.abs(kept[0] - kept[1]).mean() < 1.0


def test_plain_jpeg_equals_pillow():
    """Without scaling, libjpeg-turbo by either road gives the same pixels, within rounding."""
    data = saved(Image.fromarray(photo(320, 200)), "JPEG", quality=85)
    other = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)

    assert np.abs(pixels(data) - other).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "HEIF"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_cut_files_are_corrupt(kind, kept):
    """A file that ends early is refused as corrupt, never as our failure."""
    data = saved(Image.fromarray(photo(200, 150)), kind)
    with pytest.raises((InvalidMedia, UnsupportedMedia)):
        pixels(data[: int(len(data) * kept)])


@pytest.mark.parametrize(
    "data", [b"", b"x", b"hello world" * 10, b"<svg></svg>", b"%PDF-1.7", b"SIMPLE  =" + b" " * 80, b"\x80\x04pickle"]
)
def test_other_bytes_are_no_media(data):
    """Text, documents, FITS, pickles: unsupported, not guessed at."""
    with pytest.raises(UnsupportedMedia):
        pixels(data)


def test_promised_modality_must_be_true():
    """A sound that is called an image is refused by name, whatever its declared type."""
    with pytest.raises(UnsupportedMedia, match="an image was promised, not audio/wav"):
        inspect(b"RIFF\0\0\0\0WAVEfmt ")
    with pytest.raises(UnsupportedMedia, match="a video was promised, not image/png"):
        inspect(saved(Image.new("RGB", (4, 4)), "PNG"), Modality.VIDEO)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_width_px", 95), ("max_height_px", 63), ("max_item_pixels", 6143), ("max_item_bytes", 100)],
)
def test_sizes_over_budget_name_limit_and_value(limit, value):
    """Each limit of a picture, one below its size."""
    data = saved(Image.fromarray(corners()), "BMP")
    with pytest.raises(BudgetExceeded) as caught:
        inspect(data, tier=Tier(**{limit: value}))
    assert (caught.value.limit, caught.value.allowed) == (limit, value)
    assert caught.value.requested > value


def test_zero_sized_and_one_pixel_pictures():
    """1 x 1 is a picture; 0 x 0 is corrupt."""
    assert pixels(saved(Image.new("RGB", (1, 1), RED), "PNG")).tolist() == [[list(RED)]]
    with pytest.raises(InvalidMedia):
        inspect(png((0, 0, 8, 2)))


def test_jpeg_of_a_thousand_scans_is_refused():
    """A progressive file that asks for the same work again and again."""
    data = saved(Image.fromarray(corners()), "JPEG", progressive=True)
    scan = data.rindex(b"\xff\xda")
    bomb = data[:-2] + data[scan:-2] * 500 + data[-2:]
    with pytest.raises(InvalidMedia):
        inspect(bomb)
