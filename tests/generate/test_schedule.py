"""The step scheduler, alone: random arrivals, lengths, keys and cancels."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.generate.schedule import BatchKey, BatchSizer, Job, StepScheduler

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
        sizer.observe("64x64", branches, 10.0 if branches <= 8 else 10.0 * branches / 8)

    assert sizer.max_branches("64x64", 16) == 8


def test_batch_of_costly_rows_is_bounded_by_tokens():
    """The token bound holds whatever was measured, and a single row is always allowed."""
    sizer = BatchSizer(max_step_tokens=1000)
    for rung in (1, 2, 4, 8, 16):
        sizer.observe("big", rung, 1.0)

    assert (sizer.max_branches("big", 100), sizer.max_branches("big", 5000)) == (10, 1)


def test_a_slow_first_measurement_is_tried_again():
    """A rung that looked slow once is not shut for ever."""
    sizer = BatchSizer()
    sizer.observe("s", 1, 10.0)
    sizer.observe("s", 2, 500.0)
    assert sizer.max_branches("s", 1) == 1

    for _ in range(256):
        sizer.observe("s", 1, 10.0)

    assert sizer.max_branches("s", 1) == 2
