"""Draws a contact sheet of held-out prompts, each picture with its prompt and the judge's mark.

python tools/train/tiny_image_sheet.py docs/tiny-image.png [--num 24] [--max-objects 2]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eval_tiny_image import FOLDER, draw, held_out, load
from PIL import Image, ImageDraw

from triptych.testing.judge import is_shown
from triptych.testing.prompts import Prompt

COLUMNS, CELL_PX, TEXT_PX = 6, 136, 34


def sheet(prompts: list[Prompt], pictures: list[Image.Image]) -> Image.Image:
    rows = -(-len(prompts) // COLUMNS)
    page = Image.new("RGB", (COLUMNS * CELL_PX, rows * (CELL_PX + TEXT_PX)), (250, 250, 250))
    pen = ImageDraw.Draw(page)
    for index, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
        x_px, y_px = index % COLUMNS * CELL_PX, index // COLUMNS * (CELL_PX + TEXT_PX)
        shown = picture.resize((CELL_PX - 8, CELL_PX - 8), Image.Resampling.LANCZOS)
        mark = (30, 150, 60) if is_shown(prompt, picture) else (210, 50, 40)
        pen.rectangle((x_px + 2, y_px + 2, x_px + CELL_PX - 3, y_px + CELL_PX - 3), fill=mark)
        page.paste(shown, (x_px + 4, y_px + 4))
        pen.multiline_text((x_px + 4, y_px + CELL_PX), folded(str(prompt)), fill=(20, 20, 20), font_size=9, spacing=1)
    return page


def folded(text: str, width: int = 27) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--num", type=int, default=24)
    parser.add_argument("--max-objects", type=int, default=5)
    args = parser.parse_args()
    prompts = [prompt for prompt in held_out(20 * args.num, seed=5) if prompt.num_objects <= args.max_objects]
    prompts = prompts[: args.num]
    pictures = draw(load(args.folder), [str(prompt) for prompt in prompts])
    sheet(prompts, pictures).quantize(128).save(args.path, optimize=True)


if __name__ == "__main__":
    main()
