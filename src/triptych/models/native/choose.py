"""Choose the runner of a served model: `eager` (stock modules), `native` (the kernels, or an error) or `auto`.

A choice for the kernels is checked before it is taken: a small batch of prefill and decode runs both ways, and a
difference beyond rounding refuses the kernels rather than serve a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from triptych.core.errors import InvalidRequest
from triptych.core.prepared import EncoderItem
from triptych.models.base import ServedModel
from triptych.models.native.build import NativeUnavailable
from triptych.models.native.decoder import NativeDecoder, NativeLinear
from triptych.models.native.rotary import RotaryTable
from triptych.models.native.structs import PRODUCT_NAMES
from triptych.models.native.tower import NativeTower
from triptych.models.paged_attention import PagedBatch, PagedKv, SequenceStep, build_batch
from triptych.models.served import StockModel

RUNNERS = ("auto", "eager", "native")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # relative distance of the check's hidden states
CHECK_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """What `triptych doctor` says: `runner` and `tower` are eager or native, the reasons why, in one sentence each."""

    runner: str
    reason: str
    tower: str = "eager"
    tower_reason: str = ""


class Accelerated:
    """A `ServedModel` whose language part runs natively; everything else is the wrapped model's."""

    def __init__(self, served: StockModel, decoder: NativeDecoder, head: NativeLinear | None, choice: Choice) -> None:
        self.choice = choice
        self._served = served
        self._decoder = decoder
        self._head = head
        self._rotary = RotaryTable(served.language.rotary_emb, served.position_ids)
        self.info, self.device, self.dtype = served.info, served.device, served.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        return self._served.encode(items)

    def encoder_layers(self) -> list[torch.nn.Module]:
        return self._served.encoder_layers()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._served.embed(token_ids)

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        media_rows: torch.Tensor | None = None,
        media_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `ServedModel.forward`. A batch with inputs of its family's own (deepstack) takes the stock modules."""
        if self._served.extra_inputs(embeds, media_rows, media_embeds):
            return self._served.forward(embeds, positions, batch, media_rows, media_embeds)
        cos, sin = self._rotary(positions)
        return self._decoder.forward(embeds, cos, sin, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            return self._served.logits(hidden)
        return self._head(hidden)


def accelerate(served: ServedModel, runner: str = "auto") -> tuple[ServedModel, Choice]:
    """The served model to use, and the choice made. Raises InvalidRequest: an unknown runner, or `native` where the
    kernels cannot serve this model here."""
    if runner not in RUNNERS:
        raise InvalidRequest(f"runner {runner!r} is not known; take {', '.join(RUNNERS)}", param="runner")
    if runner == "eager":
        return served, Choice("eager", "asked for", tower_reason="asked for")
    try:
        fast = _native(served)
    except NativeUnavailable as error:
        if runner == "native":
            raise InvalidRequest(f"runner native cannot serve this model here: {error}", param="runner") from error
        return served, _with_tower(served, Choice("eager", str(error)))
    fast.choice = _with_tower(served, fast.choice)
    return fast, fast.choice


def _native(served: ServedModel) -> Accelerated:
    if not isinstance(served, StockModel) or type(served).forward is not StockModel.forward:
        raise NativeUnavailable(f"{type(served).__name__} does not run its language part as a stock decoder")
    decoder = NativeDecoder(served.language)
    reason = f"{PRODUCT_NAMES[decoder.products]} kernels in {str(served.dtype).removeprefix('torch.')}"
    if decoder.is_narrow:
        reason += ", weights kept in bfloat16 without loss"
    fast = Accelerated(served, decoder, _native_head(served), Choice("native", reason))
    _check(served, fast)
    return fast


def _with_tower(served: ServedModel, choice: Choice) -> Choice:
    try:
        tower = NativeTower(served.encoder_layers())
        tower.install()
    except NativeUnavailable as error:
        return replace(choice, tower="eager", tower_reason=str(error))
    return replace(choice, tower="native", tower_reason=tower.reason)


def _native_head(served: StockModel) -> NativeLinear | None:
    if served.softcap is not None:
        return None
    try:
        return NativeLinear(served.head)
    except NativeUnavailable:
        return None


def _check(served: StockModel, fast: Accelerated) -> None:
    """Two sequences, prefilled and then decoded by a token, both ways on pools of their own."""
    tables = ([0, 3], [2, 1])
    batches = (
        [SequenceStep(tables[0], 0, 19), SequenceStep(tables[1], 0, 7)],
        [SequenceStep(tables[0], 19, 1), SequenceStep(tables[1], 7, 1)],
    )
    pools = [_small_pools(served) for _ in range(2)]
    with torch.inference_mode():
        for steps in batches:
            positions = torch.cat([torch.arange(s.past, s.past + s.num_new) for s in steps])[None]
            embeds = served.embed(positions[0] * 7 % served.info.vocab_size)
            expected = served.forward(embeds, positions, build_batch(pools[0], steps))
            actual = fast.forward(embeds, positions, build_batch(pools[1], steps))
            distance = float((actual - expected).float().norm() / expected.float().norm())
            if not distance <= TOLERANCE[served.dtype]:
                raise NativeUnavailable(f"the kernels' result differs from the stock modules' by {distance:.3g}")


def _small_pools(served: StockModel) -> PagedKv:
    return PagedKv(
        served.info.kv,
        num_blocks=4,
        block_size_tokens=CHECK_BLOCK_TOKENS,
        dtype=served.dtype,
        device=served.device,
    )
