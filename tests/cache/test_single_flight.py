"""Single flight: once for all who ask at the same moment, whoever leaves first."""

import asyncio

import pytest

from triptych.cache import SingleFlight


class Work:
    """Counts its runs, ends when released, and notes that it was cancelled."""

    def __init__(self, result="done"):
        self.result, self.num_runs, self.was_cancelled = result, 0, False
        self.release = asyncio.Event()

    async def __call__(self):
        self.num_runs += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def start(flight, work, count):
    tasks = [asyncio.create_task(flight.run("key", work)) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


async def test_same_key_runs_once():
    """Ten callers, one run, ten results."""
    flight, work = SingleFlight(), Work()
    tasks = await start(flight, work, 10)
    work.release.set()

    assert await asyncio.gather(*tasks) == ["done"] * 10
    assert (work.num_runs, flight.num_joined, flight.num_in_flight) == (1, 9, 0)


async def test_work_survives_its_leader():
    """The first caller's cancellation does not touch the others."""
    flight, work = SingleFlight(), Work()
    leader, follower = await start(flight, work, 2)
    leader.cancel()
    await asyncio.sleep(0.01)
    work.release.set()

    assert await follower == "done"
    assert leader.cancelled()
    assert not work.was_cancelled


async def test_work_ends_when_nobody_waits():
    """The last caller to leave takes the work along, and the next caller starts it anew."""
    flight, work = SingleFlight(), Work()
    tasks = await start(flight, work, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    again = asyncio.create_task(flight.run("key", work))
    await asyncio.sleep(0.01)
    work.release.set()

    assert await again == "done"
    assert work.was_cancelled
    assert work.num_runs == 2


async def test_failure_reaches_every_waiter_and_is_not_kept():
    """All who waited see the error; who comes later tries again."""
    flight, work = SingleFlight(), Work(ValueError("no"))
    tasks = await start(flight, work, 3)
    work.release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(error) for error in results] == ["no"] * 3
    work.result = "better"
    assert await flight.run("key", work) == "better"


async def test_different_keys_do_not_meet():
    """Each key has its own flight."""
    flight = SingleFlight()

    async def echo(value):
        return value

    assert await asyncio.gather(flight.run(1, lambda: echo("a")), flight.run(2, lambda: echo("b"))) == ["a", "b"]


async def test_close_cancels_what_is_in_flight():
    """After close nothing runs, and waiters learn of it."""
    flight, work = SingleFlight(), Work()
    (task,) = await start(flight, work, 1)
    await flight.close()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.was_cancelled
    assert flight.num_in_flight == 0
