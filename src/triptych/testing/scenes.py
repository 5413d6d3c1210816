"""Drawn scenes with their truth: coloured shapes and short words on a background, so that a test can know the answer.

`draw_scene(seed)` invents one, `paint(scene)` draws exactly the objects you name. numpy and Pillow only, no torch.
The same world serves `tiny-vl` (what is in the picture?) and `tiny-image` (draw "two green circles on white").
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from triptych.testing.scene_paint import COLOURS, SHAPES, colour_rgb, contrast, paint_background, paint_object
from triptych.testing.scene_text import Lettering, paint_lettering, random_lettering

SMALL_MAX = 0.105  # radius over the picture's short side: below is "small"
BIG_MIN = 0.135  # above is "big"; between the two no size question is asked
BACKGROUNDS = ("white", "black", "gray", "yellow", "blue", "pink", "green")


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One shape. Places and radius are in pixels of the scene; `turn_deg` is a slight rotation."""

    shape: str
    colour: str
    x_px: float
    y_px: float
    radius_px: float
    rgb: tuple[int, int, int] = (0, 0, 0)
    turn_deg: float = 0.0

    @property
    def centre_px(self) -> tuple[float, float]:
        return (self.x_px, self.y_px)

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What is in a picture, and the picture once painted. Objects are drawn in order: later ones lie on top."""

    width_px: int
    height_px: int
    background: str
    objects: tuple[SceneObject, ...] = ()
    texts: tuple[Lettering, ...] = ()
    background_rgb: tuple[int, int, int] = (255, 255, 255)
    texture: str = "plain"
    noise: int = 0
    image: Image.Image | None = field(default=None, compare=False)

    def matching(self, colour: str | None = None, shape: str | None = None, size: str | None = None):
        """The objects of that colour, shape and size word; None matches all."""
        return [
            thing
            for thing in self.objects
            if (colour is None or thing.colour == colour)
            and (shape is None or thing.shape == shape)
            and (size is None or self.size_word(thing) == size)
        ]

    def count(self, colour: str | None = None, shape: str | None = None, size: str | None = None) -> int:
        return len(self.matching(colour, shape, size))

    def size_word(self, thing: SceneObject) -> str:
        """`small`, `big`, or `medium` where a question about size would be unfair."""
        ratio = thing.radius_px / min(self.width_px, self.height_px)
        return "small" if ratio < SMALL_MAX else "big" if ratio > BIG_MIN else "medium"


def draw_scene(
    seed: int | random.Random,
    size_px: tuple[int, int] | None = None,
    num_objects: int | None = None,
    num_words: int = 0,
    plain: bool = False,
    faces: tuple[str, ...] | None = None,
) -> Scene:
    """An invented scene, painted. The same seed gives the same picture. `plain` leaves out noise and texture."""
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    scene = invent_scene(rng, size_px or random_size_px(rng), num_objects, num_words, plain, faces)
    return paint(scene, rng)


def paint(scene: Scene, rng: random.Random | int = 0) -> Scene:
    """The scene with its `image`; the generator decides only the noise."""
    image = paint_background(scene.width_px, scene.height_px, scene.background_rgb, scene.texture)
    for thing in scene.objects:
        paint_object(image, thing)
    for text in scene.texts:
        paint_lettering(image, text)
    if scene.noise:
        seed = rng.getrandbits(31) if isinstance(rng, random.Random) else rng
        image = add_noise(image, scene.noise, seed)
    return replace(scene, image=image)


def add_noise(image: Image.Image, noise: int, seed: int) -> Image.Image:
    pixels = np.asarray(image).astype(np.int16)
    pixels += np.random.default_rng(seed).integers(-noise, noise + 1, pixels.shape, dtype=np.int16)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def random_size_px(rng: random.Random) -> tuple[int, int]:
    """Width and height between 84 and 336 pixels, any aspect up to 3 to 1."""
    while True:
        size_px = (28 * rng.randint(3, 12), 28 * rng.randint(3, 12))
        if max(size_px) <= 3 * min(size_px):
            return size_px


def invent_scene(
    rng: random.Random,
    size_px: tuple[int, int],
    num_objects: int | None = None,
    num_words: int = 0,
    plain: bool = False,
    faces: tuple[str, ...] | None = None,
) -> Scene:
    """Places, colours and words, nothing painted yet. May hold fewer objects than asked for where there is no room."""
    background = "white" if rng.random() < 0.4 else rng.choice(BACKGROUNDS)
    rgb = (255, 255, 255) if background == "white" and rng.random() < 0.5 else colour_rgb(background, rng)
    scene = Scene(
        *size_px,
        background=background,
        background_rgb=rgb,
        texture="plain" if plain or rng.random() < 0.6 else rng.choice(("gradient", "stripes", "checks")),
        noise=0 if plain or rng.random() < 0.4 else rng.randint(3, 14),
    )
    texts: list[Lettering] = []
    for _ in range(num_words):
        text = random_lettering(rng, scene, texts, faces)
        if text is not None:
            texts.append(text)
    if num_objects is None:
        num_objects = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8))
    objects = place_objects(rng, scene, num_objects, texts)
    return replace(scene, objects=tuple(objects), texts=tuple(texts))


def place_objects(rng: random.Random, scene: Scene, num_objects: int, texts: list[Lettering]) -> list[SceneObject]:
    short_px = min(scene.width_px, scene.height_px)
    colours = allowed_colours(scene, rng)
    if rng.random() < 0.5:  # few kinds, so that counts above one are common
        colours = rng.sample(colours, rng.randint(1, 3))
    shapes = list(SHAPES) if rng.random() < 0.5 else rng.sample(SHAPES, rng.randint(1, 3))
    gap = 0.82 if rng.random() < 0.15 else 1.08  # a few scenes overlap a little
    objects: list[SceneObject] = []
    for _ in range(num_objects):
        for attempt in range(25):
            radius_px = random_radius_px(rng, short_px, crowded=num_objects > 4 or attempt > 12)
            margin_px = radius_px + 1
            x_px = rng.uniform(margin_px, scene.width_px - margin_px)
            y_px = rng.uniform(margin_px, scene.height_px - margin_px)
            if is_free(x_px, y_px, radius_px, objects, texts, gap):
                break
        else:
            continue
        colour = rng.choice(colours)
        rgb = colour_rgb(colour, rng)
        turn_deg = rng.uniform(-9, 9) if rng.random() < 0.5 else 0.0
        objects.append(SceneObject(rng.choice(shapes), colour, x_px, y_px, radius_px, rgb, turn_deg))
    return objects


def allowed_colours(scene: Scene, rng: random.Random) -> list[str]:
    """Colour names that can be told from this background."""
    return [
        name for name in COLOURS if name != scene.background and contrast(colour_rgb(name), scene.background_rgb) > 90
    ]


def random_radius_px(rng: random.Random, short_px: int, crowded: bool) -> float:
    least = 0.04 if short_px >= 224 else 0.055 if short_px >= 140 else 0.07
    small = rng.random() < (0.75 if crowded else 0.45)
    ratio = rng.uniform(least, 0.1) if small else rng.uniform(0.14, 0.2)
    return max(ratio * short_px, 5.0)


def is_free(x_px, y_px, radius_px, objects, texts, gap) -> bool:
    for thing in objects:
        if math.hypot(x_px - thing.x_px, y_px - thing.y_px) < gap * (radius_px + thing.radius_px) + 1:
            return False
    return all(text.distance_px(x_px, y_px) > radius_px + 1 for text in texts)
