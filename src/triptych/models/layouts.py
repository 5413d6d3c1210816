"""What the families' layouts share: placeholders become runs of tokens, items get sizes, costs and checked options.

Runs in the front process. A family says what one item's run is (`run`) and how large an item will be (`size`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from triptych.core.errors import EmbeddingsRefused, InvalidMedia, InvalidRequest, PromptRefused, UnsupportedMedia
from triptych.core.media import Decoded, DecodedImage, DecodeSpec, MediaHeader, Modality
from triptych.core.prepared import Span
from triptych.models.base import Expanded, ItemSize, ProcessedItem
from triptych.models.folder import ModelFolder
from triptych.models.pixels import PixelTable

SCALED_DECODE = True
IGNORED_OPTIONS = frozenset({"format", "detail"})


@dataclass(frozen=True, slots=True)
class Run:
    """One item's tokens in the prompt. `pieces`: (offset in the run, length, offset in the item's embeddings)."""

    token_ids: list[int]
    pieces: tuple[tuple[int, int, int], ...]

    @classmethod
    def of_token(cls, token_id: int, count: int) -> Run:
        """The plain case: one token, repeated once an embedding."""
        return cls([token_id] * count, ((0, count, 0),))

    @classmethod
    def of_marks(cls, token_ids: list[int], mark: int) -> Run:
        """Every stretch of `mark` in `token_ids` takes the item's next embeddings."""
        pieces, offset, taken = [], 0, 0
        while offset < len(token_ids):
            end = offset
            while end < len(token_ids) and token_ids[end] == mark:
                end += 1
            if end > offset:
                pieces.append((offset, end - offset, taken))
                taken += end - offset
            offset = max(end, offset + 1)
        return cls(token_ids, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Placed:
    """A run at its place: the prompt tokens [start, start + len(run.token_ids)) of item `item_idx`."""

    start: int
    item_idx: int
    modality: Modality
    size: ItemSize
    run: Run


class TextLayout:
    """A model without media. Also the base of those with: `expand` is the same, with nothing to place."""

    modalities: frozenset[Modality] = frozenset()
    option_names: ClassVar[frozenset[str]] = frozenset()
    whole_spans: ClassVar[bool] = False
    adds_bos: ClassVar[bool] = (
        False  # the stock processor lets the tokenizer add its first token to a rendered template
    )

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        if overrides and not self.modalities:
            raise InvalidRequest(f"{folder.architecture} takes no media, so it has no processor parameters to set")
        self.folder = folder
        self.config = folder.config
        self.tokenizer: Any = folder.tokenizer
        self.placeholders: dict[Modality, str] = {}  # what a rendered template holds for one item
        self.surroundings: dict[Modality, str] = {}  # text that is tokenised together with what stands around it
        self.processor_key = processor_key(type(self).__name__)

    def placeholder_text(self, modality: Modality) -> str:
        """What stands for an item in the text of a template that knows strings only."""
        return self.placeholders[modality]

    def request_options(self, modalities: Sequence[Modality]) -> dict[str, Any]:
        """Options that follow from what else the request holds; an item's own options go before them."""
        return {}

    def sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        """Of embeddings that the caller computed, by the same rules as for media. Raises EmbeddingsRefused."""
        if modality not in self.modalities:
            raise EmbeddingsRefused(f"{self.folder.architecture} has no embeddings of {modality.value}")
        return self._sent_size(modality, num_embeds, grid)

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        raise NotImplementedError

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec:
        return DecodeSpec()

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        raise UnsupportedMedia(f"{self.folder.architecture} takes text only, not {header.modality.value}")

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem:
        raise UnsupportedMedia(f"{self.folder.architecture} takes text only")

    def run(self, modality: Modality, size: ItemSize) -> Run:
        raise NotImplementedError

    def expand(self, token_ids: list[int], sizes: Sequence[tuple[Modality, ItemSize]]) -> Expanded:
        """Replace each placeholder, in order, by its item's run. Raises PromptRefused when they do not match up."""
        laid, placed = self._lay(token_ids, sizes)
        spans = tuple(
            Span(item.start + offset, length, item.item_idx, embed_offset)
            for item in placed
            for offset, length, embed_offset in item.run.pieces
        )
        positions, position_offset = self.positions(len(laid), placed)
        return Expanded(laid, spans, positions, position_offset, self.whole_spans and bool(spans))

    def positions(self, num_tokens: int, placed: Sequence[Placed]) -> tuple[npt.NDArray[np.int32] | None, int]:
        """Rotary positions [A, T] and the offset of generated tokens; None: 0..T-1."""
        return None, 0

    def _lay(self, token_ids: list[int], sizes: Sequence[tuple[Modality, ItemSize]]) -> tuple[list[int], list[Placed]]:
        kinds = {self.tokenizer.convert_tokens_to_ids(text): kind for kind, text in self.placeholders.items()}
        slots = [(index, kinds[token]) for index, token in enumerate(token_ids) if token in kinds]
        if sorted(kind for _, kind in slots) != sorted(kind for kind, _ in sizes):
            raise PromptRefused(
                f"the prompt has places for {_listed([kind for _, kind in slots])}, "
                f"the request has {_listed([kind for kind, _ in sizes])}"
            )
        # a template may write one kind before another, but keeps the order within a kind
        waiting = {kind: iter([i for i, (own, _) in enumerate(sizes) if own is kind]) for kind in Modality}
        laid: list[int] = []
        placed: list[Placed] = []
        copied = 0
        for index, kind in slots:
            laid.extend(token_ids[copied:index])
            item_idx = next(waiting[kind])
            size = sizes[item_idx][1]
            run = self.run(kind, size)
            placed.append(Placed(len(laid), item_idx, kind, size, run))
            laid.extend(run.token_ids)
            copied = index + 1
        laid.extend(token_ids[copied:])
        return laid, placed


class ImageLayout(TextLayout):
    """Base of the families that take pictures through a PIL image processor of transformers.

    The override `scaled_decode` lets a large JPEG be scaled while it is decoded, to no less than twice what the
    processor keeps of it.
    """

    modalities = frozenset({Modality.IMAGE})

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        overrides = dict(overrides)
        self.scaled_decode = bool(overrides.pop("scaled_decode", SCALED_DECODE))
        super().__init__(folder, overrides)
        self.image_processor = folder.image_processor(overrides)
        self.table = PixelTable(self.image_processor)
        self.processor_key = processor_key(type(self).__name__, self.image_processor.to_dict())

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        raise NotImplementedError

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Sizes follow `image.seen_px`, which may be larger than its pixels."""
        raise NotImplementedError

    def fit_px(self, width_px: int, height_px: int, options: dict[str, Any]) -> tuple[int, int] | None:
        """(width, height) to which the processor shrinks a picture of that size, its shape kept; None where that is
        not known, and for families whose layout follows the decoded pixels."""
        return None

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec:
        """With `fit_px` only where the picture is more than twice as large: others decode as they always did."""
        if header.modality is not Modality.IMAGE or not self.scaled_decode:
            return DecodeSpec()
        fit = self.fit_px(header.width_px, header.height_px, options)
        is_large = fit is not None and header.width_px > 2 * fit[0] and header.height_px > 2 * fit[1]
        return DecodeSpec(fit_px=fit if is_large else None)

    def batch_key(self, size: ItemSize) -> str:
        """Items of one key may be encoded together; a packed tower takes any."""
        return Modality.IMAGE.value

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        self.check(header.modality, options)
        return self._image_size(header.height_px, header.width_px, options)

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem:
        if not isinstance(decoded, DecodedImage):
            raise UnsupportedMedia(f"{self.folder.architecture} takes {_listed(sorted(self.modalities))} only")
        width_px, height_px = decoded.seen_px
        size = self._image_size(height_px, width_px, options)
        try:
            features = self.process_image(decoded, options)
        except ValueError as error:
            raise InvalidMedia(f"a picture of {width_px}x{height_px} pixels: {error}") from error
        return ProcessedItem(size, features, self.batch_key(size))

    def _image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        if height_px < 1 or width_px < 1:
            raise InvalidMedia(f"a picture of {width_px}x{height_px} pixels")
        try:
            return self.image_size(height_px, width_px, options)
        except ValueError as error:  # the library's own limits, such as an aspect ratio over 200
            raise InvalidMedia(f"a picture of {width_px}x{height_px} pixels: {error}") from error

    def check(self, modality: Modality, options: dict[str, Any]) -> None:
        """Raises UnsupportedMedia for a kind the model does not take, InvalidRequest for an unknown option."""
        if modality not in self.modalities:
            raise UnsupportedMedia(
                f"{self.folder.architecture} takes {_listed(sorted(self.modalities))}, not {modality.value}"
            )
        unknown = sorted(set(options) - self.option_names - IGNORED_OPTIONS)
        if unknown:
            raise InvalidRequest(
                f"{self.folder.architecture} has no media option {unknown[0]!r}; it takes "
                f"{_listed(sorted(self.option_names)) or 'none'}"
            )


def covering_px(width_px: int, height_px: int, target: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of a picture's shape that covers `target` (width, height): (width, height)."""
    scale = max(target[0] / width_px, target[1] / height_px)
    return max(1, round(width_px * scale)), max(1, round(height_px * scale))


def option_int(options: dict[str, Any], name: str, default: int, low: int = 1) -> int:
    """A whole-number option. Raises InvalidRequest that names it."""
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidRequest(f"media option {name} must be a whole number of at least {low}, got {value!r}")
    return value


def sent_tiles(num_embeds: int, embeds_a_tile: int, num_tiles: int | None = None) -> int:
    """How many tiles the caller's embeddings are. Raises EmbeddingsRefused unless they are whole, and `num_tiles`."""
    tiles, left = divmod(num_embeds, embeds_a_tile)
    if left or tiles < 1 or tiles != (num_tiles or tiles):
        wanted = f"{num_tiles or 'whole'} tiles of {embeds_a_tile}"
        raise EmbeddingsRefused(f"embeddings of a picture come in {wanted}, got {num_embeds}")
    return tiles


def processor_key(name: str, *parameters: dict[str, Any]) -> bytes:
    """32 bytes that change with the layout, the processor's class or any of its parameters."""
    text = json.dumps([name, *parameters], sort_keys=True, default=repr)
    return blake3(text.encode()).digest()


def tower_flops(num_tokens: int, context: int, hidden: int, intermediate: int, num_layers: int) -> float:
    """Multiply-adds times two of a plain transformer tower: `context` tokens are attended to by each."""
    per_token = 8 * hidden * hidden + 4 * hidden * intermediate + 4 * context * hidden
    return float(num_layers) * num_tokens * per_token


def _listed(kinds: Sequence[Any]) -> str:
    return ", ".join(getattr(kind, "value", str(kind)) for kind in kinds) or "no media"
