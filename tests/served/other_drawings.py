"""Pictures that the training scripts' drawing code did not make, and questions with their answers.

Two ways to draw, neither of them `triptych.testing`'s: a distance to each shape's edge at every pixel centre, blended
over one pixel (numpy), and Pillow's own primitives without smoothing, kept as JPEG. The colours are mostly Tableau's
ten, as matplotlib has them; the shapes have their own proportions.
"""

import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "blue": (31, 119, 180),
    "orange": (255, 127, 14),
    "green": (44, 160, 44),
    "red": (214, 39, 40),
    "purple": (148, 103, 189),
    "pink": (227, 119, 194),
    "gray": (127, 127, 127),
    "yellow": (255, 221, 51),
    "black": (0, 0, 0),
}
WHITE, LIGHT = (255, 255, 255), (240, 240, 235)


@dataclass(frozen=True)
class Mark:
    """A shape of a colour, its centre and half its size in px."""

    colour: str
    shape: str
    x_px: float
    y_px: float
    half_px: float


@dataclass(frozen=True)
class Drawing:
    """Marks on a ground, how they are drawn, and what is asked with its right answer."""

    marks: tuple[Mark, ...]
    questions: tuple[tuple[str, str], ...]
    is_smooth: bool
    side_px: int = 112
    ground: tuple[int, int, int] = WHITE

    def file(self) -> bytes:
        return _saved(_smooth(self), "PNG") if self.is_smooth else _saved(_hard(self), "JPEG", quality=88)


def _saved(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _distance_px(mark: Mark, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Signed distance to the shape's edge, negative inside. [H, W]"""
    dx, dy, half = np.abs(x - mark.x_px), y - mark.y_px, mark.half_px
    if mark.shape == "circle":
        return np.hypot(dx, dy) - half
    if mark.shape == "ring":
        return np.abs(np.hypot(dx, dy) - 0.75 * half) - 0.22 * half
    if mark.shape == "square":
        return np.maximum(dx, np.abs(dy)) - 0.8 * half
    if mark.shape == "triangle":  # equilateral, point up
        return np.maximum(dx * math.sin(math.pi / 3) - (dy + half) * 0.5, dy - half / 2)
    if mark.shape == "cross":
        arm, bar = np.maximum(dx - half, np.abs(dy) - 0.3 * half), np.maximum(dx - 0.3 * half, np.abs(dy) - half)
        return np.minimum(arm, bar)
    raise ValueError(mark.shape)


def _smooth(drawing: Drawing) -> Image.Image:
    y, x = np.mgrid[: drawing.side_px, : drawing.side_px] + 0.5
    pixels = np.broadcast_to(np.asarray(drawing.ground, np.float64), (*x.shape, 3))
    for mark in drawing.marks:
        cover = np.clip(0.5 - _distance_px(mark, x, y), 0, 1)[..., None]
        pixels = pixels * (1 - cover) + np.asarray(COLOURS[mark.colour]) * cover
    return Image.fromarray(np.rint(pixels).astype(np.uint8))


def _hard(drawing: Drawing) -> Image.Image:
    image = Image.new("RGB", (drawing.side_px, drawing.side_px), drawing.ground)
    pen = ImageDraw.Draw(image)
    for mark in drawing.marks:
        x, y, half, fill = mark.x_px, mark.y_px, mark.half_px, COLOURS[mark.colour]
        box = (x - half, y - half, x + half, y + half)
        if mark.shape == "circle":
            pen.ellipse(box, fill=fill)
        elif mark.shape == "ring":
            pen.ellipse(box, outline=fill, width=round(0.4 * half))
        elif mark.shape == "square":
            pen.rounded_rectangle(
                tuple(c * 0.9 + d * 0.1 for c, d in zip(box, (x, y, x, y), strict=True)), 2, fill=fill
            )
        elif mark.shape == "triangle":
            pen.regular_polygon((x, y, half), 3, fill=fill)
        elif mark.shape == "cross":
            pen.line((x - half, y, x + half, y), fill=fill, width=round(0.6 * half))
            pen.line((x, y - half, x, y + half), fill=fill, width=round(0.6 * half))
        else:
            raise ValueError(mark.shape)
    return image


DRAWINGS = (
    Drawing(
        (Mark("red", "circle", 30, 34, 16), Mark("red", "circle", 78, 30, 14), Mark("blue", "square", 56, 80, 18)),
        (
            ("How many red circles are there?", "2"),
            ("What color is the square?", "blue"),
            ("What shape is the blue object?", "square"),
            ("Is there a green circle?", "no"),
        ),
        is_smooth=True,
    ),
    Drawing(
        (Mark("green", "triangle", 56, 58, 30),),
        (
            ("What shape is the green thing?", "triangle"),
            ("What color is the triangle?", "green"),
            ("How many objects are there?", "1"),
            ("Is there a red square?", "no"),
        ),
        is_smooth=True,
    ),
    Drawing(
        (Mark("orange", "square", 32, 36, 18), Mark("purple", "ring", 80, 72, 20)),
        (
            ("What color is the ring?", "purple"),
            ("What color is the square?", "orange"),
            ("Is there a purple ring?", "yes"),
            ("How many shapes are there?", "2"),
        ),
        is_smooth=True,
        ground=LIGHT,
    ),
    Drawing(
        (Mark("black", "cross", 40, 40, 18), Mark("yellow", "circle", 84, 84, 16)),
        (
            ("What color is the cross?", "black"),
            ("What shape is the yellow object?", "circle"),
            ("Is there a black cross?", "yes"),
            ("How many yellow circles are there?", "1"),
        ),
        is_smooth=True,
        ground=LIGHT,
    ),
    Drawing(
        (
            Mark("blue", "circle", 28, 28, 13),
            Mark("blue", "circle", 84, 30, 14),
            Mark("blue", "circle", 56, 82, 15),
        ),
        (
            ("How many blue circles are there?", "3"),
            ("What color are the circles?", "blue"),
            ("Is there a blue circle?", "yes"),
            ("How many squares are there?", "0"),
        ),
        is_smooth=True,
    ),
    Drawing(
        (Mark("pink", "circle", 36, 70, 20), Mark("green", "square", 82, 36, 18)),
        (
            ("What color is the circle?", "pink"),
            ("What color is the square?", "green"),
            ("What shape is the green object?", "square"),
            ("Is there a pink circle?", "yes"),
        ),
        is_smooth=False,
    ),
    Drawing(
        (Mark("red", "triangle", 34, 44, 22), Mark("gray", "circle", 80, 74, 18)),
        (
            ("What shape is the red object?", "triangle"),
            ("What color is the circle?", "gray"),
            ("How many objects are there?", "2"),
            ("Is there a blue triangle?", "no"),
        ),
        is_smooth=False,
    ),
    Drawing(
        (Mark("orange", "circle", 70, 70, 26), Mark("orange", "circle", 24, 26, 14)),
        (
            ("How many orange circles are there?", "2"),
            ("Is there an orange circle?", "yes"),
            ("Is there a purple square?", "no"),
            ("How many circles do you see?", "2"),
        ),
        is_smooth=False,
        side_px=140,
    ),
    Drawing(
        (Mark("purple", "square", 60, 60, 28),),
        (
            ("What is the color of the square?", "purple"),
            ("What shape is the purple thing?", "square"),
            ("How many things are there?", "1"),
            ("Is there a purple square?", "yes"),
        ),
        is_smooth=False,
        side_px=140,
        ground=LIGHT,
    ),
    Drawing(
        (Mark("black", "ring", 38, 38, 22), Mark("red", "cross", 86, 80, 18)),
        (
            ("What color is the ring?", "black"),
            ("What color is the cross?", "red"),
            ("Is there a red cross?", "yes"),
            ("What shape is the red object?", "cross"),
        ),
        is_smooth=False,
    ),
)
