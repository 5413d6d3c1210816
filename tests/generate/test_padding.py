"""Padding of masked text is cut before the denoiser sees it."""

from __future__ import annotations

import pytest
import torch

from triptych.generate.kinds.row import merge, without_padding

from .conftest import Toys


@pytest.mark.parametrize("name", ["pixart", "ltx"])
def test_text_is_as_long_as_its_tokens(toys: Toys, name: str):
    """A prompt's embeddings end with its last token, and are those that the stock pipeline makes; an empty one has its
    end token."""
    kind = toys.kind(name)
    prompt = "a red square"
    with torch.inference_mode():
        ours, empty = kind.encode_text(prompt, is_negative=False), kind.encode_text(None, is_negative=True)
        stock, mask, _, _ = kind.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)
    length = len(kind.pipeline.tokenizer(prompt).input_ids)

    assert ours["encoder_hidden_states"].shape[1] == length == int(mask.sum()) < stock.shape[1]
    torch.testing.assert_close(ours["encoder_hidden_states"], stock[:, :length], rtol=0, atol=0)
    assert bool(ours["encoder_attention_mask"].all())
    assert empty["encoder_hidden_states"].shape[1] == 1


def test_texts_of_unequal_length_meet_with_their_masks():
    """What a batch pads again is masked; a mask without any token leaves one, masked."""
    long = without_padding(torch.ones(1, 6, 2), torch.tensor([[1, 1, 1, 0, 0, 0]]))
    none = without_padding(torch.ones(1, 6, 2), torch.zeros(1, 6, dtype=torch.long))
    merged = merge([{"text": text, "mask": mask} for text, mask in (long, none)])

    assert merged["mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert merged["text"].shape == (2, 3, 2)
