"""tiny-vl: the stock Qwen2.5-VL configuration, and a fast training forward over its own weights.

The stock tower splits attention picture by picture, which is slow for a batch of small ones. Here a batch holds
pictures of one size, so each layer is one call. `tests/zoo/` and the evaluation use the stock code only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_vl_look import told
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VOCAB_SIZE = 1024
PATCH_PX, MERGE = 14, 2
WINDOW_MERGED = 4  # a 112-pixel attention window is 4 by 4 merged tokens
SPECIAL_IDS = {
    "<|endoftext|>": 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|vision_start|>": 3,
    "<|vision_end|>": 4,
    "<|image_pad|>": 5,
    "<|video_pad|>": 6,
}


def make_config() -> Qwen2_5_VLConfig:
    text = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=SPECIAL_IDS["<|im_end|>"],
        pad_token_id=SPECIAL_IDS["<|endoftext|>"],
    )
    vision = dict(
        depth=6,
        hidden_size=192,
        intermediate_size=512,
        num_heads=6,
        out_hidden_size=192,
        patch_size=PATCH_PX,
        spatial_merge_size=MERGE,
        temporal_patch_size=2,
        window_size=112,
        fullatt_block_indexes=[1, 3, 5],
        tokens_per_second=2,
    )
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=SPECIAL_IDS["<|image_pad|>"],
        video_token_id=SPECIAL_IDS["<|video_pad|>"],
        vision_start_token_id=SPECIAL_IDS["<|vision_start|>"],
        vision_end_token_id=SPECIAL_IDS["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def make_model() -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration(make_config())


def rms_norm(x, norm):
    return F.rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), norm.variance_epsilon)


def swiglu(x, mlp):
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def attend(q, k, v, mask):
    """In float32: the bfloat16 backward of this call is six times slower on a CPU."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)


def to_patches(frames):  # [B, F, H, W, 3] uint8 -> [B, h*w merged, 4, F*3*14*14] float, F is 1 or 2
    b, f, height, width, _ = frames.shape
    gh, gw = height // (PATCH_PX * MERGE), width // (PATCH_PX * MERGE)
    x = frames.float().mul_(2 / 255).sub_(1)
    x = x.view(b, f, gh, MERGE, PATCH_PX, gw, MERGE, PATCH_PX, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return x.reshape(b, gh * gw, MERGE * MERGE, 3 * f * PATCH_PX * PATCH_PX)


def patch_weight(visual, num_frames):
    weight = visual.patch_embed.proj.weight  # [D, 3, 2, 14, 14]
    return (weight.sum(2, keepdim=True) if num_frames == 1 else weight).flatten(1)


def vision_angles(gh, gw):  # cos, sin [gh*gw, 4, head_dim]
    rows = torch.arange(gh * MERGE).view(gh, 1, MERGE, 1).expand(gh, gw, MERGE, MERGE)
    cols = torch.arange(gw * MERGE).view(1, gw, 1, MERGE).expand(gh, gw, MERGE, MERGE)
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float) / 16))
    angles = torch.cat((rows.reshape(-1, 1) * inv_freq, cols.reshape(-1, 1) * inv_freq), -1)
    angles = torch.cat((angles, angles), -1).view(gh * gw, MERGE * MERGE, -1)
    return angles.cos(), angles.sin()


def to_windows(x, gh, gw):  # [B, gh*gw, ...] -> [B*n, 16, ...], padded with zeros
    tail = x.shape[2:]
    x = x.view(x.shape[0], gh, gw, -1)
    pad_h, pad_w = -gh % WINDOW_MERGED, -gw % WINDOW_MERGED
    if pad_h or pad_w:
        x = F.pad(x, (0, 0, 0, pad_w, 0, pad_h))
    b, h, w, d = x.shape
    x = x.view(b, h // WINDOW_MERGED, WINDOW_MERGED, w // WINDOW_MERGED, WINDOW_MERGED, d).transpose(2, 3)
    return x.reshape(-1, WINDOW_MERGED * WINDOW_MERGED, *tail)


def from_windows(x, b, gh, gw):
    tail = x.shape[2:]
    h, w = -(-gh // WINDOW_MERGED), -(-gw // WINDOW_MERGED)
    x = x.reshape(b, h, w, WINDOW_MERGED, WINDOW_MERGED, -1).transpose(2, 3)
    x = x.reshape(b, h * WINDOW_MERGED, w * WINDOW_MERGED, -1)[:, :gh, :gw]
    return x.reshape(b, gh * gw, *tail)


def vision_attention(x, attn, cos, sin, mask):  # x [N, L, D]
    n, length, dim = x.shape
    q, k, v = attn.qkv(x).view(n, length, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
    return attn.proj(out.transpose(1, 2).reshape(n, length, dim))


def encode(visual, frames):
    """Pictures of one size, or temporal patches of two frames, to merged tokens [B, gh*gw, D]."""
    b, num_frames, height, width, _ = frames.shape
    gh, gw = height // (PATCH_PX * MERGE), width // (PATCH_PX * MERGE)
    x = F.linear(to_patches(frames), patch_weight(visual, num_frames))  # [B, G, 4, D]
    dim = x.shape[-1]
    cos, sin = vision_angles(gh, gw)
    full = (cos.flatten(0, 1), sin.flatten(0, 1), None)
    windowed = None
    if gh > WINDOW_MERGED or gw > WINDOW_MERGED:
        parts = (to_windows(cos[None], gh, gw).flatten(1, 2), to_windows(sin[None], gh, gw).flatten(1, 2))
        inside = to_windows(torch.ones(1, gh * gw, 4, 1), gh, gw).flatten(1) > 0  # [n, 64]
        mask = None if inside.all() else torch.zeros(inside.shape).masked_fill_(~inside, -1e4)
        windowed = tuple(part.repeat(b, 1, 1)[:, None] for part in parts)
        windowed += (None if mask is None else mask.repeat(b, 1)[:, None, None, :].expand(-1, 1, 64, 64),)
    for index, block in enumerate(visual.blocks):
        h = rms_norm(x, block.norm1)
        if windowed is None or index in visual.fullatt_block_indexes:
            h = vision_attention(h.view(b, -1, dim), block.attn, *full).view_as(x)
        else:
            cos_w, sin_w, mask = windowed
            h = vision_attention(to_windows(h, gh, gw).flatten(1, 2), block.attn, cos_w, sin_w, mask)
            h = from_windows(h.view(-1, 16, 4, dim), b, gh, gw)
        x = x + h
        x = x + swiglu(rms_norm(x, block.norm2), block.mlp)
    return visual.merger.mlp(rms_norm(x, visual.merger.ln_q).view(b, gh * gw, 4 * dim))


def text_angles(rotary, position_ids):  # [3, B, L] -> cos, sin [B, 1, L, head_dim]
    cos, sin = rotary(torch.zeros((), dtype=torch.float), position_ids)
    return cos[:, None], sin[:, None]


def decode(language_model, x, position_ids, mask, tap_layers=(2, 3, 4), **aims):
    """Embeddings [B, L, D] through the language model; also the hidden states after each of `tap_layers`, and the
    losses of the attention that is told where to look."""
    cos, sin = text_angles(language_model.rotary_emb, position_ids)
    b, length, dim = x.shape
    taps, loss = [], 0.0
    for index, layer in enumerate(language_model.layers):
        attn = layer.self_attn
        h = rms_norm(x, layer.input_layernorm)
        q, k, v = (
            p(h).view(b, length, -1, attn.head_dim).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        groups = attn.num_key_value_groups
        k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q = rotate(q, cos, sin)
        loss = loss + told(index, q, k, mask, **aims)
        h = attend(q, k, v, mask)
        x = x + attn.o_proj(h.transpose(1, 2).reshape(b, length, dim))
        x = x + swiglu(rms_norm(x, layer.post_attention_layernorm), layer.mlp)
        if index + 1 in tap_layers:
            taps.append(x)
    return rms_norm(x, language_model.norm), taps, loss
