"""Every family in the half-width dtypes: nothing on the path insists on float32, and answers stay near float32's."""

import pytest
import torch

from triptych.core.errors import InvalidRequest
from triptych.core.media import Modality
from triptych.models import served
from triptych.models.registry import load_layout, load_served_model

from . import test_llava_onevision, test_qwen2_audio, test_qwen2_vl, test_qwen3_vl
from .folders import write_folder
from .packed import run_greedy
from .parity import Case, drawing, prepare
from .test_image_families import FAMILIES, chat
from .test_text import tiny as tiny_text


def _image_family(name):
    def make(path):
        model, words = FAMILIES[name].build()
        write_folder(path, model, words, preprocessor=FAMILIES[name].preprocessor)
        return chat(words, ("user", "image", "how many")), [(Modality.IMAGE, drawing(60, 40), None)], 1

    return make


def _qwen(build, preprocessor):
    def make(path):
        model, words = build()
        write_folder(path, model, words, preprocessor=preprocessor)
        ids = test_qwen2_vl.chat(words, ("user", "image", "how many", "video"))
        media = [(Modality.IMAGE, drawing(60, 40), None), (Modality.VIDEO, test_qwen2_vl.clip(3, 56, 56), None)]
        return ids, media, 3

    return make


def _text(path):
    model, words = tiny_text("Gemma2ForCausalLM")
    write_folder(path, model, words)
    return words.encode("how many red"), [], 1


def _audio(path):
    model, words = test_qwen2_audio.tiny_audio()
    write_folder(path, model, words, preprocessor=test_qwen2_audio.EXTRACTOR)
    ids = test_qwen2_audio.chat(words, "audio", "how many")
    return ids, [(Modality.AUDIO, test_qwen2_audio.sound(9_000), None)], 1


def _onevision(path):
    model, words = test_llava_onevision.tiny_onevision()
    write_folder(path, model, words, preprocessor=test_llava_onevision.PREPROCESSOR)
    ids = test_llava_onevision.chat(words, "image", "how many")
    return ids, [(Modality.IMAGE, drawing(60, 40), None)], 1


MAKERS = {
    "qwen2-audio": _audio,
    "llava-onevision": _onevision,
    "text": _text,
    **{name: _image_family(name) for name in FAMILIES},
    "qwen2-vl": _qwen(lambda: test_qwen2_vl.tiny("Qwen2VLForConditionalGeneration"), test_qwen2_vl.PREPROCESSOR),
    "qwen2.5-vl": _qwen(lambda: test_qwen2_vl.tiny("Qwen2_5_VLForConditionalGeneration"), test_qwen2_vl.PREPROCESSOR),
    "qwen3-vl": _qwen(test_qwen3_vl.tiny_qwen3, test_qwen3_vl.PREPROCESSOR),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MAKERS)
def test_runs_in_half_width(name, dtype, tmp_path):
    """Embeddings come in the served dtype and are close to float32's; generation runs through to the end."""
    ids, media, num_axes = MAKERS[name](tmp_path)
    layout = load_layout(tmp_path)
    prompt = prepare(layout, Case(ids, media))
    half, full = load_served_model(tmp_path, dtype, "cpu"), load_served_model(tmp_path, "float32", "cpu")
    for item in prompt.items:
        with torch.inference_mode():
            (rows,), (exact,) = half.encode([item]), full.encode([item])
        assert rows.dtype is half.dtype is getattr(torch, dtype)
        assert torch.nn.functional.cosine_similarity(rows.float().flatten(), exact.flatten(), dim=0) > 0.99

    (tokens,) = run_greedy(half, [prompt], 3, num_axes=num_axes)

    assert len(tokens) == 3


@pytest.mark.parametrize(("emulated", "expected"), [(False, torch.bfloat16), (True, torch.float32)])
def test_dtype_follows_the_folder_where_the_cpu_can(tmp_path, monkeypatch, emulated, expected):
    """`auto` is what config.json says, or float32 on a CPU that only emulates that; a dtype asked for is taken."""
    model, words = tiny_text("LlamaForCausalLM")
    write_folder(tmp_path, model.to(torch.bfloat16), words)
    monkeypatch.setattr(served, "is_emulated", lambda dtype, device: emulated and dtype is torch.bfloat16)

    assert load_served_model(tmp_path, "auto", "cpu").dtype is expected
    assert load_served_model(tmp_path, "bfloat16", "cpu").dtype is torch.bfloat16


def test_an_unknown_dtype_or_device_is_refused_by_name(tmp_path):
    model, words = tiny_text("LlamaForCausalLM")
    write_folder(tmp_path, model, words)

    with pytest.raises(InvalidRequest, match="int8"):
        load_served_model(tmp_path, "int8", "cpu")
    with pytest.raises(InvalidRequest, match="toaster"):
        load_served_model(tmp_path, "auto", "toaster")
