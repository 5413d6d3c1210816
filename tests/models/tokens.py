"""Tiny tokenizers made in the test: byte-level, with the special tokens and the template a family needs."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("\n\n", "how", " how", "many", " many", "red", " red", "is", " is", "the", " the", "user", "assistant")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in media %}{{ media[part['type']] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    special: tuple[str, ...], media: dict[str, str], *, bos: str | None = None, **named: str
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes and a few merges. `media`: what the chat template writes for each kind of part."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        symbols = list(word.replace(" ", "Ġ").replace("\n", "Ċ"))
        while len(symbols) > 1:
            joined = symbols[0] + symbols[1]
            if joined not in vocab:
                vocab[joined] = len(vocab)
                merges.append((symbols[0], symbols[1]))
            symbols[:2] = [joined]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        extra_special_tokens=named,
    )
    table = "{% set media = " + repr(media) + " %}"
    tokenizer.chat_template = table + CHATML
    return tokenizer
