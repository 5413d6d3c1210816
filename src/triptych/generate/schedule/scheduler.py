"""The step scheduler: rows join and leave at step edges, keys take turns by deficit round robin.

Inside a key, rows are ordered by a fixed virtual deadline: the key's step count at their arrival plus their own number
of steps. A short job overtakes a long one, and nobody starves: every later arrival has a later deadline once the key
has moved on by as many steps as the waiting row is long.

Between keys, each turn adds one quantum (the dearest step that any key would run now), and a key spends it in steps, so
a key of small pictures runs several steps for one step of large ones and neither holds the other up.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from triptych.generate.schedule.job import BatchKey, Job, StepPlan
from triptych.generate.schedule.sizer import BatchSizer


@dataclass(slots=True)
class _Row:
    job: Job
    deadline: int
    order: int
    steps_done: int = 0


@dataclass(slots=True)
class _Lane:
    """All rows of one key. `deficit_tokens` is what the key may still spend in its turn."""

    rows: list[_Row] = field(default_factory=list)
    num_steps_run: int = 0
    deficit_tokens: int = 0


class StepScheduler:
    """Owns which rows are in the denoising stage and how far each one is. Called from the step loop's thread only."""

    def __init__(self, sizer: BatchSizer) -> None:
        self._sizer = sizer
        self._lanes: OrderedDict[BatchKey, _Lane] = OrderedDict()  # the first one has the turn
        self._key_of: dict[str, BatchKey] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._key_of

    def join(self, job: Job) -> None:
        """Add a row; it takes part from the next plan on."""
        assert job.job_id not in self._key_of, f"{job.job_id} joined twice"
        lane = self._lanes.setdefault(job.key, _Lane())
        lane.rows.append(_Row(job, lane.num_steps_run + job.num_steps, self._num_arrivals))
        lane.rows.sort(key=lambda row: (row.deadline, row.order))
        self._key_of[job.job_id] = job.key
        self._num_arrivals += 1

    def leave(self, job_id: str) -> bool:
        """Take a row out (cancelled, failed, out of time). False when it is not here."""
        key = self._key_of.pop(job_id, None)
        if key is None:
            return False
        lane = self._lanes[key]
        lane.rows = [row for row in lane.rows if row.job.job_id != job_id]
        if not lane.rows:
            del self._lanes[key]
        return True

    def plan(self) -> StepPlan | None:
        """The next step, or None when no row is here. Charges the key whose turn it is; no row moves until `settle`."""
        if not self._lanes:
            return None
        plans = {key: self._batch(key, lane) for key, lane in self._lanes.items()}
        quantum = max(plan.step_tokens for plan in plans.values())
        key, lane = next(iter(self._lanes.items()))
        if lane.deficit_tokens < plans[key].step_tokens:
            self._lanes.move_to_end(key)
            key, lane = next(iter(self._lanes.items()))
            lane.deficit_tokens += quantum
        lane.deficit_tokens -= plans[key].step_tokens
        return plans[key]

    def _batch(self, key: BatchKey, lane: _Lane) -> StepPlan:
        branch_tokens = lane.rows[0].job.branch_tokens
        room = self._sizer.max_branches(str(key), branch_tokens)
        chosen, num_branches = [lane.rows[0].job], lane.rows[0].job.num_branches
        for row in lane.rows[1:]:
            if num_branches + row.job.num_branches <= room:
                chosen.append(row.job)
                num_branches += row.job.num_branches
        return StepPlan(
            key,
            tuple(job.job_id for job in chosen),
            num_branches,
            num_branches * branch_tokens,
            branch_tokens,
            self._sizer.way(str(key), num_branches, branch_tokens),
        )

    def settle(self, plan: StepPlan) -> list[str]:
        """Count one step for each row of `plan` that is still here; take out and return those at their end."""
        lane = self._lanes.get(plan.key)
        if lane is None:
            return []
        lane.num_steps_run += 1
        ran = set(plan.job_ids)
        finished = []
        for row in lane.rows:
            if row.job.job_id in ran:
                row.steps_done += 1
                if row.steps_done == row.job.num_steps:
                    finished.append(row.job.job_id)
        for job_id in finished:
            self.leave(job_id)
        return finished

    def depth_by_key(self) -> dict[str, int]:
        """Rows by key, for metrics."""
        return {str(key): len(lane.rows) for key, lane in self._lanes.items()}

    def check_integrity(self) -> None:
        here = {row.job.job_id: key for key, lane in self._lanes.items() for row in lane.rows}
        assert here == self._key_of, "rows and index differ"
        for key, lane in self._lanes.items():
            assert lane.rows, f"empty lane {key}"
            assert lane.deficit_tokens >= 0, f"{key} overspent"
            assert all(row.steps_done < row.job.num_steps for row in lane.rows), "a finished row stayed"
