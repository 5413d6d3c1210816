"""Tiny wheels of the same make as small-vl's: a traced DINOv2 in ONNX, a packed Llama in GGUF, random weights."""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaForCausalLM

from tests.models.tokens import byte_tokenizer
from triptych.zoo.wheels import PinnedFile

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 64, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def shaken(model, seed: int):
    """Every tensor random, so that no two are alike and none may be swapped for another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def tiny_tower() -> Dinov2Model:
    sizes = dict(hidden_size=WIDTH, num_attention_heads=1, mlp_ratio=2, num_hidden_layers=LAYERS)
    return shaken(Dinov2Model(Dinov2Config(**sizes, image_size=42, patch_size=14, use_mask_token=False)), 1)


class Saliency(torch.nn.Module):
    """A backbone with something behind it, as in the package."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.decoder = backbone, torch.nn.Linear(WIDTH, 1)

    def forward(self, image):
        return self.decoder(self.backbone(image).last_hidden_state)


def write_onnx(path: Path, tower: Dinov2Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracing exporter is deprecated, and made the real file
        torch.onnx.export(Saliency(tower), (torch.zeros(1, 3, 28, 28),), str(path), dynamo=False, opset_version=17)


def tiny_language_model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return shaken(LlamaForCausalLM(config), 2)


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of a rotary layer's rows: halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: LlamaForCausalLM, tokens: list[str], merges: list[str]) -> None:
    """The model in Q4_1. Its own matrices become what Q4_1 keeps of them, so that a reader has to find just these."""
    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    for name, parameter in model.model.named_parameters():
        _add(writer, name, parameter)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer, name: str, parameter: torch.nn.Parameter) -> None:
    weight = parameter.detach().numpy()
    if name.startswith("layers."):
        _, layer, middle = name.removesuffix(".weight").split(".", 2)
        packed_name = f"blk.{layer}.{NAMES[middle]}.weight"
    else:
        packed_name = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
    if weight.ndim == 1:
        writer.add_tensor(packed_name, weight)
        return
    kind = gguf.GGMLQuantizationType.Q4_1
    kept = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    parameter.data = torch.from_numpy(kept.copy())
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(packed_name.split(".")[-2])
    packed = gguf.quants.quantize(interleaved(weight, heads) if heads else weight, kind)
    writer.add_tensor(packed_name, packed, raw_dtype=kind)


def vocabulary() -> tuple[list[str], list[str]]:
    """Special tokens first, as SmolLM2 has them; then bytes and merges."""
    core = byte_tokenizer((), {}).backend_tokenizer
    vocab = core.get_vocab(False)
    tokens = [*SPECIAL, *sorted((token for token in vocab if token not in SPECIAL), key=vocab.__getitem__)]
    merges = [" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    return tokens, merges


def write_wheel(folder: Path, package: str, member: str, data: bytes, extra: dict[str, bytes] | None = None):
    """A wheel of one data file and a module that leaves a mark when it is imported; its pin."""
    name = package.replace("-", "_")
    mark = folder / "was-run"
    code = f"open({str(mark)!r}, 'w').close()\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in {f"{name}/__init__.py": code, "setup.py": code, member: data, **(extra or {})}.items():
            archive.writestr(inside, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    return PinnedFile(
        package,
        "1.0",
        hashlib.sha256(path.read_bytes()).hexdigest(),
        member,
        hashlib.sha256(data).hexdigest(),
        len(data),
    )


def write_trained(folder: Path, tower_width: int = WIDTH) -> dict[str, torch.Tensor]:
    """A random projector and a low-rank change of one layer; returns both."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"linear_1": (WIDTH, tower_width), "linear_2": (WIDTH, WIDTH)}
    projector = {f"{name}.weight": torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    projector |= {f"{name}.bias": torch.randn(WIDTH, generator=generator) / 8 for name in shapes}
    layer = "layers.1.self_attn.k_proj"
    rows = KV_HEADS * WIDTH // HEADS
    change = {
        f"{layer}.up": torch.randn(rows, 3, generator=generator).half(),
        f"{layer}.down": torch.randn(3, WIDTH, generator=generator).half() / 8,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(projector, folder / "projector.safetensors")
    save_file(change, folder / "low_rank.safetensors")
    (folder / "README.md").write_text("# a card\n")
    return projector | change
