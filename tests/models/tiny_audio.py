"""A tiny random Qwen2-Audio: model, tokenizer, extractor."""

from transformers import PreTrainedTokenizerFast, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from .folders import TINY_TEXT, spread_weights
from .tokens import byte_tokenizer

RATE = 16_000
SECONDS = 2
AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": SECONDS}


def tiny_audio() -> tuple[Qwen2AudioForConditionalGeneration, PreTrainedTokenizerFast]:
    words = byte_tokenizer(("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"), {"audio": AUDIO})
    config = Qwen2AudioConfig(
        text_config=TINY_TEXT
        | dict(
            model_type="qwen2",
            vocab_size=len(words),
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        ),
        audio_config=dict(
            num_mel_bins=16,
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=48,
            max_source_positions=SECONDS * 50,
        ),
        audio_token_index=words.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return spread_weights(Qwen2AudioForConditionalGeneration(config)), words
