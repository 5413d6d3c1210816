"""The native decoder computes what the stock modules compute, whatever shares the batch."""

import copy

import pytest
import torch

from tests.models.packed import Prompt, run_greedy
from tests.native.decoders import KINDS, distance, llama, mistral, noise, pools, run, serve
from triptych.models.base import Expanded
from triptych.models.native import accelerate
from triptych.models.native.choose import Accelerated, Choice
from triptych.models.native.decoder import NativeDecoder, NativeLinear
from triptych.models.native.structs import FLOATS, PAIRS, PRODUCT_NAMES, TILES
from triptych.models.paged_attention import SequenceStep

pytestmark = pytest.mark.usefixtures("kernels")
NUM_BLOCKS = 40


def scattered(seed: int, count: int) -> list[list[int]]:
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i::count] for i in range(count)]


def script() -> list[list[SequenceStep]]:
    """Prefill of three, decode of three, decode beside two prefill chunks, one row alone."""
    a, b, c = scattered(1, 3)
    return [
        [SequenceStep(a, 0, 37), SequenceStep(b, 0, 1), SequenceStep(c, 0, 50)],
        [SequenceStep(a, 37, 1), SequenceStep(b, 1, 1), SequenceStep(c, 50, 1)],
        [SequenceStep(a, 38, 1), SequenceStep(b, 2, 33), SequenceStep(c, 51, 2)],
        [SequenceStep(b, 35, 1)],
    ]


def fast(served, products: int = TILES) -> Accelerated:
    decoder = NativeDecoder(served.language, products=products)
    return Accelerated(served, decoder, NativeLinear(served.head, products=products), Choice("native", ""))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_greedy_tokens_equal_eager(kind):
    """Four prompts, packed, in chunks: the stock modules' tokens."""
    torch.manual_seed(0)
    served = serve(kind())
    prompts = [Prompt(Expanded(torch.randint(1, 157, (n,)).tolist(), ())) for n in (17, 1, 40, 9)]
    accelerated, choice = accelerate(served, "native")

    assert choice.runner == "native"
    for chunk in (10_000, 7):
        assert run_greedy(served, prompts, 12, chunk) == run_greedy(accelerated, prompts, 12, chunk)


def test_float32_weights_that_fit_bfloat16_are_kept_in_it():
    """Half the bytes, float32's result: one rounding of an element, and the weights stay as they are."""
    torch.manual_seed(0)
    served = serve(llama().bfloat16().float())
    narrow = fast(served)
    assert narrow._decoder.is_narrow
    kv = pools(served, NUM_BLOCKS), pools(served, NUM_BLOCKS)
    with torch.inference_mode():
        for steps in script():
            embeds = noise(served, steps)
            expected = run(served, kv[0], steps, embeds)
            actual = run(narrow, kv[1], steps, embeds)
            assert distance(actual, expected) < 1e-5
            assert distance(narrow.logits(actual), served.logits(expected)) < 1e-5

        served.language.layers[-1].mlp.down_proj.weight[0, 0] += 1e-5
    assert not fast(served)._decoder.is_narrow


@pytest.mark.parametrize("products", [FLOATS, PAIRS, TILES])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_near_to_float32_as_eager(kind, products):
    """Against the same weights in float32, the kernels' error is at most 1.2 times the stock modules' own."""
    torch.manual_seed(0)
    exact = serve(kind())
    rounded = copy.deepcopy(exact.model).to(torch.bfloat16)
    exact.model.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    stock = exact.__class__(rounded, exact.info)
    native = fast(stock, products)
    if native._decoder.products != products:
        pytest.skip(f"this CPU has no {PRODUCT_NAMES[products]}")
    kv = [pools(exact, NUM_BLOCKS), pools(stock, NUM_BLOCKS), pools(stock, NUM_BLOCKS)]

    with torch.inference_mode():
        for steps in script():
            embeds = noise(stock, steps)
            expected = run(exact, kv[0], steps, embeds.float())
            eager_error = distance(run(stock, kv[1], steps, embeds), expected)
            native_error = distance(run(native, kv[2], steps, embeds), expected)
            assert native_error <= 1.2 * eager_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32])
def test_block_size_changes_nothing(dtype, block_size):
    """Scattered blocks of any size hold the same sequence, so the result is the same to the bit."""
    torch.manual_seed(0)
    served = serve(llama().to(dtype))
    native = fast(served)
    whole = [SequenceStep([0, 1], 0, 45)], [SequenceStep([0, 1], 45, 1)]
    num_blocks = -(-46 // block_size)
    table = torch.randperm(num_blocks).tolist()
    cut = [SequenceStep(table, 0, 45)], [SequenceStep(table, 45, 1)]
    kv, small = pools(served, 2, 32), pools(served, num_blocks, block_size)

    with torch.inference_mode():
        for one, other in zip(whole, cut, strict=True):
            embeds = noise(served, one)
            assert torch.equal(run(native, kv, one, embeds), run(native, small, other, embeds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_who_shares_the_batch(dtype):
    """One decode row among 1 to 16 others, on a long context: its hidden state is the same to the bit."""
    torch.manual_seed(0)
    served = serve(llama().to(dtype))
    native = fast(served)
    kv = pools(served, 17 * 40)
    for pool in (*kv.keys, *kv.values):
        pool.normal_()
    steps = [SequenceStep(list(range(i, 17 * 40, 17)), 600 - 30 * i, 1) for i in range(17)]

    with torch.inference_mode():
        embeds = noise(served, steps)
        alone = run(native, kv, steps[:1], embeds[:1])
        for count in (2, 3, 8, 16, 17):
            assert torch.equal(alone[0], run(native, kv, steps[:count], embeds[:count])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_are_split_and_joined(dtype):
    """A context of several splits, with a window that skips the first ones, agrees with the stock modules."""
    for kind, bound in ((llama, 0.02), (mistral, 0.02)):
        torch.manual_seed(0)
        served = serve(kind().to(dtype))
        native = fast(served)
        kv = pools(served, 100)
        for pool in (*kv.keys, *kv.values):
            pool.normal_()
        steps = [SequenceStep(list(range(100)), 1500, 1), SequenceStep(list(range(99, -1, -1)), 511, 1)]
        with torch.inference_mode():
            embeds = noise(served, steps)
            assert distance(run(native, kv, steps, embeds), run(served, kv, steps, embeds)) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_spans_attend_both_ways(dtype):
    """A span that must be seen whole is seen whole, also under a window and beside a decode row."""
    torch.manual_seed(0)
    served = serve(mistral().to(dtype))
    native = fast(served)
    a, b = scattered(2, 2)
    script = [
        [SequenceStep(a, 0, 40, whole=((3, 21), (25, 30))), SequenceStep(b, 0, 6)],
        [SequenceStep(b, 6, 1), SequenceStep(a, 40, 12, whole=((41, 50),))],
    ]
    kv = pools(served, NUM_BLOCKS), pools(served, NUM_BLOCKS)

    with torch.inference_mode():
        for steps in script:
            embeds = noise(served, steps)
            expected = run(served, kv[0], steps, embeds)
            assert distance(run(native, kv[1], steps, embeds), expected) < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_bad_row_spoils_only_its_sequence():
    """NaN in one sequence's embeddings leaves every other sequence's result as it was."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        served = serve(llama().to(dtype))
        native = fast(served)
        a, b, c = scattered(3, 3)
        steps = [SequenceStep(a, 0, 1), SequenceStep(b, 0, 9), SequenceStep(c, 0, 20)]
        with torch.inference_mode():
            embeds = noise(served, steps)
            expected = run(native, pools(served, NUM_BLOCKS), steps, embeds)
            embeds[3] = float("nan")
            actual = run(native, pools(served, NUM_BLOCKS), steps, embeds)

        good = [0, *range(10, 30)]
        assert torch.equal(expected[good], actual[good])
        assert bool(actual[3].isnan().any())


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (5, torch.bfloat16), (40, torch.bfloat16)])
def test_head_gives_float32_logits(rows, dtype):
    """The head's logits are those of the same product in float32."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 157).to(dtype)
    x = torch.randn(rows, 96).to(dtype)
    with torch.inference_mode():
        expected = x.float() @ linear.weight.float().T + linear.bias.float()

        for products in (FLOATS, PAIRS, TILES):  # or the best that this CPU has
            torch.testing.assert_close(NativeLinear(linear, products=products)(x), expected, rtol=1e-5, atol=1e-5)
