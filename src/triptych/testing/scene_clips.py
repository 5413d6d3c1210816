"""Short drawn clips with their truth: one thing moves, turns another colour, comes, goes, grows or shrinks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from triptych.testing.scene_about import some_kind
from triptych.testing.scene_pairs import recoloured, with_object
from triptych.testing.scene_relations import SIDES
from triptych.testing.scene_words import Question, article, noun_phrase, pick, plural
from triptych.testing.scenes import Scene, SceneObject, add_noise, draw_scene, is_free, paint

EVENTS = ("move", "move", "move", "color", "come", "go", "grow", "shrink", "still")
DIRECTIONS = {"left": "left", "right": "right", "above": "up", "below": "down"}


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames as Pillow pictures of one size; `scenes` is the truth of each; `event` happens to `thing`."""

    frames: list[Image.Image]
    scenes: list[Scene]
    event: str
    thing: SceneObject | None
    told: str
    direction: str | None = None
    becomes: str | None = None


def draw_clip(seed: int | random.Random, size_px=(112, 112), num_frames: int = 8) -> Clip:
    """An invented clip. The same seed gives the same frames."""
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    scene = draw_scene(rng, size_px, rng.choice((1, 1, 2, 2, 3, 4)))
    scene = replace(scene, noise=min(scene.noise, 6), image=None)
    alone = [thing for thing in scene.objects if scene.count(thing.colour, thing.shape) == 1]
    event = rng.choice(EVENTS) if alone else "still"
    thing = rng.choice(alone) if alone and event != "still" else None
    if thing is not None and event == "move":
        move = choose_move(scene, thing, rng)
        if move is None:
            event, thing = "still", None
        else:
            return moving_clip(scene, thing, *move, num_frames, rng)
    return changing_clip(scene, thing, event, num_frames, rng)


def choose_move(scene: Scene, thing: SceneObject, rng: random.Random) -> tuple[str, float] | None:
    """A side with room to move there, and how far in pixels."""
    rest = [other for other in scene.objects if other is not thing]
    short_px = min(scene.width_px, scene.height_px)
    for side in rng.sample(list(SIDES), 4):
        dx, dy = SIDES[side]
        for reach in (rng.uniform(0.25, 0.7), 0.25):
            way_px = reach * short_px
            x_px, y_px = thing.x_px + dx * way_px, thing.y_px + dy * way_px
            inside = (
                thing.radius_px < x_px < scene.width_px - thing.radius_px
                and thing.radius_px < y_px < scene.height_px - thing.radius_px
            )
            if inside and is_free(x_px, y_px, thing.radius_px, rest, [], 1.0):
                return side, way_px
    return None


def moving_clip(scene, thing, side, way_px, num_frames, rng) -> Clip:
    dx, dy = SIDES[side]
    scenes = []
    for index in range(num_frames):
        share = index / max(1, num_frames - 1)
        now = replace(thing, x_px=thing.x_px + dx * way_px * share, y_px=thing.y_px + dy * way_px * share)
        scenes.append(with_object(scene, thing, now))
    direction = DIRECTIONS[side]
    told = f"The {thing.name} moves {direction}."
    return Clip(paint_frames(scenes, rng), scenes, "move", thing, told, direction)


def changing_clip(scene, thing, event, num_frames, rng) -> Clip:
    if event == "still":
        return Clip(paint_frames([scene] * num_frames, rng), [scene] * num_frames, event, None, "Nothing changes.")
    after, told, becomes = scene, "", None
    without = replace(scene, objects=tuple(other for other in scene.objects if other is not thing))
    before = scene
    if event == "color":
        new = recoloured(scene, thing, rng)
        after, told, becomes = with_object(scene, thing, new), f"The {thing.name} turns {new.colour}.", new.colour
    elif event == "come":
        before, told = without, f"{article(thing.name).capitalize()} appears."
    elif event == "go":
        after, told = without, f"The {thing.name} disappears."
    else:
        factor = 1.7 if event == "grow" else 0.5
        after, told = (
            with_object(scene, thing, replace(thing, radius_px=thing.radius_px * factor)),
            f"The {thing.name} {event}s.",
        )
        if event == "shrink" and after.objects and thing.radius_px * factor < 4:
            before, after = after, before
            told, event = f"The {thing.name} grows.", "grow"
    turn = max(2, num_frames // 2) if num_frames <= 4 else 2 * rng.randint(1, num_frames // 2 - 1)
    scenes = [before] * turn + [after] * (num_frames - turn)
    return Clip(paint_frames(scenes, rng), scenes, event, thing, told, None, becomes)


def paint_frames(scenes: list[Scene], rng: random.Random) -> list[Image.Image]:
    painted: dict[int, Image.Image] = {}
    for scene in scenes:
        if id(scene) not in painted:
            image = paint(replace(scene, noise=0)).image
            assert image is not None
            painted[id(scene)] = image
    frames = [painted[id(scene)] for scene in scenes]
    noise = scenes[0].noise
    return [add_noise(frame, noise, rng.getrandbits(31)) for frame in frames] if noise else frames


def frames_array(clip: Clip) -> np.ndarray:  # [T, H, W, 3] uint8
    return np.stack([np.asarray(frame) for frame in clip.frames])


def clip_questions(clip: Clip, rng: random.Random, num: int = 1) -> list[Question]:
    askers = (
        ask_what_happens,
        ask_what_happens,
        ask_what_moves,
        ask_way,
        ask_does_anything,
        ask_end_state,
        ask_clip_count,
    )
    asked: list[Question] = []
    while len(asked) < num:
        question = rng.choice(askers)(clip, rng)
        if question is not None:
            asked.append(question)
    return asked


def ask_what_happens(clip: Clip, rng: random.Random) -> Question:
    text = pick(
        rng, "What happens in the video?|What happens?|Describe the video.|What happens in the clip?|What changes?"
    )
    return Question("clip event", text, clip.told)


def ask_what_moves(clip: Clip, rng: random.Random) -> Question | None:
    if clip.event not in ("move", "still"):
        return None
    text = pick(rng, "What moves?|What is moving?|Which object moves?|Which object is moving?")
    return Question("clip mover", text, f"the {clip.thing.name}" if clip.thing else "nothing")


def ask_way(clip: Clip, rng: random.Random) -> Question | None:
    if clip.event != "move" or clip.thing is None or clip.direction is None:
        return None
    text = pick(
        rng,
        "Which way does the {it} move?|In which direction does the {it} move?|Where does the {it} move?|"
        "Where does the {it} go?",
        it=rng.choice((clip.thing.name, "object")) if len(clip.scenes[0].objects) == 1 else clip.thing.name,
    )
    return Question("clip direction", text, clip.direction)


def ask_does_anything(clip: Clip, rng: random.Random) -> Question:
    if clip.event in ("move", "still") and rng.random() < 0.5:
        text = pick(rng, "Does anything move?|Is anything moving?|Does something move in the video?")
        return Question("clip yes/no", text, "yes" if clip.event == "move" else "no")
    text = pick(rng, "Does anything change?|Does something change in the video?")
    return Question("clip yes/no", text, "no" if clip.event == "still" else "yes")


def ask_end_state(clip: Clip, rng: random.Random) -> Question | None:
    if clip.event != "color" or clip.thing is None or clip.becomes is None:
        return None
    shape = clip.thing.shape
    if clip.scenes[0].count(shape=shape) != 1:
        return None
    when, colour = rng.choice((("end", clip.becomes), ("start", clip.thing.colour)))
    text = pick(rng, "What color is the {s} at the {w}?|Which color does the {s} have at the {w}?", s=shape, w=when)
    return Question("clip color", text, colour)


def ask_clip_count(clip: Clip, rng: random.Random) -> Question:
    when, scene = rng.choice((("start", clip.scenes[0]), ("end", clip.scenes[-1])))
    kind = (None, None) if rng.random() < 0.4 else some_kind(scene, rng, 0.8)
    things = plural(noun_phrase(rng, *kind))
    if clip.event in ("come", "go") or rng.random() < 0.4:
        text = pick(rng, "How many {t} are there at the {w}?|How many {t} do you see at the {w}?", t=things, w=when)
    elif clip.event == "color":
        return ask_what_happens(clip, rng)
    else:
        text = pick(rng, "How many {t} are there?|How many {t} are in the video?|Count the {t}.", t=things)
    return Question("clip count", text, str(scene.count(*kind)))
