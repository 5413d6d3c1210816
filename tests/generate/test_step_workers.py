"""Parts of a step side by side: each on its own cores, one failure at a time."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from triptych.core.errors import ModelFault
from triptych.generate.runner import StepRunner
from triptych.generate.schedule import Way
from triptych.generate.step_workers import StepWorkers
from triptych.models.cpu_threads import can_limit_threads, on_cores

from .conftest import Toys
from .test_isolation import rows_of

needs_limits = pytest.mark.skipif(not can_limit_threads(), reason="torch is built on other libraries here")


@needs_limits
def test_cores_are_set_for_one_thread_and_given_back():
    """Two threads with other numbers of cores at the same time; afterwards each has its own again."""
    both = threading.Barrier(2)
    seen = {}

    def look(name: str, num_threads: int) -> None:
        before = torch.get_num_threads()
        with on_cores(num_threads):
            both.wait(20)
            seen[name] = torch.get_num_threads()
            both.wait(20)
        seen[name + " after"] = torch.get_num_threads() - before

    other = threading.Thread(target=look, args=("other", 3))
    other.start()
    look("here", 2)
    other.join()

    assert seen == {"here": 2, "other": 3, "here after": 0, "other after": 0}


@needs_limits
def test_a_product_on_one_core_takes_one_core():
    """No other thread of the process works on it, whatever the process may use: its CPU time is this thread's."""
    factor = torch.rand(700, 700)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with on_cores(1):
            process_s, thread_s = time.process_time(), time.thread_time()
            for _ in range(20):
                factor @ factor
            process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
    finally:
        torch.set_num_threads(before)

    assert thread_s > 0.7 * process_s


def test_parts_run_at_the_same_time_and_answer_in_order():
    """Three parts that wait for one another end, which they could not one after the other."""
    together = threading.Barrier(3)
    workers = StepWorkers(3)

    def part(index: int) -> int:
        together.wait(20)
        return index

    assert workers.run([lambda index=index: part(index) for index in range(3)], Way(3, 1)) == [0, 1, 2]
    workers.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_waits_for_the_other_parts(failing: int):
    """The error is raised once nothing of the step runs any more."""
    workers, ended = StepWorkers(2), []

    def part(index: int) -> None:
        if index == failing:
            raise RuntimeError("of one part")
        time.sleep(0.05)
        ended.append(index)

    with pytest.raises(RuntimeError, match="of one part"):
        workers.run([lambda index=index: part(index) for index in range(2)], Way(2, 1))
    workers.close()

    assert ended == [1 - failing]


@torch.inference_mode()
def test_a_row_that_raises_fails_alone_among_workers(toys: Toys, monkeypatch: pytest.MonkeyPatch):
    """The model raises on one row's part: that row fails, the others are to the bit as without it."""
    kind = toys.kind("pixart")
    rows, left, workers = rows_of(kind, "pixart"), rows_of(kind, "pixart"), StepWorkers(2)
    runner = StepRunner(kind, workers=workers)
    runner.step([left[0], left[2]], way=Way(2, 1))
    victim, real = rows[1].branches[0]["encoder_hidden_states"], kind.forward

    def forward(latents, timestep, cond, request):
        texts = cond["encoder_hidden_states"]
        if any(torch.equal(text[: victim.shape[1]], victim[0]) for text in texts):
            raise ValueError("not this one")
        return real(latents, timestep, cond, request)

    monkeypatch.setattr(kind, "forward", forward)
    outcome = runner.step(rows, way=Way(2, 1))
    workers.close()

    assert list(outcome.failures) == [1]
    assert isinstance(outcome.failures[1], ModelFault)
    assert [row.step for row in rows] == [1, 0, 1]
    assert all(torch.equal(rows[index].latents, left[index].latents) for index in (0, 2))
