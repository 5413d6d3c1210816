"""The pixel paths give bit for bit what the stock image processors give."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from triptych.models.native.build import NativeUnavailable, load_library
from triptych.models.registry import load_layout
from triptych.models.resample import FILTERS, is_native, resized

from .folders import write_folder
from .parity import drawing
from .test_image_families import FAMILIES
from .test_qwen2_vl import PREPROCESSOR, tiny

SIZES = [(90, 40), (33, 70), (32, 32), (1, 1), (200, 130)]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_idefics3_tiles_equal_stock(tmp_path_factory, size, splits):
    """Resize, split, thumbnail, normalise: equal to the stock processor."""
    layout = _layout("idefics3", tmp_path_factory)
    decoded = drawing(*size)
    stock = Idefics3ImageProcessorPil(max_image_size={"longest_edge": 32}, size={"longest_edge": 96})
    expected = stock.preprocess([Image.fromarray(decoded.pixels)], do_image_splitting=splits, return_tensors="np")

    actual = layout.process(decoded, {"image_splitting": splits}).features["pixel_values"]

    assert np.array_equal(expected["pixel_values"][0], actual)


@pytest.mark.parametrize("size", [(90, 40), (33, 70), (28, 28), (200, 130)])
def test_qwen_patches_equal_stock(tmp_path_factory, size):
    """Patches and grid: equal to the stock processor."""
    layout = _layout("qwen", tmp_path_factory)
    decoded = drawing(*size)
    parameters = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    expected = Qwen2VLImageProcessorPil(**parameters).preprocess([Image.fromarray(decoded.pixels)], return_tensors="np")

    features = layout.process(decoded, {}).features

    assert np.array_equal(expected["pixel_values"], features["pixel_values"])
    assert np.array_equal(expected["image_grid_thw"], features["grid_thw"])


@pytest.mark.parametrize("name", ["llava-clip", "llava-siglip", "llava-dinov2", "gemma3", "internvl"])
def test_other_families_equal_stock(tmp_path_factory, name):
    """Stock geometry with the table's arithmetic: equal to the stock processor."""
    layout = _layout(name, tmp_path_factory)
    for size in SIZES:
        decoded = drawing(*size)
        expected = layout.image_processor.preprocess([Image.fromarray(decoded.pixels)], return_tensors="np")

        actual = layout.process(decoded, {}).features["pixel_values"]

        assert np.array_equal(expected["pixel_values"], actual)


def test_straight_to_tile_is_close(tmp_path):
    """Leaving out the enlargement changes a single tile by little, and its key altogether."""
    model, words = FAMILIES["idefics3"].build()
    folder = write_folder(tmp_path, model, words, preprocessor=FAMILIES["idefics3"].preprocessor)
    exact, straight = load_layout(folder), load_layout(folder, {"straight_to_tile": True})
    decoded = drawing(32, 32)
    one, other = (
        layout.process(decoded, {"image_splitting": False}).features["pixel_values"] for layout in (exact, straight)
    )

    assert np.abs(one - other).mean() < 0.05
    assert exact.processor_key != straight.processor_key


_LAYOUTS = {}


def _layout(name, tmp_path_factory):
    if name not in _LAYOUTS:
        path = tmp_path_factory.mktemp(name)
        if name == "qwen":
            model, words = tiny("Qwen2_5_VLForConditionalGeneration")
            _LAYOUTS[name] = load_layout(write_folder(path, model, words, preprocessor=PREPROCESSOR))
        else:
            model, words = FAMILIES[name].build()
            _LAYOUTS[name] = load_layout(write_folder(path, model, words, preprocessor=FAMILIES[name].preprocessor))
    return _LAYOUTS[name]


sides = st.integers(1, 120)


@settings(max_examples=150, deadline=None)
@given(height=sides, width=sides, target=st.tuples(sides, sides), kind=st.sampled_from(sorted(FILTERS)))
def test_resampling_equals_pillow(height, width, target, kind):
    """Whatever the sizes and the filter, every byte is Pillow's."""
    pixels = np.random.default_rng(height * 131 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    expected = np.asarray(image.resize((target[1], target[0]), kind))

    assert np.array_equal(expected, resized(pixels, *target, kind))


@pytest.mark.parametrize("size", [(512, 512, 2048, 2048), (300, 400, 1536, 2048), (700, 700, 512, 512)])
def test_resampling_equals_pillow_at_served_sizes(size):
    """The sizes of a SmolVLM tile, an enlarged photograph, a square that shrinks."""
    height, width, *target = size
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    kind = Image.Resampling.LANCZOS

    assert np.array_equal(np.asarray(image.resize(target[::-1], kind)), resized(pixels, *target, kind))


def test_kernels_are_used_where_a_compiler_is():
    """With a compiler the kernels agree with this Pillow, and serve."""
    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))

    assert is_native()
