"""A folder of the SmolVLM-256M shape with random weights, for speed alone: weights do not change the time.

    python -m bench.model OUT_FOLDER

The tokenizer is a byte-level BPE trained here on the source files of Python and transformers, so nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

VOCAB_SIZE = 49_152
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def make(out: Path) -> None:
    """Write the folder: about 0.5 GB, bfloat16."""
    tokenizer = _tokenizer()
    out.mkdir(parents=True, exist_ok=True)
    _model(tokenizer).save_pretrained(out)
    _wrapped(tokenizer).save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    (out / "preprocessor_config.json").write_text(json.dumps(_picture_processor()))
    (out / "processor_config.json").write_text(
        json.dumps({"image_seq_len": 64, "processor_class": "Idefics3Processor"})
    )


def _texts() -> Iterator[str]:
    library = [p for p in Path(os.__file__).parent.rglob("*.py") if "site-packages" not in p.parts]
    models_folder = Path(transformers.__file__).parent / "models"
    for path in sorted(library) + sorted(models_folder.rglob("modeling_*.py"))[:150]:
        yield path.read_text("utf-8", "replace")


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|pad_vocab_{i}|>", normalized=False) for i in range(missing)])
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(88)]
    special = ["<global-img>", *tiles, "<fake_token_around_image>", "<image>", *reserved, "<end_of_utterance>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return tokenizer


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _model(tokenizer: Tokenizer) -> Idefics3ForConditionalGeneration:
    torch.manual_seed(0)
    ids = dict(bos_token_id=1, eos_token_id=tokenizer.token_to_id("<end_of_utterance>"), pad_token_id=2)
    config = Idefics3Config(
        vision_config=dict(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            image_size=512,
            patch_size=16,
        ),
        text_config=dict(
            model_type="llama",
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=tokenizer.get_vocab_size(),
            rope_theta=100_000,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            **ids,
        ),
        scale_factor=4,
        image_token_id=tokenizer.token_to_id("<image>"),
        tie_word_embeddings=False,
        **ids,
    )
    model = Idefics3ForConditionalGeneration(config).to(torch.bfloat16).eval()
    for name, token_id in ids.items():
        setattr(model.generation_config, name, token_id)
    return model


def _picture_processor() -> dict[str, object]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": 512},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 2048},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)
