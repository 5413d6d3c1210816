"""tiny-image's parts, all of stock classes, and a forward for training that gives what theirs gives, faster on a CPU.

PixArt: a T5 encoder reads the prompt, transformer blocks attend to it, one modulation by time is shared by all blocks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from diffusers import DPMSolverMultistepScheduler, PixArtTransformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from tiny_image_vae import LATENT_CHANNELS
from tiny_image_words import WordHeads
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from triptych.testing.scene_paint import COLOURS, SHAPES
from triptych.testing.scene_words import NUMBERS

WIDTH, LAYERS, HEAD_WIDTH = 160, 6, 32
TEXT_WIDTH = 128
DEFAULT_TOKENS = 8  # along each side of the default picture: 64 px
POSITIONS_SPAN = 16  # what the positions of any picture run over
GUIDANCE = 2.0  # with which the most prompts are drawn rightly
AUX_LAYER = 3  # its output is asked what will be where
NUM_COLOURS, NUM_SHAPES = len(COLOURS) + 1, len(SHAPES) + 1  # and the background
_WORDS = (
    "a an above below over under left right of to the and on with no draw please picture image background ground grey"
)


def make_tokenizer() -> T5Tokenizer:
    """Words of the drawn world as pieces, plurals in two, anything else by letters."""
    words = [*_WORDS.split(), *NUMBERS, *COLOURS, *SHAPES]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", -4.0) for word in dict.fromkeys(words)]
    pieces += [("s", -5.0), ("es", -5.0), (",", -5.0)]
    pieces += [(chr(code), -8.0) for code in range(33, 127) if chr(code) not in "s,"]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=120)


def make_text_encoder(vocabulary: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocabulary, d_model=TEXT_WIDTH, d_kv=32, d_ff=256, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return T5EncoderModel(config)


def make_denoiser() -> PixArtTransformer2DModel:
    denoiser = PixArtTransformer2DModel(
        sample_size=DEFAULT_TOKENS,
        interpolation_scale=DEFAULT_TOKENS / POSITIONS_SPAN,
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        num_attention_heads=WIDTH // HEAD_WIDTH,
        attention_head_dim=HEAD_WIDTH,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT_WIDTH,
        activation_fn="linear-silu",
        use_additional_conditions=False,
    )
    torch.nn.init.zeros_(denoiser.proj_out.weight)
    torch.nn.init.zeros_(denoiser.proj_out.bias)
    for block in denoiser.transformer_blocks:
        for projection in (block.attn1.to_out[0], block.attn2.to_out[0], block.ff.net[2]):
            torch.nn.init.zeros_(projection.weight)
            torch.nn.init.zeros_(projection.bias)
        block.scale_shift_table.data[[2, 5]] += 1.0  # gates open, since what passes them begins at zero
    return denoiser


def make_scheduler() -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.5)


class Model(torch.nn.Module):
    """Text encoder and denoiser, trained together, with heads that fall away after training."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text_encoder = make_text_encoder(vocabulary)
        self.denoiser = make_denoiser()
        self.colour_head = torch.nn.Linear(WIDTH, NUM_COLOURS)
        self.shape_head = torch.nn.Linear(WIDTH, NUM_SHAPES)
        self.word_heads = WordHeads(TEXT_WIDTH)

    def read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The text encoder's output [B, L, D]."""
        return self.text_encoder(ids, attention_mask=mask)[0]

    def project(self, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Text [B, L, D] as the blocks take it, and its bias [B, 1, 1, L]."""
        text = self.denoiser.caption_projection(hidden)
        return text, (1 - mask.to(text.dtype))[:, None, None] * -10000.0

    def encode(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.project(self.read(ids, mask), mask)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity [B, C, h, w] of the noisy latents, and hidden states [B, h * w, D] inside."""
        denoiser, (num, channels, height, width) = self.denoiser, latents.shape
        projection = denoiser.pos_embed.proj
        x = F.linear(latents.flatten(2).mT, projection.weight.flatten(1), projection.bias)
        x = x + positions(height, width, x.shape[-1]).to(x.dtype)
        modulation, embedded = denoiser.adaln_single(
            timestep, {"resolution": None, "aspect_ratio": None}, batch_size=num, hidden_dtype=x.dtype
        )
        modulation, inside = modulation.view(num, 6, -1), x
        for index, block in enumerate(denoiser.transformer_blocks):
            x = _block(block, x, text, bias, modulation)
            if index == AUX_LAYER:
                inside = x
        shift, scale = (denoiser.scale_shift_table[None] + embedded[:, None]).chunk(2, dim=1)
        x = denoiser.proj_out(torch.addcmul(shift, _norm(x), 1 + scale))
        return x.mT.reshape(num, channels, height, width), inside


def _block(block, x, text, bias, modulation):
    shift, scale, gate, shift_ff, scale_ff, gate_ff = (block.scale_shift_table[None] + modulation).chunk(6, dim=1)
    normed = torch.addcmul(shift, _norm(x), 1 + scale)
    x = torch.addcmul(x, gate, _attention(block.attn1, normed, normed, None))
    x = x + _attention(block.attn2, x, text, bias)
    normed = torch.addcmul(shift_ff, _norm(x), 1 + scale_ff)
    inner = F.silu(block.ff.net[0].proj(normed))
    return torch.addcmul(x, gate_ff, block.ff.net[2](inner))


def _norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def _attention(attention, x, context, bias):
    """By matrix products: the fused attention's backward is ten times slower on a CPU at this size."""
    heads = attention.heads
    query, key, value = (
        projection(source).unflatten(-1, (heads, -1)).transpose(1, 2)
        for projection, source in ((attention.to_q, x), (attention.to_k, context), (attention.to_v, context))
    )
    scores = torch.matmul(query * HEAD_WIDTH**-0.5, key.mT)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return attention.to_out[0](torch.matmul(weights, value).transpose(1, 2).flatten(2))


@lru_cache(maxsize=64)
def positions(height: int, width: int, channels: int) -> torch.Tensor:
    """[1, h * w, D]: as the stock patch embedding, which spans the same range at every size."""
    grid = get_2d_sincos_pos_embed(channels, (height, width), base_size=POSITIONS_SPAN, output_type="pt")
    return grid.float()[None]
