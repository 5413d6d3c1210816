"""A DINOv2 backbone out of an ONNX graph that was traced from transformers' Dinov2: tensors and configuration.

The graph keeps transformers' names for what was not folded (`backbone.encoder.layer.3.norm1.weight`). A linear layer's
weight lost its name and was transposed: the node that multiplies by it still has the path of its module. The two parts
of the position embedding are known by their place: the initializers that the nodes of the embeddings join and reshape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from triptych.core.errors import InvalidMedia

LAYER = "encoder.layer."


def read_backbone(path: Path, prefix: str = "backbone") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors under transformers' Dinov2Model names, arguments of Dinov2Config), float32.

    `prefix` is the backbone's place in the graph; what lies outside it is left out. Nothing of the graph is run, and no
    other file is read for it. Raises InvalidMedia where a part is missing.
    """
    import onnx  # of the extra `zoo`
    from onnx import numpy_helper

    graph = onnx.load(str(path), load_external_data=False).graph
    held = {tensor.name: tensor for tensor in graph.initializer}

    def array(name: str) -> torch.Tensor:
        if held[name].data_location == onnx.TensorProto.EXTERNAL:
            raise InvalidMedia(f"{path.name}: {name} lies in another file")
        return torch.from_numpy(numpy_helper.to_array(held[name]).copy())

    named = {name.removeprefix(prefix + "."): array(name) for name in held if name.startswith(prefix + ".")}
    for node in graph.node:
        module = node.name.removeprefix(f"/{prefix}/").rsplit("/", 1)[0].replace("/", ".")
        weights = [name for name in node.input if name in held and not name.startswith(prefix + ".")]
        if node.op_type == "MatMul" and node.name.startswith(f"/{prefix}/") and weights:
            named[f"{module}.weight"] = array(weights[0]).T.contiguous()
    class_position, places = _positions(graph.node, held, prefix)
    named["embeddings.position_embeddings"] = torch.cat((array(class_position), array(places)), dim=1)
    return named, _config(named, path)


def _positions(nodes: Any, held: dict[str, Any], prefix: str) -> tuple[str, str]:
    """Names of the class token's position [1, 1, D] and of the patches' [1, N, D]."""
    found: dict[str, str] = {}
    for node in nodes:
        if node.name.startswith(f"/{prefix}/embeddings/") and node.op_type in ("Concat", "Reshape"):
            for name in node.input:
                if name in held and len(held[name].dims) == 3 and not name.startswith(prefix + "."):
                    found.setdefault("class" if held[name].dims[1] == 1 else "places", name)
    if len(found) != 2:
        raise InvalidMedia(f"no position embeddings of a class token and of patches under /{prefix}/embeddings")
    return found["class"], found["places"]


def _config(named: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """Sizes read off the tensors; a DINOv2 head is 64 wide."""
    projection = named.get("embeddings.patch_embeddings.projection.weight")
    layers = {name.split(".")[2] for name in named if name.startswith(LAYER)}
    if projection is None or not layers or f"{LAYER}0.mlp.fc1.weight" not in named:
        raise InvalidMedia(f"{path.name} holds no DINOv2 backbone")
    hidden, patch_px = projection.shape[0], projection.shape[-1]
    side = round((named["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    return dict(
        hidden_size=hidden,
        num_hidden_layers=len(layers),
        num_attention_heads=max(hidden // 64, 1),
        mlp_ratio=named[f"{LAYER}0.mlp.fc1.weight"].shape[0] // hidden,
        patch_size=patch_px,
        image_size=side * patch_px,
        use_mask_token=False,
    )
