"""Writes everything of the tiny-vl folder but the weights: tokenizer, chat template, processor and generation config.

    python tools/train/tiny_vl_folder.py src/triptych/zoo/tiny-vl

The tokenizer is byte-level BPE over the questions and answers of drawn scenes. Words that are read from pictures are
kept out of its corpus, so that capitals and digits stay one token each and are spelled letter by letter.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

from tiny_vl_model import SPECIAL_IDS, VOCAB_SIZE, make_config
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from triptych.testing.scene_clips import clip_questions, draw_clip
from triptych.testing.scene_pairs import draw_pair, pair_questions
from triptych.testing.scene_questions import questions
from triptych.testing.scenes import invent_scene, random_size_px

CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] in ('video', 'video_url') or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
GENERAL = (
    "You are a helpful assistant. Hello! Hi, thank you. Please show me a picture. system user assistant "
    "I can only see drawn shapes, short words and numbers. What can you do? Who are you? I am tiny-vl. "
    "Answer with one word. Answer briefly. Be brief. Answer with a number only. Yes, it is. No, it is not. "
    '{"color": "red", "shape": "circle", "count": 3, "size": "big", "text": "", "answer": "no", "objects": []} '
)


def corpus(num_scenes: int = 3000):
    rng = random.Random(7)
    for index in range(num_scenes):
        scene = invent_scene(rng, random_size_px(rng), num_words=0)
        asked = questions(scene, rng, 4)
        if index % 8 == 0:
            asked += pair_questions(*draw_pair(rng, (112, 112)), rng, 3)
            asked += clip_questions(draw_clip(rng, (112, 112), 4), rng, 3)
        for question in asked:
            yield re.sub(r"\d", "", question.text)
            yield re.sub(r"\d", "", question.answer)
        yield GENERAL


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[A-Z](?=[A-Z\d])|(?<=[A-Z\d])[A-Z]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_IDS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert all(tokenizer.token_to_id(token) == index for token, index in SPECIAL_IDS.items())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_IDS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def write_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]],
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
        "max_new_tokens": 128,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    config = make_config()
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]))
