"""Small random diffusers folders, one of each kind served, for tests and the simulator. No download, seconds to make.

The pictures are noise, but every stage runs: tokenizers, encoders, denoiser, scheduler and VAE are stock classes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

WIDTH = 32  # of every text encoder here
MAX_TEXT_TOKENS = 77


def _still(module: Any) -> Any:
    """In evaluation mode. The models of diffusers do not say that they are modules."""
    return module.eval()


def make_diffusion_folder(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a toy of `kind` (a key of `TOYS`) and return `folder`. The caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = TOYS[kind]()
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _clip_tokenizer() -> CLIPTokenizer:
    letters = sorted(ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*letters, *(letter + "</w>" for letter in letters)])}
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=MAX_TEXT_TOKENS)


def _clip_config(**changes: Any) -> CLIPTextConfig:
    tokenizer = _clip_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=WIDTH,
        max_position_embeddings=MAX_TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **changes,
    )


def _t5_tokenizer(max_tokens: int = MAX_TEXT_TOKENS) -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_tokens)


def _t5() -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=128, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)).eval()


def _vae(latent_channels: int = 4, **changes: Any) -> AutoencoderKL:
    return _still(
        AutoencoderKL(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=latent_channels,
            norm_num_groups=8,
            sample_size=32,
            **changes,
        )
    )


def _unet(**changes: Any) -> UNet2DConditionModel:
    return _still(
        UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            norm_num_groups=8,
            **changes,
        )
    )


def _stable_diffusion() -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=CLIPTextModel(_clip_config()).eval(),
        tokenizer=_clip_tokenizer(),
        unet=_unet(cross_attention_dim=WIDTH),
        scheduler=DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _stable_diffusion_xl() -> StableDiffusionXLPipeline:
    unet = _unet(
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=CLIPTextModel(_clip_config()).eval(),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config()).eval(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        add_watermarker=False,
    )


def _stable_diffusion_3() -> StableDiffusion3Pipeline:
    transformer = _still(
        SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=16,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=2 * WIDTH,
            out_channels=16,
            pos_embed_max_size=64,
        )
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(16, shift_factor=0.06),
        text_encoder=CLIPTextModelWithProjection(_clip_config(hidden_act="gelu")).eval(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(hidden_act="gelu")).eval(),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _flux() -> FluxPipeline:
    transformer = _still(
        FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        )
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(shift_factor=0.1),
        text_encoder=CLIPTextModel(_clip_config()).eval(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_t5_tokenizer(),
        transformer=transformer,
    )


def _pixart() -> PixArtSigmaPipeline:
    transformer = _still(
        PixArtTransformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            caption_channels=WIDTH,
        )
    )
    return PixArtSigmaPipeline(
        tokenizer=_t5_tokenizer(300),
        text_encoder=_t5(),
        vae=_vae(),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )


def _qwen_image() -> QwenImagePipeline:
    letters = sorted(ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    vocab |= {"<|endoftext|>": len(vocab), "<|im_start|>": len(vocab) + 1, "<|im_end|>": len(vocab) + 2}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(vocab) + 8,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        ),
        vision_config=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=WIDTH),
    )
    transformer = _still(
        QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 4, 8),
        )
    )
    vae = _still(
        AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1, 0.0, -0.1, 0.2],
            latents_std=[1.0, 1.1, 0.9, 1.2],
        )
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _wan() -> WanPipeline:
    transformer = _still(
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=3,
            rope_max_seq_len=64,
        )
    )
    vae = _still(
        AutoencoderKLWan(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, 0.0, -0.1, 0.2],
            latents_std=[1.0, 1.1, 0.9, 1.2],
        )
    )
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=128, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ).eval()
    return WanPipeline(
        tokenizer=_t5_tokenizer(),
        text_encoder=encoder,
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=transformer,
    )


def _ltx() -> LTXPipeline:
    transformer = _still(
        LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=3,
            caption_channels=WIDTH,
        )
    )
    vae = _still(
        AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        )
    )
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(128),
        transformer=transformer,
    )


TOYS: dict[str, Callable[[], Any]] = {
    "stable_diffusion": _stable_diffusion,
    "stable_diffusion_xl": _stable_diffusion_xl,
    "stable_diffusion_3": _stable_diffusion_3,
    "flux": _flux,
    "pixart": _pixart,
    "qwen_image": _qwen_image,
    "wan": _wan,
    "ltx": _ltx,
}
