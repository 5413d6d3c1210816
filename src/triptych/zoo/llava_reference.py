"""Asks a Llava folder through stock transformers: what our answers are held against. Not on any request's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration


class LlavaReference:
    """Owns the stock model and processor of one folder, in float32. Answers are greedy."""

    def __init__(self, folder: Path) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, image: Image.Image, question: str, max_new_tokens: int = 32) -> str:
        """To one question about one picture."""
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        given = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}
        made = self.model.generate(**given, do_sample=False, max_new_tokens=max_new_tokens)
        text: str = self.processor.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        return text
