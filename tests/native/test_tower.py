"""A vision tower's layers, natively: as near to float32 as the stock ones, and still pausable at every edge."""

import copy

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, Idefics3VisionConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from tests.native.decoders import distance
from triptych.models.native import NativeUnavailable
from triptych.models.native.structs import FLOATS, PAIRS, PRODUCT_NAMES, TILES
from triptych.models.native.tower import NativeTower
from triptych.models.paged_attention import register

COMMON = dict(
    hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=3, image_size=112, patch_size=16
)


def idefics3() -> torch.nn.Module:
    return Idefics3VisionTransformer(Idefics3VisionConfig(**COMMON))


def siglip() -> torch.nn.Module:
    return SiglipVisionModel(SiglipVisionConfig(**COMMON, vision_use_head=False))


def clip() -> torch.nn.Module:
    """Another activation, and one token more than the patches."""
    return CLIPVisionModel(CLIPVisionConfig(**COMMON))


def layers_of(tower: torch.nn.Module) -> list[torch.nn.Module]:
    return next(list(m) for m in tower.modules() if isinstance(m, torch.nn.ModuleList))


def make(kind, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One tower in `dtype`, and the same weights in float64; norms and biases not as drawn."""
    register()
    torch.manual_seed(0)
    rounded = kind().eval()
    for name, parameter in rounded.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    rounded.to(dtype)
    return rounded, copy.deepcopy(rounded).double()


def native(layers: list[torch.nn.Module], products: int) -> NativeTower:
    tower = NativeTower(layers, products=products)
    if tower.products != products:
        pytest.skip(f"this CPU has no {PRODUCT_NAMES[products]}")
    return tower


def siglip_of_odd_sizes() -> torch.nn.Module:
    """Heads of 24 and inner layers of 150, as So400m's 72 and 4304 are no multiples of the kernels' blocks."""
    odd = COMMON | dict(num_attention_heads=4, intermediate_size=150)
    return SiglipVisionModel(SiglipVisionConfig(**odd, vision_use_head=False))


KERNELS = {
    "float32": (torch.float32, FLOATS),
    "bfloat16": (torch.bfloat16, FLOATS),
    "pairs": (torch.bfloat16, PAIRS),
    "tiles": (torch.bfloat16, TILES),
}
each_kernel = pytest.mark.parametrize(("dtype", "products"), KERNELS.values(), ids=KERNELS.keys())


@pytest.mark.usefixtures("kernels")
@each_kernel
@pytest.mark.parametrize("kind", [idefics3, siglip, clip, siglip_of_odd_sizes])
def test_tower_is_as_near_to_float64_as_stock(kind, dtype, products):
    """Three pictures in one batch: the kernels' error is at most 1.2 times the stock layers' own (twice in float32,
    where both are a matter of the order of sums)."""
    stock, exact = make(kind, dtype)
    pixels = torch.randn(3, 3, 112, 112).to(dtype)
    with torch.inference_mode():
        expected = exact(pixel_values=pixels.double()).last_hidden_state
        stock_error = distance(stock(pixel_values=pixels).last_hidden_state, expected)
        native(layers_of(stock), products).install()
        native_error = distance(stock(pixel_values=pixels).last_hidden_state, expected)

    assert native_error != stock_error  # the kernels did run
    assert 0 < native_error <= (2 if dtype == torch.float32 else 1.2) * stock_error


@pytest.mark.usefixtures("kernels")
@each_kernel
@pytest.mark.parametrize("tokens", [1, 6, 15, 16, 17, 24, 32, 33, 100, 257])
def test_pictures_of_any_length_do_not_see_one_another(tokens, dtype, products):
    """Each of a batch's pictures gives to the bit what it gives alone, whatever its number of tokens."""
    stock, _ = make(idefics3, dtype)
    tower = native(layers_of(stock), products)
    x = torch.randn(3, tokens, 96).to(dtype)
    spoiled = x.clone()
    spoiled[1] = float("nan")

    together = tower.layer(0, x)
    assert all(torch.equal(tower.layer(0, x[i : i + 1])[0], together[i]) for i in range(3))
    assert torch.equal(tower.layer(0, spoiled)[[0, 2]], together[[0, 2]])


@pytest.mark.usefixtures("kernels")
@each_kernel
def test_wide_layers_are_cut_without_a_seam(dtype, products):
    """Wider and longer than a stretch of columns, depth and rows, whose parts three threads take in turns."""
    wide = COMMON | dict(hidden_size=832, intermediate_size=1600, num_hidden_layers=1, num_attention_heads=13)
    stock, exact = make(lambda: Idefics3VisionTransformer(Idefics3VisionConfig(**wide)), dtype)
    x = torch.randn(1, 401, 832).to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        actual = native(layers_of(stock), products).layer(0, x)
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        expected = layers_of(exact)[0](x.double(), attention_mask=None)

        stock_error = distance(layers_of(stock)[0](x, attention_mask=None), expected)

    assert distance(actual, expected) <= (1e-6 if dtype == torch.float32 else 1.2 * stock_error)


@pytest.mark.usefixtures("kernels")
def test_hooks_at_layer_edges_still_run():
    """A forward pre-hook on each layer is called once a layer, as the pausable encoder needs."""
    stock, _ = make(idefics3, torch.float32)
    layers = layers_of(stock)
    NativeTower(layers).install()
    seen = []
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    with torch.inference_mode():
        stock(pixel_values=torch.randn(1, 3, 112, 112))

    assert seen == [0, 1, 2]


@pytest.mark.usefixtures("kernels")
def test_a_masked_call_takes_the_stock_layer():
    """A padded picture comes with a mask, which the kernel does not know."""
    stock, _ = make(idefics3, torch.float32)
    layers = layers_of(stock)
    x = torch.randn(1, 20, 96)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[..., 12:] = False
    with torch.inference_mode():
        expected = layers[0](x, attention_mask=mask)
        NativeTower(layers).install()

        assert torch.equal(layers[0](x, attention_mask=mask), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(hidden_act="gelu"), "activation"),
        (dict(hidden_size=72), "width is 72"),
        (dict(hidden_size=800, num_attention_heads=2), "head_dim is 400"),
    ],
)
def test_unknown_towers_are_refused_with_the_reason(change, reason):
    """An activation or a size the kernel does not compute is named, and the layers stay as they were."""
    tower = Idefics3VisionTransformer(Idefics3VisionConfig(**COMMON | change))
    with pytest.raises(NativeUnavailable, match=reason):
        NativeTower(layers_of(tower))
