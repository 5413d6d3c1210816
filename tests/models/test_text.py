"""Text-only families: packed and paged equals `generate`, and folders that cannot be served say why."""

import json

import pytest
import torch
import transformers

from triptych.core.errors import InvalidRequest, UnknownModel
from triptych.models.registry import FAMILIES, list_supported, load_layout, load_served_model, read_model_info

from .folders import TINY_TEXT, spread_weights, stock_greedy, write_folder
from .packed import Prompt, first_logits, run_greedy
from .tokens import byte_tokenizer

COMMON = TINY_TEXT | dict(head_dim=8, max_position_embeddings=512, bos_token_id=None)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
EXTRA = {
    "MistralForCausalLM": dict(sliding_window=7),
    "Gemma2ForCausalLM": dict(sliding_window=6, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "Gemma3ForCausalLM": dict(sliding_window=6),
    "MixtralForCausalLM": dict(num_local_experts=3, num_experts_per_tok=2),
    "Qwen2MoeForCausalLM": MOE | dict(shared_expert_intermediate_size=24),
    "Qwen3MoeForCausalLM": MOE,
    "Starcoder2ForCausalLM": dict(sliding_window=9),
    "Phi3ForCausalLM": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
}


def tiny(architecture, **changes):
    kind = getattr(transformers, architecture)
    tokenizer = byte_tokenizer((), {})
    ids = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = kind.config_class(**COMMON | ids | EXTRA.get(architecture, {}) | changes)
    return spread_weights(kind(config)), tokenizer


@pytest.mark.parametrize("architecture", FAMILIES["text"])
def test_packed_greedy_equals_generate(architecture, tmp_path):
    """Three prompts in one packed batch, whole and in chunks of five: the tokens of `generate`, each alone."""
    model, tokenizer = tiny(architecture)
    folder = write_folder(tmp_path, model, tokenizer)
    texts = ["how many red", "the", "is the red user how many assistant"]
    prompts = [tokenizer.encode(text) for text in texts]
    expected = [stock_greedy(model, 10, input_ids=torch.tensor([ids])) for ids in prompts]

    layout, served = load_layout(folder), load_served_model(folder, "float32", "cpu")
    packed = [Prompt(layout.expand(ids, [])) for ids in prompts]

    assert expected == run_greedy(served, packed, 10)
    assert expected == run_greedy(served, packed, 10, chunk=5)
    assert len({token for tokens in expected for token in tokens}) > 1
    with torch.inference_mode():
        exact = model(torch.tensor([prompts[0]])).logits[0, -1].float()
    assert torch.allclose(exact, first_logits(served, packed[0]), atol=1e-4)


def test_info_describes_the_folder(tmp_path):
    """Sizes, windows and end tokens come from the configuration; the revision moves with the weights."""
    model, tokenizer = tiny("Gemma3ForCausalLM")
    folder = write_folder(tmp_path, model, tokenizer)
    before = read_model_info(folder)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(folder)
    after = read_model_info(folder)

    assert (32, 32, 512, len(tokenizer)) == (
        before.hidden_size,
        before.embed_width,
        before.max_tokens,
        before.vocab_size,
    )
    assert {6, None} >= {spec.window_tokens for spec in before.kv}
    assert (tokenizer.eos_token_id,) == before.eos_token_ids
    assert before.revision != after.revision


def test_unknown_architecture_lists_supported(tmp_path):
    """The error names the architecture at fault and what is supported."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))

    with pytest.raises(InvalidRequest, match="MambaForCausalLM") as raised:
        load_layout(tmp_path)

    assert all(name in raised.value.message for name in list_supported())


def test_neither_folder_nor_hub_name_is_unknown(tmp_path):
    """A path that does not exist and is no hub name is UnknownModel."""
    with pytest.raises(UnknownModel):
        load_layout(tmp_path / "absent")


def test_pickled_weights_are_refused(tmp_path):
    """A folder with pytorch_model.bin alone is refused before anything of it is read."""
    model, tokenizer = tiny("LlamaForCausalLM")
    folder = write_folder(tmp_path, model, tokenizer)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(InvalidRequest, match="safetensors"):
        load_served_model(folder)


def test_quantised_weights_are_refused(tmp_path):
    """The error names the method."""
    model, tokenizer = tiny("LlamaForCausalLM")
    folder = write_folder(tmp_path, model, tokenizer)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(InvalidRequest, match="awq"):
        load_served_model(folder)


def test_batch_dependent_rope_is_refused(tmp_path):
    """Dynamic NTK frequencies follow the longest sequence of the batch, so they are not served."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model, tokenizer = tiny("LlamaForCausalLM", rope_parameters=rope)
    folder = write_folder(tmp_path, model, tokenizer)

    with pytest.raises(InvalidRequest, match="dynamic"):
        load_served_model(folder)
