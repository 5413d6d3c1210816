"""Pixels of the drawn scenes: the palette, the outline of each shape, backgrounds. Knows nothing about questions."""

from __future__ import annotations

import math
import random

import numpy as np
from PIL import Image, ImageDraw

# The first is the middle of the name; the others are what people also call so.
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((220, 40, 40), (255, 0, 0), (200, 20, 30)),
    "orange": ((245, 140, 30), (255, 165, 0), (240, 125, 20)),
    "yellow": ((240, 220, 50), (255, 255, 0), (250, 215, 20)),
    "green": ((50, 165, 60), (0, 128, 0), (0, 200, 0), (60, 190, 80)),
    "blue": ((45, 80, 215), (0, 0, 255), (30, 100, 230)),
    "purple": ((140, 60, 180), (128, 0, 128), (150, 50, 200)),
    "pink": ((245, 150, 190), (255, 192, 203), (255, 120, 180)),
    "black": ((25, 25, 25), (0, 0, 0)),
    "white": ((245, 245, 245), (255, 255, 255)),
    "gray": ((130, 130, 130), (128, 128, 128), (150, 150, 150)),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "ring", "heart")
_OVERSAMPLING = 3


def colour_rgb(name: str, rng: random.Random | None = None) -> tuple[int, int, int]:
    """The middle of a colour's name, or with a generator a value around one of its centres."""
    if rng is None:
        return COLOURS[name][0]
    centre = rng.choice(COLOURS[name])
    if rng.random() < 0.15:
        return centre
    red, green, blue = (min(255, max(0, value + rng.randint(-14, 14))) for value in centre)
    return (red, green, blue)


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    return math.dist(one, other)


def outline(shape: str) -> list[tuple[float, float]]:
    """Corners of a shape around (0, 0), inside the unit circle's square; y points down."""
    if shape == "square":
        return [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)]
    if shape == "triangle":
        return [(0, -0.95), (0.95, 0.8), (-0.95, 0.8)]
    if shape == "diamond":
        return [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)]
    if shape == "cross":
        arm = 0.32
        quarter = [(arm, -0.95), (arm, -arm), (0.95, -arm)]
        return [_quarter_turn(point, turns) for turns in range(4) for point in quarter]
    if shape == "star":
        points = []
        for corner in range(10):
            reach, angle = (1.0 if corner % 2 == 0 else 0.42), math.pi * corner / 5
            points.append((reach * math.sin(angle), -reach * math.cos(angle) + 0.05))
        return points
    if shape == "heart":
        angles = [2 * math.pi * step / 28 for step in range(28)]
        return [
            (
                0.96 * math.sin(a) ** 3,
                -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16.5 - 0.1,
            )
            for a in angles
        ]
    raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")


def _quarter_turn(point: tuple[float, float], turns: int) -> tuple[float, float]:
    x, y = point
    for _ in range(turns):
        x, y = -y, x
    return (x, y)


_OUTLINES = {shape: outline(shape) for shape in SHAPES if shape not in ("circle", "ring")}


def paint_object(image: Image.Image, thing) -> None:
    """Draws a `SceneObject` in place, with smooth edges."""
    half_px = math.ceil(thing.radius_px) + 1
    left_px, top_px = math.floor(thing.x_px) - half_px, math.floor(thing.y_px) - half_px
    side_px = 2 * half_px + 1
    scale = _OVERSAMPLING if side_px < 80 else 2
    mask = Image.new("L", (side_px * scale, side_px * scale))
    x, y, radius = (thing.x_px - left_px) * scale, (thing.y_px - top_px) * scale, thing.radius_px * scale
    pen = ImageDraw.Draw(mask)
    if thing.shape in ("circle", "ring"):
        reach = radius * 0.95
        pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=255)
        if thing.shape == "ring":
            hole = radius * 0.5
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    else:
        cos, sin = math.cos(math.radians(thing.turn_deg)), math.sin(math.radians(thing.turn_deg))
        corners = _OUTLINES[thing.shape]
        pen.polygon(
            [(x + radius * (a * cos - b * sin), y + radius * (a * sin + b * cos)) for a, b in corners], fill=255
        )
    rgb = thing.rgb if thing.rgb != (0, 0, 0) or thing.colour == "black" else colour_rgb(thing.colour)
    image.paste(rgb, (left_px, top_px, left_px + side_px, top_px + side_px), mask.reduce(scale))


def paint_background(width_px: int, height_px: int, rgb: tuple[int, int, int], texture: str) -> Image.Image:
    """A plain ground, or one with a faint gradient, stripes or checks that does not change its colour's name."""
    if texture == "plain":
        return Image.new("RGB", (width_px, height_px), rgb)
    x, y = np.arange(width_px), np.arange(height_px)[:, None]
    if texture == "gradient":
        shade = 22.0 * (x / width_px + y / height_px - 1)
    elif texture == "stripes":
        shade = 9.0 * np.where((x + y) // 6 % 2 == 0, 1, -1)
    else:
        shade = 9.0 * np.where((x // 10 + y // 10) % 2 == 0, 1, -1)
    ground = np.asarray(rgb, np.float32) + shade[..., None]
    return Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8))
