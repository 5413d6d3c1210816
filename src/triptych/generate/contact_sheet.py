"""Pictures side by side on one sheet: without the cache, with it, and their difference four times enlarged in value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from triptych.generate.cache_setting import CacheSetting
from triptych.generate.evaluate import Case, Frames
from triptych.generate.picture_files import encode_picture, write_whole

GAIN = 4
TILE_PX = 160
TEXT_PX = 380
LINE_PX = 14
MARGIN_PX = 6


@dataclass(frozen=True, slots=True)
class _Entry:
    case: Case
    plain: npt.NDArray[np.uint8]  # [H, W, 3]
    cached: npt.NDArray[np.uint8]


class ContactSheet:
    """Keeps the `max_cases` cases with the lowest SSIM; of a clip, the frame that differs most."""

    def __init__(self, max_cases: int = 24) -> None:
        self._max_cases = max_cases
        self._worst: list[_Entry] = []  # by SSIM

    def add(self, setting: CacheSetting, case: Case, plain: Frames, cached: Frames) -> None:
        """An `on_case` of `evaluate`."""
        difference = np.abs(plain.astype(np.int16) - cached)
        frame = int(difference.mean(axis=(1, 2, 3)).argmax())
        self._worst.append(_Entry(case, plain[frame], cached[frame]))
        self._worst.sort(key=lambda entry: entry.case.ssim)
        del self._worst[self._max_cases :]

    def image(self) -> Image.Image:
        """Worst case first."""
        width_px = TEXT_PX + 3 * (TILE_PX + MARGIN_PX) + MARGIN_PX
        row_px = TILE_PX + MARGIN_PX
        sheet = Image.new("RGB", (width_px, LINE_PX + 2 * MARGIN_PX + row_px * max(1, len(self._worst))), "white")
        ink = ImageDraw.Draw(sheet)
        for column, title in enumerate(("without the cache", "with it", f"difference, {GAIN} times")):
            ink.text((TEXT_PX + MARGIN_PX + column * (TILE_PX + MARGIN_PX), MARGIN_PX), title, "black")
        for row, entry in enumerate(self._worst):
            top_px = LINE_PX + 2 * MARGIN_PX + row * row_px
            ink.multiline_text((MARGIN_PX, top_px), _caption(entry.case), "black")
            difference = np.abs(entry.plain.astype(np.int16) - entry.cached) * GAIN
            tiles = (entry.plain, entry.cached, np.minimum(difference, 255).astype(np.uint8))
            for column, pixels in enumerate(tiles):
                sheet.paste(_tile(pixels), (TEXT_PX + MARGIN_PX + column * (TILE_PX + MARGIN_PX), top_px))
        return sheet

    def save(self, path: Path) -> None:
        """A PNG, whole or not at all."""
        write_whole(path, encode_picture(np.asarray(self.image()), "png"))


def _caption(case: Case) -> str:
    prompt = case.prompt if len(case.prompt) <= 58 else case.prompt[:55] + "..."
    lines = [
        prompt,
        f"{case.group}, seed {case.seed}",
        f"PSNR {case.psnr_db:.1f} dB, SSIM {case.ssim:.4f}, mean difference {case.mean_difference:.2f}",
        f"{case.hit_rate:.0%} of the steps skipped, {case.plain_s / case.cached_s:.2f} times as fast",
    ]
    if case.is_right is not None:
        words = {True: "right", False: "wrong", None: ""}
        lines.append(f"judged {words[case.plain_is_right]} without, {words[case.is_right]} with")
    return "\n".join(lines)


def _tile(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """At most TILE_PX a side; small pictures are enlarged by whole pixels, so that nothing is smoothed over."""
    image = Image.fromarray(pixels)
    longest_px = max(image.size)
    if longest_px > TILE_PX:
        image.thumbnail((TILE_PX, TILE_PX))
        return image
    factor = TILE_PX // longest_px
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
