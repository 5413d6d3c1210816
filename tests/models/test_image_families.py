"""Families of fixed-size tiles: parity with the stock models, and sizes from the header alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.core.media import DecodedImage, Modality
from triptych.models.registry import load_layout, load_served_model

from .folders import TINY_TEXT, spread_weights, write_folder
from .parity import Case, assert_parity, drawing, header_of, prepare
from .tokens import byte_tokenizer

TEXT = TINY_TEXT | dict(head_dim=8, max_position_embeddings=4096, bos_token_id=None)
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2)


@dataclass
class Family:
    """How a tiny model of one family is made, and what stock `generate` is given for a prompt."""

    architecture: str
    special: tuple[str, ...]
    placeholder: str
    image_token: str
    config: Any
    preprocessor: dict[str, Any]
    nested: bool = False  # stock pixel_values have a leading axis of prompts
    named: dict[str, str] = field(default_factory=dict)

    def tokenizer(self):
        return byte_tokenizer(self.special, {"image": self.placeholder}, **self.named)

    def build(self):
        words = self.tokenizer()
        kind = getattr(transformers, self.architecture)
        text = TEXT | dict(vocab_size=len(words), eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
        config = kind.config_class(**self.config(text, words.convert_tokens_to_ids))
        return spread_weights(kind(config)), words

    def stock_inputs(self, prompt):
        if not prompt.items:
            return {}
        pixels = torch.from_numpy(np.concatenate([item.features["pixel_values"] for item in prompt.items]))
        inputs = {"pixel_values": pixels[None] if self.nested else pixels}
        if self.architecture.startswith("Gemma3"):
            ids = torch.tensor([prompt.expanded.token_ids])
            inputs["token_type_ids"] = (ids == self.tokenizer().convert_tokens_to_ids(self.image_token)).long()
        return inputs


def idefics3(architecture, model_type):
    tiles = tuple(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5))
    return Family(
        architecture,
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles),
        "<image>",
        "<image>",
        lambda text, token: dict(
            text_config=text | dict(model_type=model_type),
            vision_config=TOWER | dict(image_size=32, patch_size=8),
            scale_factor=2,
            image_token_id=token("<image>"),
            pad_token_id=text["pad_token_id"],
        ),
        {
            "image_processor_type": architecture.replace("ForConditionalGeneration", "ImageProcessor"),
            "max_image_size": {"longest_edge": 32},
            "size": {"longest_edge": 96},
        },
        nested=True,
    )


def llava(tower, processor, strategy):
    return Family(
        "LlavaForConditionalGeneration",
        ("<image>",),
        "<image>",
        "<image>",
        lambda text, token: dict(
            text_config=text | dict(model_type="llama"),
            vision_config=TOWER | dict(image_size=28, patch_size=7) | tower,
            image_token_id=token("<image>"),
            vision_feature_layer=-2,
            vision_feature_select_strategy=strategy,
        ),
        processor | {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}},
    )


FAMILIES = {
    "idefics3": idefics3("Idefics3ForConditionalGeneration", "llama"),
    "smolvlm": idefics3("SmolVLMForConditionalGeneration", "llama"),
    "llava-clip": llava({"model_type": "clip_vision_model"}, {"image_processor_type": "CLIPImageProcessor"}, "default"),
    "llava-siglip": llava(
        {"model_type": "siglip_vision_model"}, {"image_processor_type": "SiglipImageProcessor"}, "full"
    ),
    "llava-dinov2": llava(
        {"model_type": "dinov2", "mlp_ratio": 2}, {"image_processor_type": "BitImageProcessor"}, "default"
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<start_of_image>",
        "<image_soft_token>",
        lambda text, token: dict(
            text_config=text
            | dict(sliding_window=11, layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4),
            vision_config=TOWER | dict(image_size=56, patch_size=7),
            mm_tokens_per_image=16,
            tie_word_embeddings=False,
            boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
            image_token_index=token("<image_soft_token>"),
        ),
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        lambda text, token: dict(
            text_config=text | dict(model_type="qwen2"),
            vision_config=TOWER | dict(image_size=[28, 28], patch_size=[7, 7]),
            image_token_id=token("<IMG_CONTEXT>"),
        ),
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "max_patches": 6,
            "size": {"height": 28, "width": 28},
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    chosen = FAMILIES[request.param]
    model, words = chosen.build()
    folder = write_folder(tmp_path_factory.mktemp(request.param), model, words, preprocessor=chosen.preprocessor)
    return chosen, folder, model, words


def chat(words, *turns):
    messages = [
        {"role": role, "content": [{"type": p} if p == "image" else {"type": "text", "text": p} for p in parts]}
        for role, *parts in turns
    ]
    return words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def pictures(*sizes):
    return [(Modality.IMAGE, drawing(w, h, seed), None) for seed, (w, h) in enumerate(sizes)]


def test_greedy_equals_generate(family):
    """Several pictures of different shapes, several turns, text alone beside them: token for token."""
    chosen, folder, model, words = family
    first = chat(words, ("user", "image", "how many red"), ("assistant", "the"), ("user", "is the", "image"))
    cases = [
        Case(first, pictures((90, 40), (30, 60))),
        Case(chat(words, ("user", "how many")), []),
        Case(chat(words, ("user", "image")), pictures((50, 50))),
    ]

    tokens = assert_parity(folder, model, cases, chosen.stock_inputs)

    assert len({token for answer in tokens for token in answer}) > 1


def test_tower_layers_see_contiguous_rows(family):
    """Every layer gets its rows in memory order, so none of them copies; two pictures give different embeddings."""
    _, folder, _, words = family
    layout, served = _layout(folder), load_served_model(folder, "float32", "cpu")
    seen = []
    for layer in served.encoder_layers():
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args or tuple(kwargs.values()))[0].is_contiguous()), with_kwargs=True
        )
    items = prepare(layout, Case(chat(words, ("user", "image", "image")), pictures((60, 60), (60, 60)))).items
    with torch.inference_mode():
        one, other = served.encode(items)

    assert seen
    assert all(seen)
    assert not torch.allclose(one, other)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width_px=st.integers(1, 300), height_px=st.integers(1, 300), detail=st.sampled_from(["auto", "low"]))
def test_size_from_header_is_what_is_processed(family, width_px, height_px, detail):
    """The header's width and height give the exact number of embeddings, and of tiles processed."""
    _chosen, folder, _model, _words = family
    layout = _layout(folder)
    decoded = DecodedImage(np.zeros((height_px, width_px, 3), np.uint8))
    size = layout.size(header_of(decoded), {"detail": detail})
    done = layout.process(decoded, {"detail": detail})
    tiles = len(done.features["pixel_values"])

    assert size == done.size
    assert size.num_embeds % tiles == 0
    run = layout.run(Modality.IMAGE, size)
    assert size.num_embeds == sum(length for _, length, _ in run.pieces)
    assert size.num_embeds == size.num_tokens_encoder * (size.num_embeds // tiles) // (size.num_tokens_encoder // tiles)


_LAYOUTS: dict[Any, Any] = {}


def _layout(folder):
    return _LAYOUTS.setdefault(folder, load_layout(folder))


def test_splitting_is_an_option(tmp_path):
    """`image_splitting: false` and `detail: low` give one tile; a wrong type is an error that names the option."""
    chosen = FAMILIES["smolvlm"]
    model, words = chosen.build()
    layout = load_layout(write_folder(tmp_path, model, words, preprocessor=chosen.preprocessor))
    header = header_of(drawing(90, 40))

    assert layout.size(header, {}).grid == (2, 3)
    assert layout.size(header, {"image_splitting": False}).grid == (0, 0)
    assert layout.size(header, {"detail": "low"}).grid == (0, 0)
    with pytest.raises(InvalidRequest, match="image_splitting"):
        layout.size(header, {"image_splitting": "no"})


def test_processor_without_one_size_is_refused(tmp_path):
    """A LLaVA processor that keeps the aspect ratio would not give every picture the same run."""
    chosen = FAMILIES["llava-clip"]
    model, words = chosen.build()
    free = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False, "size": {"shortest_edge": 28}}

    with pytest.raises(InvalidRequest, match="one size"):
        load_layout(write_folder(tmp_path, model, words, preprocessor=free))
