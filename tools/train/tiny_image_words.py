"""What the text encoder is asked in training: at every noun what it stands for, and at every word which ground.

Without it the colour of a noun was not to be found at the noun after 5,500 steps (a linear probe was right in 22% of
ten colours), and of two things in one picture each got the other's colour or shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import T5Tokenizer

from triptych.testing.prompts import MAX_OBJECTS, RELATIONS, Prompt
from triptych.testing.scene_paint import COLOURS, SHAPES

_COLOURS = list(COLOURS)
_OTHER_SIDE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}
IGNORED = -100
SIZES = {"colour": len(COLOURS), "count": MAX_OBJECTS, "place": len(RELATIONS) + 1, "ground": len(COLOURS)}


class WordHeads(torch.nn.ModuleDict):
    """One linear head a question, over the text encoder's output."""

    def __init__(self, width: int) -> None:
        super().__init__({name: torch.nn.Linear(width, size) for name, size in SIZES.items()})

    def loss(self, hidden: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the questions' cross entropies; `hidden` is [B, L, D], a target [B, L]."""
        return sum(
            F.cross_entropy(self[name](hidden).float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
            for name, wanted in targets.items()
        )


def word_targets(
    tokenizer: T5Tokenizer, ids: torch.Tensor, mask: torch.Tensor, prompts: Sequence[Prompt | None]
) -> dict[str, torch.Tensor]:
    """[B, L] int64 each; the k-th noun of a text is that of the prompt's k-th group."""
    nouns = set(tokenizer.convert_tokens_to_ids([f"▁{shape}" for shape in SHAPES]))
    targets = {name: torch.full_like(ids, IGNORED) for name in SIZES}
    for row, prompt in enumerate(prompts):
        if prompt is None:
            continue
        targets["ground"][row][mask[row].bool()] = _COLOURS.index(prompt.background)
        places = [index for index, token in enumerate(ids[row].tolist()) if token in nouns]
        for index, (place, group) in enumerate(zip(places, prompt.groups, strict=True)):
            targets["colour"][row, place] = _COLOURS.index(group.colour)
            targets["count"][row, place] = group.count - 1
            targets["place"][row, place] = _side(prompt.relation, is_first=index == 0)
    return targets


def _side(relation: str | None, *, is_first: bool) -> int:
    if relation is None:
        return 0
    return 1 + RELATIONS.index(relation if is_first else _OTHER_SIDE[relation])
