"""The scheduler under random requests, budgets and cancels: everything finishes, everything is given back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import BudgetExceeded, PromptRefused
from triptych.core.media import Modality
from triptych.core.prepared import EncoderItem, PreparedRequest, Span
from triptych.core.sampling import SamplingParams
from triptych.core.stages import StageClock
from triptych.understand.blocks import BlockPool
from triptych.understand.encoder_cache import EncoderCache
from triptych.understand.schedule.limits import SchedulerLimits
from triptych.understand.schedule.scheduler import Scheduler
from triptych.understand.sequence import Sequence

BLOCK = 4


def make_scheduler(num_blocks=16, capacity_bytes=12, max_step_tokens=16, max_running=4):
    limits = SchedulerLimits(
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        max_waiting=64,
        max_model_tokens=1000,
        encoder_step_tokens=8,
        bytes_per_embed=1,
        embed_width=1,
        vocab_size=100,
    )
    return Scheduler(limits, BlockPool(num_blocks, BLOCK), EncoderCache(capacity_bytes))


def make_request(name, parts, max_tokens=4, *, whole=False, arrival_s=0.0):
    """`parts`: an int is so many text tokens; a (content, num_embeds) pair is a picture."""
    tokens, spans, items = [], [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [1 + (len(tokens) + i) % 50 for i in range(part)]
            continue
        content, num_embeds = part
        spans.append(Span(len(tokens), num_embeds, len(items)))
        items.append(
            EncoderItem(
                key=b"item%d" % content,
                modality=Modality.IMAGE,
                num_embeds=num_embeds,
                features={},
                batch_key="b",
                num_tokens_encoder=num_embeds,
                cost_flops=float(num_embeds),
            )
        )
        tokens += [99] * num_embeds
    return PreparedRequest(
        name,
        tokens,
        SamplingParams(max_tokens=max_tokens),
        tuple(spans),
        tuple(items),
        None,
        0,
        whole,
        b"",
        (),
        arrival_s,
    )


def withhold(request):
    """The request as it comes when its sender believes that the engine holds every picture."""
    return replace(request, items=tuple(replace(item, features=None, is_withheld=True) for item in request.items))


class Driver:
    """An engine without a model: every sampled token is 7, an encode takes `encode_steps` steps, and features that are
    asked for come `supply_steps` later."""

    def __init__(self, scheduler, encode_steps=1, supply_steps=1):
        self.scheduler, self.encode_steps, self.supply_steps = scheduler, encode_steps, supply_steps
        self.job, self.job_left, self.now_s = None, 0, 0.0
        self.finished = []
        self.asked, self.on_the_way = [], []

    def submit(self, request):
        self.scheduler.check(request)
        seq = Sequence.of(request, StageClock(self.now_s))
        self.scheduler.add(seq)
        return seq

    def step(self):
        s = self.scheduler
        self.now_s += 1.0
        s.admit()
        self.supply(s.reserve_items(self.now_s))
        if self.job is None:
            self.job = s.next_job(flops_per_s=1.0, now_s=self.now_s)
            self.job_left = self.encode_steps
        if self.job is not None:
            self.job_left -= 1
            if self.job_left <= 0:
                for item in self.job.items:
                    s.cache.mark_ready(item.key, 1.0)
                self.job = None
        rows = s.plan_rows(soft_cap_tokens=8)
        assert sum(row.num_new for row in rows) <= s.limits.max_step_tokens
        for row in rows:
            self.check_row(row)
            s.commit(row.seq, row.num_new)
            if not row.seq.num_uncomputed:
                row.seq.tokens.append(7)
                if row.seq.num_output_tokens >= s.max_output_tokens(row.seq.request):
                    s.remove(row.seq)
                    self.finished.append(row.seq.request_id)
        s.check_integrity()
        return bool(rows) or self.job is not None

    def supply(self, wanted):
        self.on_the_way += [(self.now_s + self.supply_steps, *each) for each in wanted.items()]
        self.asked += [(name, idx) for name, indices in wanted.items() for idx in indices]
        due = [each for each in self.on_the_way if each[0] <= self.now_s]
        self.on_the_way = [each for each in self.on_the_way if each[0] > self.now_s]
        for _, name, indices in due:
            for seq in [s for s in self.scheduler.running + self.scheduler.waiting if s.request_id == name]:
                items = {idx: replace(seq.item(idx), features={}, is_withheld=False) for idx in indices}
                self.scheduler.supply(seq, items)

    def check_row(self, row):
        """What is computed has its embeddings, its blocks, and no whole span split."""
        start, end = row.seq.num_computed, row.seq.num_computed + row.num_new
        assert len(row.seq.block_table) * BLOCK >= end
        for span in row.seq.request.spans:
            if span.start < end and span.end > start:
                assert self.scheduler.cache.is_ready(row.seq.item(span.item_idx).key)
                if row.seq.request.whole_spans:
                    assert start <= span.start
                    assert span.end <= end


pictures = st.tuples(st.integers(0, 6), st.integers(1, 12))
prompts = st.lists(st.one_of(st.integers(1, 20), pictures), min_size=1, max_size=5)


@st.composite
def workloads(draw):
    whole = draw(st.booleans())
    sizes = {}
    out = []
    for i in range(draw(st.integers(1, 10))):
        parts = [
            (p[0], sizes.setdefault(p[0], p[1])) if isinstance(p, tuple) else p for p in draw(prompts)
        ]  # one content has one size
        cancel_after = draw(st.one_of(st.none(), st.integers(0, 12)))
        request = make_request(f"r{i}", parts, draw(st.integers(1, 9)), whole=whole, arrival_s=float(i))
        out.append((withhold(request) if draw(st.booleans()) else request, cancel_after))
    return out


@settings(max_examples=300, deadline=None)
@given(
    workloads(),
    st.integers(8, 24),
    st.integers(12, 24),
    st.integers(12, 20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_every_request_that_fits_alone_finishes(
    work, num_blocks, capacity, step_tokens, max_running, encode_steps, supply_steps
):
    """No two requests that fit alone ever block each other, and all that was reserved is released; whether features
    come at once, or late, because their sender was wrong about what is held here."""
    driver = Driver(make_scheduler(num_blocks, capacity, step_tokens, max_running), encode_steps, supply_steps)
    accepted = {}
    for request, cancel_after in work:
        try:
            accepted[request.request_id] = (driver.submit(request), cancel_after)
        except BudgetExceeded:
            continue
    cancelled = set()
    for step in range(2000):
        for name, (seq, cancel_after) in accepted.items():
            if cancel_after == step and name not in driver.finished:
                driver.scheduler.remove(seq)
                cancelled.add(name)
        if not driver.scheduler.has_work:
            break
        driver.step()

    assert set(accepted) - cancelled == set(driver.finished) - cancelled
    assert driver.scheduler.pool.num_used == 0
    assert not driver.scheduler.waiting_items or driver.job is not None
    assert len(driver.asked) == len(set(driver.asked))  # nothing is asked for twice


def test_item_larger_than_the_cache_is_refused_at_the_door():
    """What can never fit is refused with the limit's name, not left to hang."""
    driver = Driver(make_scheduler(capacity_bytes=5))

    with pytest.raises(BudgetExceeded, match="encoder_cache_bytes is 5, the request has 6"):
        driver.submit(make_request("r", [3, (0, 6)]))


def test_placeholder_count_must_equal_embeddings():
    """A mismatch is refused before admission: it never reaches a scatter."""
    request = make_request("r", [3, (0, 6)])
    broken = PreparedRequest("r", request.token_ids, request.sampling, (Span(3, 5, 0),), request.items)

    with pytest.raises(PromptRefused, match="6 image embeddings for 5 placeholders"):
        Driver(make_scheduler()).submit(broken)


def test_same_picture_is_encoded_once_for_two_requests():
    """The second request joins the encode in flight."""
    driver = Driver(make_scheduler(), encode_steps=3)
    a = driver.submit(make_request("a", [2, (0, 6)]))
    b = driver.submit(make_request("b", [3, (0, 6)], arrival_s=1.0))
    while driver.scheduler.has_work:
        driver.step()

    assert (a.encoder_misses, b.encoder_misses) == (1, 0)
    assert b.encoder_hits == 1


def test_text_is_not_held_by_a_picture_in_the_encoder():
    """A text request behind a picture request gets tokens while the picture is encoded."""
    driver = Driver(make_scheduler(), encode_steps=50)
    driver.submit(make_request("picture", [2, (0, 6)]))
    driver.submit(make_request("text", [5], arrival_s=1.0))
    for _ in range(10):
        driver.step()

    assert driver.finished == ["text"]


def test_prefix_hit_needs_the_same_picture_at_the_same_place():
    """Same tokens, another picture: only the blocks before the picture are shared (U7)."""
    driver = Driver(make_scheduler(num_blocks=32))
    seqs = []
    for name, content in (("a", 0), ("b", 0), ("c", 1)):
        seqs.append(driver.submit(make_request(name, [4, (content, 8), 4])))
        while driver.scheduler.has_work:
            driver.step()

    assert [seq.num_cached_tokens for seq in seqs] == [0, 12, 4]


def test_cheap_items_go_first_until_the_dear_one_has_waited():
    """Shortest first, but a second of waiting outweighs a second of work."""
    scheduler = make_scheduler(num_blocks=64, capacity_bytes=60, max_running=8)
    driver = Driver(scheduler, encode_steps=1)
    order = []
    driver.submit(make_request("large", [1, (0, 12)]))
    for i in range(1, 7):
        driver.submit(make_request(f"small{i}", [1, (i, 7)], arrival_s=float(i)))
    scheduler.admit()
    scheduler.reserve_items(0.0)
    while (job := scheduler.next_job(flops_per_s=10.0, now_s=float(len(order)) * 0.1)) is not None:
        order += [item.key for item in job.items]

    assert order[0] != b"item0"
    assert b"item0" in order


def test_preempted_sequence_resumes_and_the_oldest_never_is():
    """Two that fit alone but not together: the younger gives way, both finish."""
    driver = Driver(make_scheduler(num_blocks=6, max_running=2))
    a = driver.submit(make_request("a", [8], max_tokens=12))
    b = driver.submit(make_request("b", [9], max_tokens=12, arrival_s=1.0))
    for _ in range(200):
        if driver.scheduler.has_work:
            driver.step()

    assert (a.num_preemptions, b.num_preemptions > 0) == (0, True)
    assert sorted(driver.finished) == ["a", "b"]


def test_what_is_held_is_not_asked_for():
    """A withheld picture whose embeddings are there, or whose tokens are in the prefix cache, is served without its
    features; one that was dropped is asked for once, with all others that are missing, and encoded."""
    driver = Driver(make_scheduler(num_blocks=32, capacity_bytes=12))
    run = []
    for name, parts, forget in (
        ("first", [4, (0, 4), 4, (1, 4), 1], ()),
        ("held", [1, (0, 4), 4, (1, 4), 1], ()),
        ("cached", [4, (0, 4), 4, (1, 4), 1], ("encoder",)),
        ("dropped", [2, (0, 4), 4, (1, 4), 1], ("encoder",)),
    ):
        if forget:
            driver.scheduler.cache.flush()
        request = make_request(name, parts)
        run.append(driver.submit(request if name == "first" else withhold(request)))
        while driver.scheduler.has_work:
            driver.step()

    assert driver.finished == ["first", "held", "cached", "dropped"]
    assert driver.asked == [("dropped", 0), ("dropped", 1)]
    assert [seq.encoder_misses for seq in run] == [2, 0, 0, 2]
