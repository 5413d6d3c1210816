"""What tiny-vl is told in training besides its answers: where to look, and how things stand among all."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from triptych.testing.scenes import draw_scene
from triptych.zoo import folder

TOOLS = Path(__file__).parents[2] / "tools/train"


@pytest.fixture(scope="module")
def training():
    sys.path.insert(0, str(TOOLS))
    try:
        import tiny_vl_aims
        import tiny_vl_data
        import tiny_vl_targets

        yield tiny_vl_data, tiny_vl_aims, tiny_vl_targets
    finally:
        sys.path.remove(str(TOOLS))


def looked_at(batch, row: int, token: int) -> set[int]:
    """Positions in its row that the token before this one is to look at."""
    rows, tokens, aim, at = batch.aims
    return {
        int(place) for index, place in zip(aim, at, strict=True) if (rows[index], tokens[index]) == (row, token - 1)
    }


def test_what_happens_in_a_clip_is_looked_up_in_its_last_picture(training):
    """The verb of `The red circle moves left.` is seen where the thing is at the end; `Nothing changes.` nowhere."""
    data, _, _ = training
    words, rng = data.Words(folder("tiny-vl")), random.Random(3)
    batches = [data.clip_batch(words, rng, 4, 4, 8, 140, 6) for _ in range(4)]
    events = [(batch, *asked[1:]) for batch in batches for asked in batch.asked if asked[0] == "clip event"]
    still = {words.ids("Nothing changes.")}
    for batch, row, first, last in events:
        visual = np.flatnonzero(batch.ids[row] == data.VIDEO_PAD)
        told = looked_at(batch, row, last - 2)  # the full stop; END follows
        if tuple(batch.ids[row, first : last - 1]) in still:
            assert told == {visual[0] - 1}
        else:
            happened = np.flatnonzero(batch.events[row, -1])
            (place,) = told
            assert place >= visual[-16], "in the last picture"
            assert place - visual[-16] in happened or not len(happened)
    assert len(events) > 20


def test_each_name_of_a_list_is_looked_up_where_the_thing_is_and_its_end_nowhere(training):
    data, _, _ = training
    words, rng = data.Words(folder("tiny-vl")), random.Random(4)
    batch = data.still_batch(words, rng, 5, 4, 8, 120, None, ("list",), (0,))
    rank = batch.targets[6]
    lists = [asked[1:] for asked in batch.asked if asked[0] == "list" and rank[asked[1]].max() >= 0]
    for row, first, last in lists:
        visual = np.flatnonzero(batch.ids[row] == data.IMAGE_PAD)
        assert looked_at(batch, row, last - 1) == {visual[0] - 1}
        (place,) = looked_at(batch, row, first)
        assert 0 in rank[row, place - visual[0]], "the leftmost thing comes first"
    assert lists


def test_ranks_and_extremes_are_those_of_the_scene(training):
    _, _, targets = training
    for seed in range(20):
        scene = draw_scene(seed, (224, 168))
        _, _, _, _, box, _, rank, extreme, *_ = targets.dense_targets(scene)
        held = rank >= 0
        assert (held == (box[..., 0] > -5)).all()
        if not held.any():
            continue
        things = sorted(scene.objects, key=lambda thing: thing.x_px)
        token, part = targets.slot(things[-1].x_px, things[-1].y_px, 6, 8, 2)
        assert rank[token, part] == min(len(things), targets.MOST_RANKED) - 1
        assert extreme[token, part, 1] != 0, "the last from the left is rightmost, or another nearly is"
        assert ((extreme[held] == 1).sum(0) <= 1).all(), "one leftmost, one biggest"
