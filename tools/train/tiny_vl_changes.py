"""What happened between the pictures of a row: targets for the visual tokens of the later ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tiny_vl_targets import slot

NUM_EVENTS = 8
SAME, NEW, GONE, MOVED_HERE, MOVED_AWAY, TURNED, GROWN, SHRUNK = range(NUM_EVENTS)


@dataclass(frozen=True)
class Story:
    """The first scene and the last, and what made the one from the other, as scene_clips and scene_pairs call it."""

    ends: tuple
    event: str


def events_of(stories, shape: np.ndarray, colour: np.ndarray, box: np.ndarray) -> np.ndarray:
    """[B, n-1, G] from dense targets [B*n, G, 4] and [B*n, G, 4, 4]: what happened in each token since the first."""
    shape, colour, box = (part.reshape(len(stories), -1, *part.shape[1:]) for part in (shape, colour, box))
    is_same = ((shape == shape[:, :1]) & (colour == colour[:, :1])).all(-1)[:, 1:]
    events = np.where(is_same, SAME, np.where((shape[:, 1:] > 0).any(-1), NEW, GONE))
    radius = box[..., 2].max(-1)
    has_other_size = abs(radius - radius[:, :1])[:, 1:] > 0.05
    for index, story in enumerate(stories):
        if story.event in ("move", "moved"):
            events[index] = np.choose(events[index], (SAME, MOVED_HERE, MOVED_AWAY))
        elif story.event == "color":
            events[index][events[index] == NEW] = TURNED
        elif story.event in ("grow", "shrink"):
            events[index] = np.where(has_other_size[index], GROWN if story.event == "grow" else SHRUNK, SAME)
    return events


def stood_there(events, shape: np.ndarray, colour: np.ndarray) -> tuple[np.ndarray, ...]:
    """Row, later picture and token [C] where something is no longer as it was in the row's first picture; colour and
    shape [C] of what stood there then."""
    shape, colour = (part.reshape(len(events), -1, *part.shape[1:])[:, 0] for part in (shape, colour))
    row, later, token = np.nonzero((events != SAME) & (shape > 0).any(-1)[:, None])
    part = shape[row, token].argmax(-1)
    return row, later, token, colour[row, token, part], shape[row, token, part] - 1


def shifts_of(stories, pictures, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """Row, picture and token [S] where a thing has moved to; how far since the start, in pictures [S, 2]."""
    found = []
    for index, (story, scenes) in enumerate(zip(stories, pictures, strict=True)):
        if story.event not in ("move", "moved"):
            continue
        first = story.ends[0]
        for picture, scene in enumerate(scenes):
            for old, new in zip(first.objects, scene.objects, strict=True):
                if picture and old.centre_px != new.centre_px:
                    x, y = (new.x_px - old.x_px) / scene.width_px, (new.y_px - old.y_px) / scene.height_px
                    found.append((index, picture, slot(new.x_px, new.y_px, gh, gw, 2)[0], x, y))
    table = np.array(found, np.float64).reshape(-1, 5)
    return (*table[:, :3].astype(np.int64).T, table[:, 3:].astype(np.float32))
