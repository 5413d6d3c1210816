"""Asks a Qwen2.5-VL folder through stock transformers, without torchvision: what the server's answers are held against.

Not on any request's path. Pictures go through the stock Pillow image processor, clips through the same, two frames a
temporal patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer


@dataclass(frozen=True)
class Ask:
    """One user turn: pictures, or the frames of one clip, and the text after them."""

    text: str
    pictures: Sequence[Image.Image] = ()
    clip: Sequence[Image.Image] = ()


class Reference:
    """Owns the stock model, tokenizer and image processor of one folder. Answers are greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        self.config = self.model.config

    @torch.inference_mode()
    def answers(self, asks: Sequence[Ask], max_new_tokens: int = 96) -> list[str]:
        """One answer for each, decoded greedily in one padded batch."""
        inputs = self.inputs(asks)
        made = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        return self.tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def inputs(self, asks: Sequence[Ask]) -> dict[str, torch.Tensor]:
        """What the stock model's `forward` and `generate` take."""
        texts, images, videos = [], [], []
        for ask in asks:
            stills = [self.still(picture) for picture in ask.pictures]
            clips = [self.video(ask.clip)] if ask.clip else []
            texts.append(self.prompt(ask.text, stills, clips))
            images += stills
            videos += clips
        inputs = dict(self.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False))
        ids = inputs["input_ids"]
        kinds = (ids == self.config.image_token_id).int() + 2 * (ids == self.config.video_token_id).int()
        inputs["mm_token_type_ids"] = kinds
        for name, media in (("image", images), ("video", videos)):
            if media:
                inputs["pixel_values" if name == "image" else "pixel_values_videos"] = torch.cat([m[0] for m in media])
                inputs[f"{name}_grid_thw"] = torch.cat([m[1] for m in media])
        inputs.pop("token_type_ids", None)
        return inputs

    def prompt(self, text: str, stills, clips) -> str:
        content = (
            [{"type": "image"}] * len(stills) + [{"type": "video"}] * len(clips) + [{"type": "text", "text": text}]
        )
        messages = [{"role": "user", "content": content}]
        prompt: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for pad, media in (("<|image_pad|>", stills), ("<|video_pad|>", clips)):
            pieces = prompt.split(pad)
            prompt = pieces[0]
            for (_, grid), rest in zip(media, pieces[1:], strict=True):
                prompt += pad * (int(grid.prod()) // self.config.vision_config.spatial_merge_size**2) + rest
        return prompt

    def still(self, picture: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches [N, 3*2*14*14] and grid [1, 3]."""
        made = self.processor(images=[picture], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def video(self, frames: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Two frames a temporal patch; a last odd one is shown twice."""
        made = self.processor(images=[*frames, *frames[len(frames) - len(frames) % 2 :]], return_tensors="pt")
        grid = made["image_grid_thw"]
        steps, per_frame = len(grid) // 2, int(grid[0].prod())
        patches = made["pixel_values"].view(steps, 2, per_frame, 3, 2, -1)
        paired = torch.stack((patches[:, 0, :, :, 0], patches[:, 1, :, :, 1]), dim=3)
        return paired.reshape(steps * per_frame, -1), torch.tensor([[steps, *grid[0, 1:].tolist()]])
