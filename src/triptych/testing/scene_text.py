"""Short words and numbers in the drawn scenes: several faces made from what Pillow ships, placed without overlap.

A face is a style word (`plain`, `bold`, `slanted`, `wide`, `pixel`) or the path of a TrueType file.
"""

from __future__ import annotations

import functools
import random
import string
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from triptych.testing.scene_paint import COLOURS, colour_rgb, contrast

FACES = ("plain", "bold", "slanted", "wide", "pixel")
_WORDS = (
    "STOP GO OPEN EXIT SALE HELLO TAXI CAFE BANK HOTEL ZOO BUS SHOP LOVE FIRE ICE MILK TEA BOOK GAME PLAY LEFT RIGHT "
    "UP DOWN YES NO CAT DOG SUN MOON STAR TREE FISH BIRD RAIN SNOW WIND KING QUEEN JAZZ ROCK MUSIC ART PARK GOLD "
    "FREE NEW HOT COLD PUSH PULL MENU WIFI QUIZ VOTE BOX KEY MAP HOME WORK FOOD WATER COFFEE BREAD APPLE LEMON"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Lettering:
    """A word in a picture: its centre and cap height in pixels, and where each character's centre is."""

    text: str
    colour: str
    rgb: tuple[int, int, int]
    face: str
    height_px: int
    x_px: float
    y_px: float

    @property
    def width_px(self) -> float:
        return word_mask(self.text, self.face, self.height_px).width

    def centres_px(self) -> list[tuple[float, float]]:
        left_px = self.x_px - self.width_px / 2
        return [
            (left_px + offset_px, self.y_px) for offset_px in centre_offsets_px(self.text, self.face, self.height_px)
        ]

    def distance_px(self, x_px: float, y_px: float) -> float:
        """From a point to the word's box; zero inside."""
        beyond_x_px = max(0.0, abs(x_px - self.x_px) - self.width_px / 2)
        beyond_y_px = max(0.0, abs(y_px - self.y_px) - self.height_px * 0.65)
        return float((beyond_x_px**2 + beyond_y_px**2) ** 0.5)


@functools.lru_cache(maxsize=512)
def load_face(face: str, height_px: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Sized so that capitals are about `height_px` tall."""
    if face == "pixel":
        return ImageFont.load_default_imagefont()
    points = height_px / 0.72
    return ImageFont.load_default(points) if face in FACES else ImageFont.truetype(face, points)


def _widening(face: str) -> float:
    return 1.3 if face == "wide" else 1.0


@functools.lru_cache(maxsize=4096)
def word_mask(text: str, face: str, height_px: int) -> Image.Image:
    font = load_face(face, height_px)
    stroke = max(1, height_px // 16) if face == "bold" else 0
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text, stroke_width=stroke))
    mask = Image.new("L", (max(1, right - left), max(1, bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font, stroke_width=stroke)
    if face == "pixel":
        scale = max(1, round(height_px / 9))
        mask = mask.resize((mask.width * scale, mask.height * scale), Image.Resampling.NEAREST)
    elif face == "wide":
        mask = mask.resize((round(mask.width * _widening(face)), mask.height), Image.Resampling.BILINEAR)
    elif face == "slanted":
        lean = 0.22
        extra = round(lean * mask.height)
        size = (mask.width + extra, mask.height)
        mask = mask.transform(size, Image.Transform.AFFINE, (1, lean, -extra, 0, 1, 0), Image.Resampling.BILINEAR)
    return mask


@functools.lru_cache(maxsize=4096)
def centre_offsets_px(text: str, face: str, height_px: int) -> tuple[float, ...]:
    font = load_face(face, height_px)
    edges = [font.getlength(text[:end]) for end in range(len(text) + 1)]
    width_px, total = word_mask(text, face, height_px).width, max(edges[-1], 1e-6)
    return tuple((edges[i] + edges[i + 1]) / 2 / total * width_px for i in range(len(text)))


def paint_lettering(image: Image.Image, text: Lettering) -> None:
    mask = word_mask(text.text, text.face, text.height_px)
    image.paste(text.rgb, (round(text.x_px - mask.width / 2), round(text.y_px - mask.height / 2)), mask)


def random_word(rng: random.Random) -> str:
    """A common word, a number of one to five digits, or letters at random."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(WORDS)
    if kind < 0.65:
        return "".join(rng.choice(string.digits) for _ in range(rng.randint(1, 5)))
    return "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 5)))


def random_lettering(
    rng: random.Random, scene, taken: list[Lettering], faces: tuple[str, ...] | None
) -> Lettering | None:
    """A word that fits the scene beside those already there, or None after some tries."""
    colours = [name for name in COLOURS if contrast(colour_rgb(name), scene.background_rgb) > 170]
    for _ in range(12):
        word, face = random_word(rng), rng.choice(faces or FACES)
        height_px = rng.randint(14, max(16, min(44, scene.height_px // 3)))
        colour = rng.choice(colours)
        width_px = word_mask(word, face, height_px).width
        if width_px + 6 > scene.width_px or height_px + 10 > scene.height_px:
            continue
        x_px = rng.uniform(width_px / 2 + 2, scene.width_px - width_px / 2 - 2)
        y_px = rng.uniform(height_px * 0.65 + 2, scene.height_px - height_px * 0.65 - 2)
        if all(abs(y_px - other.y_px) > (height_px + other.height_px) * 0.75 for other in taken):
            return Lettering(word, colour, colour_rgb(colour, rng), face, height_px, x_px, y_px)
    return None
