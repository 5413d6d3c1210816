"""A JPEG that the processor shrinks anyway is decoded smaller: same tokens, near the same pixels, another key."""

import numpy as np
import pytest
from PIL import Image

from tests.media.made import photo, saved
from tests.models.folders import write_folder
from tests.models.test_image_families import FAMILIES
from tests.models.test_llava_onevision import PREPROCESSOR as ONEVISION
from tests.models.test_llava_onevision import tiny_onevision
from tests.models.test_qwen2_vl import PREPROCESSOR, tiny
from triptych.core.config import Tier
from triptych.core.media import MediaRef, Modality
from triptych.media.plane import MediaPlane
from triptych.models.registry import load_layout
from triptych.prompt.identity import processed_key

NAMES = [*FAMILIES, "qwen2.5-vl", "llava-onevision"]
SCALED = [name for name in NAMES if name != "internvl"]
MAX_MEAN_LEVELS = 0.6  # of 255, at the model's input


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            if name in FAMILIES:
                made[name] = write_folder(path, *FAMILIES[name].build(), preprocessor=FAMILIES[name].preprocessor)
            elif name == "qwen2.5-vl":
                made[name] = write_folder(path, *tiny("Qwen2_5_VLForConditionalGeneration"), preprocessor=PREPROCESSOR)
            else:
                made[name] = write_folder(path, *tiny_onevision(), preprocessor=ONEVISION)
        return str(made[name])

    return folder


async def processed(layout, data, options):
    """(spec, key, size by the header, what the processor makes) of a picture, through the real plane."""
    async with MediaPlane() as plane:
        (blob,) = await plane.open([MediaRef(Modality.IMAGE, data, options=options)], tier=Tier(), tenant="t")
        spec = layout.decode_spec(blob.header, options)
        decoded = await plane.decode(blob, spec, tier=Tier())
    return (
        spec,
        processed_key(blob, spec, layout.processor_key),
        layout.size(blob.header, options),
        decoded,
        (layout.process(decoded, options)),
    )


def options_of(name):
    return {"anyres": False} if name == "llava-onevision" else {}


@pytest.mark.parametrize("size", [(1200, 800), (640, 1504)])
@pytest.mark.parametrize("name", SCALED)
async def test_large_jpeg_is_decoded_smaller_and_seen_alike(folders, name, size):
    """Sizes, grids and so token counts are those of the full decode; pixels differ by less than a level in the mean."""
    exif = Image.Exif()
    exif[0x0112] = 6
    # without edges finer than the tiny processors' own pixels: what differs then is geometry, not taste in filters
    picture = Image.fromarray(photo(24, 16)).resize(size, Image.Resampling.BICUBIC)
    data = saved(picture, "JPEG", quality=90, exif=exif)
    scaled, full = (load_layout(folders(name), {"scaled_decode": on}) for on in (True, False))
    options = options_of(name)

    spec, key, promised, decoded, found = await processed(scaled, data, options)
    full_spec, full_key, full_promised, full_decoded, wanted = await processed(full, data, options)

    assert spec.fit_px is not None
    assert full_spec.fit_px is None
    assert key != full_key
    assert decoded.pixels.size < full_decoded.pixels.size / 3
    assert decoded.seen_px == full_decoded.seen_px == size[::-1]
    assert found.size == wanted.size == promised == full_promised
    assert {name: array.shape for name, array in found.features.items()} == {
        name: array.shape for name, array in wanted.features.items()
    }
    std = float(np.mean(scaled.image_processor.image_std)) if scaled.image_processor.do_normalize else 1.0
    difference = np.abs(found.features["pixel_values"] - wanted.features["pixel_values"]).mean() * std * 255
    assert difference < MAX_MEAN_LEVELS, difference


async def test_odd_sizes_are_decoded_whole(folders):
    """Where halving leaves a remainder the picture would be stretched: it is decoded as it is."""
    data = saved(Image.fromarray(photo(1203, 797)), "JPEG")
    scaled, full = (load_layout(folders("llava-clip"), {"scaled_decode": on}) for on in (True, False))

    found, wanted = [await processed(layout, data, {}) for layout in (scaled, full)]

    assert (found[4].features["pixel_values"] == wanted[4].features["pixel_values"]).all()


@pytest.mark.parametrize("name", NAMES)
async def test_what_is_not_shrunk_much_is_decoded_whole(folders, name):
    """A small picture's pixels, and its key, are those of a server without the setting."""
    data = saved(Image.fromarray(photo(40, 30)), "JPEG")
    scaled, full = (load_layout(folders(name), {"scaled_decode": on}) for on in (True, False))

    found, wanted = [await processed(layout, data, options_of(name)) for layout in (scaled, full)]

    assert found[0] == wanted[0]
    assert found[1] == wanted[1]
    assert (found[3].pixels == wanted[3].pixels).all()
    assert found[3].full_px is None


async def test_scaling_is_on_unless_switched_off(folders):
    """The default, and what a configuration's `processor` table may say."""
    assert load_layout(folders("llava-clip"), {}).scaled_decode
    assert not load_layout(folders("llava-clip"), {"scaled_decode": False}).scaled_decode
