"""The step scheduler, alone: random arrivals, lengths, keys and cancels."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.generate.schedule import ONE_WORKER, BatchKey, BatchSizer, Job, StepScheduler, Way, ways_of

SIZES = (64, 128, 256)


def key_of(width_px: int) -> BatchKey:
    return BatchKey("m", width_px, width_px)


def job_of(job_id: str, width_px: int = 64, num_steps: int = 4, num_branches: int = 2) -> Job:
    return Job(job_id, key_of(width_px), num_steps, num_branches, (width_px // 16) ** 2)


def run_to_end(scheduler: StepScheduler, max_steps: int = 10_000) -> list[tuple[BatchKey, tuple[str, ...]]]:
    trace = []
    while (plan := scheduler.plan()) is not None:
        trace.append((plan.key, plan.job_ids))
        scheduler.settle(plan)
        scheduler.check_integrity()
        assert len(trace) < max_steps, "no progress"
    return trace


jobs = st.lists(
    st.tuples(st.sampled_from(SIZES), st.integers(1, 12), st.sampled_from((1, 2)), st.integers(0, 10)), max_size=20
)


@given(jobs, st.integers(1, 16))
def test_every_job_gets_exactly_its_steps(arrivals, max_branches):
    """Whatever arrives when, each row takes part in as many steps as it asked for, only with rows of its key."""
    scheduler = StepScheduler(BatchSizer(max_branches=max_branches))
    pending = sorted(enumerate(arrivals), key=lambda item: item[1][3])
    taken: Counter[str] = Counter()
    edge = 0
    while pending or len(scheduler):
        while pending and pending[0][1][3] <= edge:
            index, (width_px, num_steps, num_branches, _) = pending.pop(0)
            scheduler.join(job_of(str(index), width_px, num_steps, num_branches))
        plan = scheduler.plan()
        if plan is not None:
            assert len(set(plan.job_ids)) == len(plan.job_ids)
            assert all(key_of(arrivals[int(job_id)][0]) == plan.key for job_id in plan.job_ids)
            assert len(plan.job_ids) == 1 or plan.num_branches <= max_branches
            taken.update(plan.job_ids)
            scheduler.settle(plan)
            scheduler.check_integrity()
        edge += 1

    assert {str(i): steps for i, (_, steps, _, _) in enumerate(arrivals)} == dict(taken)


@given(jobs, st.data())
def test_a_row_that_left_never_runs_again(arrivals, data):
    """A row taken out at any edge is in no later plan, and the others still finish."""
    scheduler = StepScheduler(BatchSizer())
    for index, (width_px, num_steps, num_branches, _) in enumerate(arrivals):
        scheduler.join(job_of(str(index), width_px, num_steps, num_branches))
    gone: set[str] = set()
    while (plan := scheduler.plan()) is not None:
        assert not gone & set(plan.job_ids)
        scheduler.settle(plan)
        if arrivals and data.draw(st.booleans()):
            victim = str(data.draw(st.integers(0, len(arrivals) - 1)))
            if scheduler.leave(victim):
                gone.add(victim)
        scheduler.check_integrity()

    assert len(scheduler) == 0


@given(st.lists(st.sampled_from(SIZES), min_size=2, max_size=3, unique=True), st.integers(1, 6))
def test_backlogged_keys_get_equal_cost(widths, rows):
    """While every key has work, what two keys were served differs by at most two of the dearest steps."""
    scheduler = StepScheduler(BatchSizer(max_branches=8))
    for width_px in widths:
        for index in range(rows):
            scheduler.join(job_of(f"{width_px}-{index}", width_px, num_steps=10_000))
    served: Counter[BatchKey] = Counter()
    dearest = 0
    for _ in range(300):
        plan = scheduler.plan()
        served[plan.key] += plan.step_tokens
        dearest = max(dearest, plan.step_tokens)
        scheduler.settle(plan)
        if len(served) == len(widths):
            assert max(served.values()) - min(served.values()) <= 3 * dearest


def test_short_job_overtakes_a_long_one():
    """Where only one row fits, a job of 4 steps that arrives behind one of 50 is not held up by it."""
    scheduler = StepScheduler(BatchSizer(max_branches=1))
    scheduler.join(job_of("long", num_steps=50))
    scheduler.settle(scheduler.plan())
    scheduler.join(job_of("short", num_steps=4))

    assert [ids for _, ids in run_to_end(scheduler)][:4] == [("short",)] * 4


@settings(max_examples=30)
@given(st.integers(1, 20))
def test_a_stream_of_short_jobs_does_not_starve_a_long_one(num_steps):
    """With a new one-step job at every edge and room for one row, a long job still ends in bounded time."""
    scheduler = StepScheduler(BatchSizer(max_branches=1))
    scheduler.join(job_of("long", num_steps=num_steps))
    for edge in range(3 * num_steps + 3):
        scheduler.join(job_of(f"short-{edge}", num_steps=1))
        plan = scheduler.plan()
        if "long" in scheduler.settle(plan):
            return

    raise AssertionError("the long job starved")


def test_batch_grows_while_it_pays_and_stops_at_the_knee():
    """With free batching up to 8 branches and none beyond, the sizer settles at 8."""
    sizer = BatchSizer()
    for _ in range(20):
        branches = sizer.max_branches("64x64", 16)
        sizer.observe("64x64", branches, 16, ONE_WORKER, 10.0 if branches <= 8 else 10.0 * branches / 8)

    assert sizer.max_branches("64x64", 16) == 8


def test_batch_of_costly_rows_is_bounded_by_tokens():
    """The token bound holds whatever was measured, and a single row is always allowed."""
    sizer = BatchSizer(max_step_tokens=1000)
    for rung in (1, 2, 4, 8, 16):
        sizer.observe("big", rung, 100, ONE_WORKER, 1.0)

    assert (sizer.max_branches("big", 100), sizer.max_branches("big", 5000)) == (10, 1)


def test_a_slow_first_measurement_is_tried_again():
    """A rung that looked slow once is not shut for ever."""
    sizer = BatchSizer()
    sizer.observe("s", 1, 1, ONE_WORKER, 10.0)
    sizer.observe("s", 2, 1, ONE_WORKER, 500.0)
    assert sizer.max_branches("s", 1) == 1

    for _ in range(256):
        sizer.observe("s", 1, 1, ONE_WORKER, 10.0)

    assert sizer.max_branches("s", 1) == 2


def settled(cost_ms, ways, shape="s", branch_tokens=16, num_steps=100):
    """A sizer that served one shape with every batch full, where a step costs `cost_ms(branches, way)`."""
    sizer = BatchSizer(ways=ways, max_branches=64)
    for _ in range(num_steps):
        num_branches = sizer.max_branches(shape, branch_tokens)
        way = sizer.way(shape, num_branches, branch_tokens)
        sizer.observe(shape, num_branches, branch_tokens, way, cost_ms(num_branches, way))
    return sizer


def test_a_rung_that_gains_little_does_not_hide_a_better_one_above():
    """From one to two branches gains 4%, from two to four 60%: the knee is four, not one."""
    each_ms = {1: 10.0, 2: 9.6, 4: 6.0, 8: 6.5, 16: 7.0}
    sizer = settled(lambda num_branches, way: num_branches * each_ms[num_branches], (ONE_WORKER,))

    assert sizer.max_branches("s", 16) == 4


def test_a_batch_never_goes_past_the_best_time_a_branch():
    """Where a branch costs more from four on, batches stay at two."""
    each_ms = {1: 10.0, 2: 8.0, 4: 9.0, 8: 12.0}
    sizer = settled(lambda num_branches, way: num_branches * each_ms[num_branches], (ONE_WORKER,))

    assert sizer.max_branches("s", 16) == 2


@given(st.permutations(ways_of(4)), st.randoms(use_true_random=False))
def test_the_fastest_way_measured_is_taken(ranked, random):
    """Whichever of the ways is fastest, up to 30% of noise above its time, a served shape comes to run that way."""
    base_ms = {way: 10.0 * 1.4**rank for rank, way in enumerate(ranked)}
    sizer = settled(lambda num_branches, way: base_ms[way] * random.uniform(1.0, 1.3), ways_of(4))
    knee = sizer.knee("s")

    usable = [way for way in ranked if way.num_workers <= knee]
    assert sizer.way("s", knee, 16) == usable[0]


def test_more_workers_than_branches_are_never_asked_for():
    """One branch has one worker; two have two at most."""
    sizer = BatchSizer(ways=ways_of(8))

    assert ways_of(8) == (Way(1, 8), Way(2, 4), Way(4, 2), Way(8, 1), Way(1, 1))
    for num_branches in range(1, 20):
        for _ in range(12):
            way = sizer.way("s", num_branches, 16)
            assert way.num_workers <= num_branches
            sizer.observe("s", num_branches, 16, way, 1.0 + num_branches)


def test_a_shape_never_run_borrows_from_its_neighbour():
    """A quarter of the tokens starts at four times the branches and in the neighbour's way."""
    two = Way(2, 1)
    sizer = settled(lambda num_branches, way: (10 if way == two else 12) * max(1, num_branches / 4), ways_of(2))
    assert (sizer.knee("s"), sizer.way("s", 4, 16)) == (4, two)

    assert (sizer.max_branches("small", 4), sizer.way("small", 16, 4)) == (16, two)
    assert sizer.max_branches("large", 64) == 2


def test_a_way_that_is_hopeless_for_one_branch_is_not_tried_for_two():
    """Half as slow again as the best of the rung below is too slow; less, or not measured there, is not."""
    shared, halved, single = ways_of(2)
    sizer = BatchSizer(ways=ways_of(2), max_branches=4)
    for way, step_ms in ((shared, 16.0), (single, 10.0)):
        sizer.observe("one", 1, 64, way, step_ms)
        sizer.observe("other", 1, 64, way, min(step_ms, 14.0))

    assert [sizer.is_worth_trying("one", 2, way) for way in (shared, halved, single)] == [False, True, True]
    assert [sizer.is_worth_trying("other", 2, way) for way in (shared, halved, single)] == [True, True, True]


def test_a_busy_moment_does_not_shut_a_way_for_ever():
    """A way that looked slow once is tried again after some hundred steps."""
    slow, fast = Way(1, 2), Way(2, 1)
    sizer = BatchSizer(ways=(slow, fast), max_branches=2)
    for way, ms in ((slow, 10.0), (slow, 10.0), (fast, 14.0), (fast, 14.0)):
        sizer.observe("s", 2, 16, way, ms)
    taken = []
    for _ in range(600):
        taken.append(sizer.way("s", 2, 16))
        sizer.observe("s", 2, 16, taken[-1], 10.0 if taken[-1] == slow else 5.0)

    assert taken[0] == slow
    assert taken[-1] == fast
