"""From a model's name to its two sides: `load_layout` for the front process, `load_served_model` for the engine.

The table below is the whole list of what is served; a family's module is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from triptych import zoo
from triptych.core.errors import InvalidRequest
from triptych.models.base import Layout, ModelInfo, ServedModel
from triptych.models.folder import ModelFolder, open_folder
from triptych.models.served import choose_device, choose_dtype, describe, load_stock

FAMILIES: dict[str, tuple[str, ...]] = {
    "text": (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
        "SmolLM3ForCausalLM",
        "Olmo2ForCausalLM",
        "Starcoder2ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Ministral3ForCausalLM",
    ),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration",),
    "idefics3": ("Idefics3ForConditionalGeneration",),
    "smolvlm": ("SmolVLMForConditionalGeneration",),
    "llava": ("LlavaForConditionalGeneration",),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration",),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "internvl": ("InternVLForConditionalGeneration",),
}
_MODULES = {architecture: module for module, names in FAMILIES.items() for architecture in names}


def list_supported() -> tuple[str, ...]:
    """Architectures as config.json names them, sorted."""
    return tuple(sorted(_MODULES))


def load_layout(name: str | Path, overrides: dict[str, Any] | None = None) -> Layout:
    """`name`: a folder, a hub name or an embedded model's name; `overrides`: processor parameters over the folder's.

    Raises UnknownModel, and InvalidRequest for an unsupported architecture or an unreadable folder.
    """
    folder = find_folder(name)
    layout: Layout = _family(folder).Layout(folder, overrides or {})
    return layout


def load_served_model(
    name: str | Path, dtype: str = "auto", device: str = "auto", tower_attention: str = "sdpa"
) -> ServedModel:
    """Load the weights. `tower_attention`: transformers' attention for the encoder. Raises as `load_layout` does."""
    folder = find_folder(name)
    served = _family(folder).Served
    chosen = choose_device(device)
    model = load_stock(folder, choose_dtype(folder, dtype, chosen), chosen)
    made: ServedModel = served(model, describe(folder, _embed_multiple(folder)), tower_attention)
    return made


def read_model_info(name: str | Path) -> ModelInfo:
    """What the configuration says of a model, without loading it: for the front process and `doctor`."""
    folder = find_folder(name)
    return describe(folder, _embed_multiple(folder))


def find_folder(name: str | Path) -> ModelFolder:
    """The opened folder of a supported architecture: an embedded model, a folder, or a hub name, in this order."""
    folder = open_folder(zoo.folder(str(name)) if str(name) in zoo.names() else name)
    _family(folder)
    return folder


def _embed_multiple(folder: ModelFolder) -> int:
    multiple = getattr(_family(folder), "embed_multiple", None)
    return multiple(folder.config) if multiple else 1


def _family(folder: ModelFolder) -> Any:
    module = _MODULES.get(folder.architecture)
    if module is None:
        raise InvalidRequest(
            f"architecture {folder.architecture or 'missing'!r} of {folder.path.name} is not supported; "
            f"supported are {', '.join(list_supported())}"
        )
    return import_module(f"triptych.models.{module}")
