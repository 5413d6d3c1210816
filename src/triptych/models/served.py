"""A stock transformers model, served: embeddings, one packed forward through paged attention, logits of chosen rows.

Base of every family's served side. A family adds how its tower is called (`encode_features`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from triptych.core.errors import InvalidRequest
from triptych.core.prepared import EncoderItem
from triptych.models.base import KvSpec, ModelInfo
from triptych.models.folder import ModelFolder
from triptych.models.paged_attention import ATTENTION_NAME, PagedBatch, register

WINDOW_EVERYWHERE = frozenset({"mistral", "phi3", "mixtral", "starcoder2"})  # sliding_window set: every layer has it
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})  # frequencies follow the longest sequence of the batch


class StockModel:
    """Owner of the weights, on one device, in one dtype. Called from the engine's thread under inference mode."""

    tower_name: str | None = None  # the stock model's own for its encoder; None for a text-only one

    def __init__(self, model: Any, info: ModelInfo, tower_attention: str = "sdpa") -> None:
        self.model = model
        self.info = info
        self.language = self.find_language(model)
        self.language.set_attn_implementation(ATTENTION_NAME)
        if self.tower is not None:
            self.tower.set_attn_implementation(tower_attention)
        for layer in self.encoder_layers()[:1]:
            layer.register_forward_pre_hook(_contiguous_rows, with_kwargs=True)
        self._table = self.language.get_input_embeddings()
        self._has_ids_past_table = _highest_media_id(model.config) >= self._table.num_embeddings
        self.head: nn.Module = model.get_output_embeddings()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = self.language.dtype
        self.softcap: float | None = getattr(self.language.config, "final_logit_softcapping", None)

    @staticmethod
    def find_language(model: Any) -> Any:
        """The decoder stack without its head."""
        inner = model.base_model
        return getattr(inner, "language_model", None) or getattr(inner, "text_model", None) or inner

    @property
    def tower(self) -> Any:
        """The encoder, or None for a text-only model."""
        return getattr(self.model.model, self.tower_name) if self.tower_name else None

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        raise NotImplementedError

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """Items of one `batch_key`, in one call. Each result: [num_embeds, embed_width] dtype device."""
        encoded = [rows.to(self.dtype) for rows in self.encode_features(items)]
        for item, rows in zip(items, encoded, strict=True):
            assert rows.shape == (item.num_embeds, self.info.embed_width), (rows.shape, item.num_embeds)
        return encoded

    def encoder_layers(self) -> list[nn.Module]:
        """The tower's layers in order: the edges at which an encode may pause. Empty for a text-only model."""
        return [] if self.tower is None else layers_of(self.tower)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, D]. Ids that stand for media may lie past the table: they read row 0."""
        if self._has_ids_past_table:
            token_ids = torch.where(token_ids < self._table.num_embeddings, token_ids, 0)
        embeds: torch.Tensor = self._table(token_ids)
        return embeds

    def forward(
        self,
        embeds: torch.Tensor,  # [T, D]
        positions: torch.Tensor,  # [A, T] int64
        batch: PagedBatch,
        media_rows: torch.Tensor | None = None,
        media_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Last hidden state [T, D]; keys and values go to the batch's paged cache."""
        output = self.language(
            inputs_embeds=embeds[None],
            position_ids=self.position_ids(positions),
            use_cache=False,
            paged=batch,
            **self.extra_inputs(embeds, media_rows, media_embeds),
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[:1]

    def extra_inputs(
        self, embeds: torch.Tensor, media_rows: torch.Tensor | None, media_embeds: torch.Tensor | None
    ) -> dict[str, Any]:
        return {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, V] float32."""
        logits: torch.Tensor = self.head(hidden).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def feature(self, item: EncoderItem, name: str) -> torch.Tensor:
        """One of the processor's outputs on the model's device; floats in the tower's dtype."""
        assert item.features is not None, "an item of precomputed embeddings reached the encoder"
        tensor = torch.from_numpy(item.features[name]).to(self.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _contiguous_rows(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Patch embeddings come out of a convolution transposed, and every later sum keeps that order: each norm and matrix
    product would copy its input (a twentieth of a SigLIP tower's time on the CPU)."""
    if args:
        return (args[0].contiguous(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].contiguous()}


def _highest_media_id(config: PreTrainedConfig) -> int:
    names = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "audio_token_index")
    return max((value for name in names if isinstance(value := getattr(config, name, None), int)), default=0)


def load_stock(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> Any:
    """The stock class of the folder's architecture, weights from safetensors, in evaluation mode."""
    register()
    folder.weight_files  # noqa: B018  refuses a folder of other formats
    _check_rope(folder.config.get_text_config())
    if "quantization_config" in folder.raw_config:
        method = folder.raw_config["quantization_config"].get("quant_method", "unnamed")
        raise InvalidRequest(f"{folder.path.name} holds weights quantised by {method}; float weights are served")
    kind = getattr(transformers, folder.architecture)
    try:
        model = kind.from_pretrained(
            folder.path,
            config=folder.config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            attn_implementation="eager",
        )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise InvalidRequest(f"weights of {folder.path.name} cannot be loaded: {error}") from error
    return model.to(device).eval()


def choose_dtype(folder: ModelFolder, name: str, device: torch.device) -> torch.dtype:
    """`auto` is the configuration's own, or float32 where the device only emulates that. Raises InvalidRequest."""
    is_auto = name == "auto"
    if is_auto:
        name = saved_dtype(folder)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise InvalidRequest(f"dtype {name!r} is not served; take auto, {', '.join(dtypes)}", param="dtype")
    return torch.float32 if is_auto and is_emulated(dtypes[name], device) else dtypes[name]


def saved_dtype(folder: ModelFolder) -> str:
    """What the configuration says the weights were saved in, else float32."""
    own = folder.config.dtype or getattr(folder.config.get_text_config(), "dtype", None)
    return "float32" if own is None else str(own).removeprefix("torch.")


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU has no instructions for products of `dtype`: torch then takes about 50 times as long as in
    float32 (bfloat16, AVX2, torch 2.13)."""
    if device.type != "cpu":
        return False
    probes = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in probes and not getattr(torch.ops.mkldnn, probes[dtype])()


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device {name!r} is not known to torch", param="device") from error


def describe(folder: ModelFolder, embed_multiple: int = 1) -> ModelInfo:
    """Everything about a model that its configuration says. Reads no weights but samples of them, for `revision`."""
    config = folder.config.get_text_config()
    return ModelInfo(
        architecture=folder.architecture,
        revision=folder.revision,
        hidden_size=config.hidden_size,
        embed_width=config.hidden_size * embed_multiple,
        vocab_size=config.vocab_size,
        max_tokens=int(getattr(config, "max_position_embeddings", 0) or 4096),
        kv=kv_specs(config),
        eos_token_ids=folder.eos_token_ids,
        num_params=folder.num_params,
    )


def kv_specs(config: PreTrainedConfig) -> tuple[KvSpec, ...]:
    """One a layer, from the configuration of a decoder stack."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        kind = "sliding_attention" if window and config.model_type in WINDOW_EVERYWHERE else "full_attention"
        layer_types = [kind] * config.num_hidden_layers
    return tuple(
        KvSpec(num_kv_heads, head_dim, window if kind == "sliding_attention" else None) for kind in layer_types
    )


def _check_rope(config: PreTrainedConfig) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = {str(own.get("rope_type")) for own in [parameters, *nested]}
    refused = sorted(kinds & BATCH_DEPENDENT_ROPE)
    if refused:
        raise InvalidRequest(f"rope type {refused[0]!r} depends on the longest sequence of a batch; it is not served")


def layers_of(tower: nn.Module) -> list[nn.Module]:
    """The transformer layers of a tower, wherever its class keeps them: the longest list of modules in it."""
    lists = [list(module) for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
