"""The decode pool: bounded, fair to small work, and quick to let go."""

import asyncio
import threading
import time

import pytest

from triptych.core.clock import MonotonicClock
from triptych.core.errors import Cancelled, Overloaded
from triptych.media.pool import DecodePool


class pool:  # noqa: N801 - used as a context manager
    def __init__(self, workers=1, waiting=100):
        self.made = DecodePool(workers, waiting, MonotonicClock())

    async def __aenter__(self):
        self.made.start()
        return self.made

    async def __aexit__(self, *_):
        await asyncio.to_thread(self.made.close)


def steps(count, seconds, log, name="long", ended=None):
    """A job of many short steps."""
    try:
        for _ in range(count):
            time.sleep(seconds)
            yield
        log.append(name)
        return name
    finally:
        if ended is not None:
            ended.set()


async def test_results_and_errors_come_back():
    """Plain functions, generators, and what they raise."""

    def fails():
        raise ValueError("no")

    def fails_later():
        yield
        raise KeyError("later")

    async with pool() as p:
        assert await p.run(lambda: 3) == 3
        assert await p.run(lambda: steps(3, 0, [], "done")) == "done"
        with pytest.raises(ValueError, match="no"):
            await p.run(fails)
        with pytest.raises(KeyError):
            await p.run(fails_later)
        assert await p.run(lambda: 4) == 4
        assert p.num_waiting == 0


async def test_small_work_overtakes_a_running_film():
    """With a single worker, pictures that come during a long job do not wait for its end."""
    log = []
    async with pool(workers=1) as p:
        film = asyncio.create_task(p.run(lambda: steps(100, 0.005, log, "film"), cost_s=5.0))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(p.run(lambda i=i: log.append(i), cost_s=0.01) for i in range(5)))
        assert sorted(log) == [0, 1, 2, 3, 4]
        assert await film == "film"


async def test_films_leave_a_worker_for_the_short():
    """Two films and two workers: one film waits, the other worker serves pictures."""
    log, gate = [], threading.Event()

    def blocking():
        gate.wait(5)
        yield
        return "film"

    async with pool(workers=2) as p:
        films = [asyncio.create_task(p.run(blocking, cost_s=9.0)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(p.run(lambda: log.append("picture"), cost_s=0.01), 2)
        assert log == ["picture"]
        assert not any(film.done() for film in films)
        gate.set()
        assert await asyncio.gather(*films) == ["film", "film"]


async def test_cheap_jobs_go_first_and_old_ones_are_not_starved():
    """Waiting jobs run by arrival plus a multiple of cost."""
    log, gate = [], threading.Event()
    async with pool(workers=1) as p:
        blocker = asyncio.create_task(p.run(lambda: gate.wait(5)))
        await asyncio.sleep(0.02)
        costs = [0.2, 0.05, 0.1, 0.0]
        jobs = [asyncio.create_task(p.run(lambda c=c: log.append(c), cost_s=c)) for c in costs]
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(blocker, *jobs)
    assert log == sorted(costs)


async def test_full_queue_is_overload():
    """A job over the bound is refused at once, with the bound's name."""
    gate = threading.Event()
    async with pool(workers=1, waiting=2) as p:
        jobs = [asyncio.create_task(p.run(lambda: gate.wait(5)))]
        await asyncio.sleep(0.02)
        jobs += [asyncio.create_task(p.run(lambda: gate.wait(5))) for _ in range(2)]
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded, match="decode_queue of 2"):
            await p.run(lambda: 1)
        gate.set()
        await asyncio.gather(*jobs)


async def test_cancel_stops_a_decode_midway():
    """A cancelled generator is closed at its next yield, and frees its worker."""
    log, ended = [], threading.Event()
    async with pool(workers=1) as p:
        job = asyncio.create_task(p.run(lambda: steps(100_000, 0.001, log, ended=ended), cost_s=9.0))
        await asyncio.sleep(0.05)
        job.cancel()
        assert await asyncio.to_thread(ended.wait, 5)
        assert await p.run(lambda: "next") == "next"
        assert log == []


async def test_cancelled_waiting_job_never_runs():
    """What nobody waits for is dropped from the queue."""
    log, gate = [], threading.Event()
    async with pool(workers=1) as p:
        blocker = asyncio.create_task(p.run(lambda: gate.wait(5)))
        await asyncio.sleep(0.02)
        job = asyncio.create_task(p.run(lambda: log.append("ran")))
        await asyncio.sleep(0.02)
        job.cancel()
        await asyncio.sleep(0)
        gate.set()
        await blocker
        await p.run(lambda: None)
        assert log == []


async def test_close_ends_everything():
    """Running and waiting jobs end with an error, and the threads are gone."""
    ended = threading.Event()
    made = DecodePool(1, 10, MonotonicClock())
    made.start()
    running = asyncio.create_task(made.run(lambda: steps(100_000, 0.001, [], ended=ended)))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(made.run(lambda: 1))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(made.close)

    for job in (running, waiting):
        with pytest.raises(Cancelled):
            await job
    assert ended.is_set()
    assert not any(thread.is_alive() for thread in made._threads)
    with pytest.raises(Cancelled):
        await made.run(lambda: 1)
