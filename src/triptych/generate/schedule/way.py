"""How a step is run: on how many workers at once, each on how many cores. Which is fastest is measured, not known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """`num_workers` run a part of the branches each, at the same time, each with `num_threads` cores."""

    num_workers: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.num_workers}x{self.num_threads}"

    @classmethod
    def parse(cls, text: str) -> Way | None:
        """The inverse of `str`; None for what is none."""
        workers, _, threads = text.partition("x")
        if not (workers.isdecimal() and threads.isdecimal() and int(workers) and int(threads)):
            return None
        return cls(int(workers), int(threads))


ONE_WORKER = Way(1, 1)


def ways_of(num_threads: int) -> tuple[Way, ...]:
    """The ways worth measuring on so many cores: one worker on all of them, more workers on fewer each, and one worker
    on one core, which is fastest where a model's products are too small to share."""
    ways = [Way(1, num_threads)]
    num_workers = 2
    while num_workers <= num_threads:
        ways.append(Way(num_workers, num_threads // num_workers))
        num_workers *= 2
    if num_threads > 1:
        ways.append(ONE_WORKER)
    return tuple(ways)
