"""What tiny-vl is told in training besides its answers: where to look, and how things stand among all."""

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.testing.scene_words import article
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
            assert min(told) >= visual[-16], "in the last picture"
            assert told & set(visual[-16] + happened) or not len(happened)
    assert len(events) > 20


def test_where_a_clip_changes_the_tokens_are_told_what_stood_there(training):
    import tiny_vl_changes as changes

    from triptych.testing.scene_clips import draw_clip

    _, _, targets = training
    rng, gone = random.Random(6), 0
    for _ in range(60):
        clip = draw_clip(rng, (112, 112), 6)
        scenes = clip.scenes[1::2]
        shape, colour, *_, box = targets.stack_targets(scenes)[:5]
        events = changes.events_of([changes.Story((clip.scenes[0], clip.scenes[-1]), clip.event)], shape, colour, box)
        table = np.stack(changes.stood_there(events, shape, colour), -1)
        for _, later, token, colour_id, shape_id in table.tolist():
            stood = [
                (targets.COLOUR_ID[thing.colour], targets.SHAPE_ID[thing.shape] - 1)
                for thing in scenes[0].objects
                if targets.slot(*thing.centre_px, 4, 4, 2)[0] == token
            ]
            assert (colour_id, shape_id) in stood
            gone += events[0, later, token] == changes.GONE
        assert len(table) or clip.event not in ("go", "color")
    assert gone > 5


def test_each_name_of_a_list_is_looked_up_where_the_thing_is_and_its_end_nowhere(training):
    data, _, _ = training
    words, rng = data.Words(folder("tiny-vl")), random.Random(4)
    batch = data.still_batch(words, rng, 5, 4, 8, 120, None, ("list",), (0,))
    rank = batch.targets[6]
    lists = [asked[1:] for asked in batch.asked if asked[0] == "list" and rank[asked[1]].max() >= 0]
    for row, first, last in lists:
        visual = np.flatnonzero(batch.ids[row] == data.IMAGE_PAD)
        assert looked_at(batch, row, last - 1) == {visual[0] - 1}
        places = looked_at(batch, row, first)
        assert any(0 in rank[row, place - visual[0]] for place in places), "the leftmost thing comes first"
    assert lists


def test_lists_of_training_are_in_the_order_they_say(training):
    import tiny_vl_orders

    kinds = set()
    for seed in range(200):
        scene = draw_scene(seed, (168, 140), num_objects=3)
        question = tiny_vl_orders.ask_order(scene, random.Random(seed))
        if question:
            things = tiny_vl_orders.in_order(question.kind, scene.objects)
            assert question.answer.split(", ") == [article(thing.name) for thing in things]
            first = {"bottom to top": max(scene.objects, key=lambda thing: thing.y_px)}
            first["small to big"] = min(scene.objects, key=lambda thing: thing.radius_px)
            assert first.get(question.kind.removeprefix("list "), things[0]) == things[0]
            kinds.add(question.kind)
    assert len(kinds) == 5


def test_a_thing_at_a_tokens_edge_may_be_looked_for_beyond_it(training):
    _, _, targets = training
    assert targets.tokens_near(42, 14, 4, 4) == {1}
    assert targets.tokens_near(54.5, 14, 4, 4) == {1, 2}
    assert targets.tokens_near(56.5, 28, 4, 4) == {1, 2, 5, 6}
    assert targets.tokens_near(1, 111, 4, 4) == {12}, "nothing lies beyond the picture's own edge"


def test_attention_counts_things_and_not_the_tokens_they_may_be_looked_for_in(training):
    """Two things, the second at an edge: a third each, however the second's third is parted."""
    import tiny_vl_look

    noun, end, start = torch.tensor([0, 0]), torch.tensor([0, 0]), torch.tensor([0])
    at = torch.tensor([[1, -1, -1, -1], [2, 3, -1, -1]])

    def loss(*shares):
        first, last = torch.tensor(shares), torch.tensor([1 - 4e-9, 1e-9, 1e-9, 1e-9, 1e-9])
        return tiny_vl_look.count_loss(torch.stack((first, last)).log()[None], noun, end, at, start).item()

    third = 1 / 3
    best = loss(third, third, third, 1e-9, 1e-9)
    assert best == pytest.approx(math.log(3) / 2, rel=1e-4), "nothing is asked of the last picture but its start"
    assert loss(third, third, third / 2, third / 2, 1e-9) == pytest.approx(best, rel=1e-4)
    assert loss(0.25, 0.25, 0.25, 0.25, 1e-9) > best + 0.01
    assert loss(0.5, 0.25, 0.25, 1e-9, 1e-9) > best + 0.01


def test_the_second_of_two_nouns_is_told_how_its_thing_differs(training):
    data, _, _ = training
    words, rng = data.Words(folder("tiny-vl")), random.Random(5)
    scenes = [draw_scene(rng, (168, 140), num_objects=4) for _ in range(40)]
    found = 0
    for scene in scenes:
        asked = data.questions(scene, rng, 4, ("bigger",))
        row = data.build(words, rng, asked, [(1, 5, 6, 1, data.IMAGE_PAD)], 140)
        _, tokens, between = data.ground_between([row], [scene])
        known = dict(zip(tokens.tolist(), between[:, 2], strict=True))
        for (question, first, *_), (_, start, _) in zip(row.told, row.asked, strict=True):
            *_, second = [token for token, *_ in row.mentions if token < start] or [-1]
            if question.kind == "bigger" and second in known and question.text:
                is_second = question.text.rstrip("?").endswith(question.answer)
                assert (known[second] > 0) == (is_second == ("smaller" not in question.text))
                found += first > 0
    assert found > 10


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


def test_an_answer_looks_at_the_noun_that_it_is_about(training):
    """Of two at the second; of `the objects` in a list at none."""
    data, _, _ = training
    words, rng = data.Words(folder("tiny-vl")), random.Random(7)
    batch = data.still_batch(words, rng, 5, 4, 12, 160, None, ("count", "relation", "list"), (0,))
    rows, tokens, aim, at = batch.asked_aims
    told = {(rows[index], tokens[index]): place for index, place in zip(aim, at, strict=True)}
    nouns = {(row, token) for row, token, *_ in zip(*batch.mentions[:2], strict=True)}
    kinds = set()
    for kind, row, first, last in batch.asked:
        question = [token for token in range(first) if batch.segments[row, token] == batch.segments[row, first]]
        noun = told.get((row, first - 1))
        if kind in ("count", "relation") and noun is not None:
            named = [token for token in question if (row, token) in nouns]
            assert noun == named[-1]
            assert {told[row, token - 1] for token in range(first, last)} == {noun}
            kinds.add(kind)
        elif kind == "list":
            assert noun is None
            kinds.add(kind)
    assert kinds == {"count", "relation", "list"}


def test_attention_that_is_told_is_the_attention_that_is_paid(training):
    import tiny_vl_look

    torch.manual_seed(0)
    q, k, mask = torch.randn(5, 6, 40, 32), torch.randn(5, 6, 40, 32), torch.randn(5, 1, 40, 40)
    row, token = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([3, 9, 2, 39, 4, 4])
    given = tiny_vl_look.attention_of((0, 3), q, k, mask, row, token)
    paid = (q @ k.mT * 32**-0.5 + mask).log_softmax(-1)[:, (0, 3)][row, :, token]
    assert torch.allclose(given, paid, atol=1e-5)


def test_processes_that_train_together_share_gradients_and_work(training):
    """Threads stand in for processes: what is shared is the same memory and the same barrier."""
    from concurrent.futures import ThreadPoolExecutor

    from tiny_vl_together import Together

    params = [
        [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(1))]
    ]
    params.append([torch.nn.Parameter(param.detach().clone()) for param in params[0]])
    together = Together(2, params[0])
    params[0][0].grad, params[1][0].grad = torch.full((2, 3), 1.0), torch.full((2, 3), 3.0)
    params[1][1].grad = torch.full((4,), 8.0)
    stacks = [torch.arange(6.0).view(3, 2), torch.arange(2.0).view(1, 2)]
    done = [[], []]

    def work(rank):
        together.average(rank, params[rank])
        return together.agree(rank, 5.0 - rank), together.divided(
            rank, lambda stack: done[rank].append(len(stack)) or stack * 2, stacks
        )

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    for mine, (left_s, doubled) in zip(params, results, strict=True):
        assert (mine[0].grad == 2).all()
        assert (mine[1].grad == 4).all()
        assert mine[2].grad is None
        assert left_s == 5.0, "the first one's clock"
        assert all(torch.equal(got, stack * 2) for got, stack in zip(doubled, stacks, strict=True))
    assert done == [[1], [2, 1]], "each did its part only"
