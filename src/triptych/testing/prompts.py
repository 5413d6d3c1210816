"""Prompts for drawn pictures, with their truth: "two green circles above a red square on white" and what it asks for.

`invent_prompt` makes one, `say` words it, `lay_out` makes a scene that shows it. The world is that of `scenes`; what
was drawn for a prompt is checked by `judge`. numpy and Pillow only, no torch.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass

from triptych.testing.scene_paint import COLOURS, SHAPES, colour_rgb, contrast
from triptych.testing.scene_words import amount
from triptych.testing.scenes import BACKGROUNDS, Scene, SceneObject, paint

MAX_OBJECTS = 5
RELATIONS = ("above", "below", "left of", "right of")
_OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}
_WORDINGS = {
    "above": ("above", "over"),
    "below": ("below", "under"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
}
_OPENINGS = ("", "", "", "draw ", "a picture of ", "an image of ", "a picture with ", "please draw ")
_ATTEMPTS = 60


@dataclass(frozen=True, slots=True)
class Group:
    """So many things of one colour and shape."""

    count: int
    colour: str
    shape: str

    def __str__(self) -> str:
        return amount(self.count, f"{self.colour} {self.shape}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One or two groups; with two, `relation` says where the first lies from the second, or None for anywhere."""

    groups: tuple[Group, ...]
    background: str = "white"
    relation: str | None = None

    @property
    def kind(self) -> str:
        """By which accuracy is grouped."""
        if len(self.groups) == 1:
            return "one object" if self.groups[0].count == 1 else "several alike"
        singles = all(group.count == 1 for group in self.groups)
        return ("two objects" if singles else "two groups") + (", placed" if self.relation else "")

    @property
    def num_objects(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def is_held_out(self) -> bool:
        """Whether this combination, in whatever words, is kept from training: one in twenty."""
        first, *rest = self.groups
        key = f"{first}|{self.relation}|{rest[0]}" if rest else f"{first}"
        if rest and str(rest[0]) < str(first):  # the same picture said the other way round
            key = f"{rest[0]}|{_OPPOSITE.get(self.relation or '')}|{first}"
        return zlib.crc32(f"{key}|{self.background}".encode()) % 20 == 0

    def __str__(self) -> str:
        return say(self)


def say(prompt: Prompt, rng: random.Random | None = None) -> str:
    """The prompt in English: in the plainest words, or with a generator in one of many wordings."""
    joint = " and "
    if prompt.relation is not None:
        wordings = _WORDINGS[prompt.relation]
        joint = f" {rng.choice(wordings) if rng else wordings[0]} "
    text = joint.join(str(group) for group in prompt.groups)
    if rng is None:
        return f"{text} on {prompt.background}"
    text = rng.choice(_OPENINGS) + text
    if prompt.background == "white" and rng.random() < 0.3:
        return text
    ground = rng.choice((" on {}", " on {}", " on a {} background", ", {} background", " on a {} ground"))
    text += ground.format(prompt.background)
    return text.replace("gray", "grey") if rng.random() < 0.3 else text


def invent_prompt(rng: random.Random, *, held_out: bool | None = None) -> Prompt:
    """A random prompt that can be drawn. `held_out` picks from one side of the split; None from both."""
    while True:
        prompt = _invent(rng)
        if held_out is None or prompt.is_held_out == held_out:
            return prompt


def _invent(rng: random.Random) -> Prompt:
    background = "white" if rng.random() < 0.4 else rng.choice(BACKGROUNDS)
    colours = [name for name in COLOURS if contrast(colour_rgb(name), colour_rgb(background)) > 90]
    if rng.random() < 0.4:
        count = 1 if rng.random() < 0.4 else rng.randint(2, 4)
        return Prompt((Group(count, rng.choice(colours), rng.choice(SHAPES)),), background)
    while True:
        first, other = (_invent_group(rng, colours) for _ in range(2))
        if (first.colour, first.shape) != (other.colour, other.shape):
            break
    relation = rng.choice(RELATIONS) if rng.random() < 0.6 else None
    if first.count + other.count > MAX_OBJECTS:
        first = Group(1, first.colour, first.shape)
    return Prompt((first, other), background, relation)


def _invent_group(rng: random.Random, colours: list[str]) -> Group:
    return Group(rng.choice((1, 1, 2, 3)), rng.choice(colours), rng.choice(SHAPES))


def lay_out(rng: random.Random, prompt: Prompt, size_px: tuple[int, int]) -> Scene:
    """A painted scene that shows the prompt: nothing touches, nothing else is there. `size_px` is width and height."""
    width_px, height_px = size_px
    most = largest_radius_px(prompt.num_objects, size_px)
    for attempt in range(40):
        radius_px = most * rng.uniform(0.72, 1.0) * 0.97**attempt
        places = _places(rng, prompt, size_px, radius_px)
        if places is not None:
            break
    else:
        raise ValueError(f"no room for {prompt} in {width_px}x{height_px} px")
    things = [(group.colour, group.shape) for group in prompt.groups for _ in range(group.count)]
    objects = tuple(
        SceneObject(shape, colour, x_px, y_px, radius_px, colour_rgb(colour))
        for (colour, shape), (x_px, y_px) in zip(things, places, strict=True)
    )
    rgb = (255, 255, 255) if prompt.background == "white" else colour_rgb(prompt.background)
    return paint(Scene(width_px, height_px, prompt.background, objects, background_rgb=rgb))


def largest_radius_px(num_objects: int, size_px: tuple[int, int]) -> float:
    """At which so many things find room in most pictures of that width and height."""
    short_px, long_px = sorted(size_px)
    return min(0.24 * short_px, 0.36 * math.sqrt(short_px * min(long_px, 1.5 * short_px) / (num_objects + 1)))


def _places(
    rng: random.Random, prompt: Prompt, size_px: tuple[int, int], radius_px: float
) -> list[tuple[float, float]] | None:
    """Centres by group in order, or None where chance found no room."""
    margin_px = 1.12 * radius_px + 1
    cut = _cut(rng, prompt, size_px, radius_px)
    if cut is None:
        return None
    places: list[tuple[float, float]] = []
    for index, group in enumerate(prompt.groups):
        for _ in range(group.count):
            for _ in range(_ATTEMPTS):
                place = (
                    rng.uniform(margin_px, size_px[0] - margin_px),
                    rng.uniform(margin_px, size_px[1] - margin_px),
                )
                on_side = _is_on_side(prompt, index, place, cut, radius_px)
                if on_side and all(math.dist(place, other) > 2.25 * radius_px + 2 for other in places):
                    break
            else:
                return None
            places.append(place)
    return places


def _cut(rng: random.Random, prompt: Prompt, size_px: tuple[int, int], radius_px: float) -> float | None:
    """Where a line between the two groups lies, 0 without a relation, None where there is no room for it."""
    if prompt.relation is None:
        return 0.0
    side_px = size_px[1 if prompt.relation in ("above", "below") else 0]
    room_px = 2.3 * radius_px + 1
    first_px = side_px * rng.uniform(0.35, 0.65)
    return first_px if room_px <= first_px <= side_px - room_px else None


def _is_on_side(prompt: Prompt, index: int, place: tuple[float, float], cut_px: float, radius_px: float) -> bool:
    if prompt.relation is None:
        return True
    value = place[1 if prompt.relation in ("above", "below") else 0]
    comes_first = (prompt.relation in ("above", "left of")) == (index == 0)
    return value <= cut_px - 1.05 * radius_px if comes_first else value >= cut_px + 1.05 * radius_px
