"""Video jobs: create, look at, list, cancel, fetch. Kept in memory, by tenant, within a count and a byte limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from triptych.cache.lru import ByteLru
from triptych.core.errors import InternalError, InvalidRequest, NotFound, Overloaded, RateLimited, TriptychError
from triptych.core.ids import new_id
from triptych.generate.events import GenerateFinal, StepEvent
from triptych.generate.picture_files import encode_picture, encode_video, sprite_sheet
from triptych.generate.request import GenerateRequest
from triptych.generate.run import Run, error_of

VARIANTS = {"video": "video/mp4", "thumbnail": "image/webp", "spritesheet": "image/jpeg"}


class JobStatus(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(slots=True)
class VideoJob:
    """`progress` is 0 to 100. Times are Unix seconds. `stage_ms` and `counters` are of the finished run."""

    job_id: str
    tenant: str
    model: str
    request: GenerateRequest
    run: Run = field(repr=False)
    created_at: int
    expires_at: int
    status: JobStatus = JobStatus.QUEUED
    progress: int = 0
    completed_at: int | None = None
    error: TriptychError | None = None
    stage_ms: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


class VideoJobs:
    """Owned by one event loop. `now_s` gives Unix time. The oldest files leave when room is short, jobs at `keep_s`."""

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        max_jobs: int = 256,
        capacity_bytes: int = 512 * 2**20,
        keep_s: float = 3600.0,
    ) -> None:
        self._now_s = now_s
        self._max_jobs = max_jobs
        self._keep_s = keep_s
        self._jobs: dict[str, VideoJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._files: ByteLru[tuple[str, str], bytes] = ByteLru(capacity_bytes)

    def create(self, tenant: str, model: str, request: GenerateRequest, run: Run, *, max_open: int = 0) -> VideoJob:
        """Start to watch a run; the job that watches it already, where the call was repeated. Raises RateLimited when
        the tenant has `max_open` jobs that did not end yet (0: no limit), Overloaded when such take every place."""
        self._expire()
        for known in self._jobs.values():
            if known.run is run:
                return known
        num_open = sum(job.tenant == tenant and job.completed_at is None for job in self._jobs.values())
        if max_open and num_open >= max_open:
            run.cancel()
            raise RateLimited(
                f"max_concurrent_requests is {max_open}, and {num_open} video jobs have not ended", retry_after_s=1.0
            )
        if len(self._jobs) >= self._max_jobs and not self._drop_oldest_ended():
            run.cancel()
            raise Overloaded(f"{len(self._jobs)} video jobs are open already", retry_after_s=30)
        now_s = self._now_s()
        job = VideoJob(new_id("video"), tenant, model, request, run, int(now_s), int(now_s + self._keep_s))
        self._jobs[job.job_id] = job
        task = asyncio.create_task(self._watch(job, run))
        self._tasks[job.job_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.job_id, None))
        return job

    async def _watch(self, job: VideoJob, run: Run) -> None:
        events = run.follow()
        try:
            async for entry in events:
                event = entry.event
                if isinstance(event, StepEvent):
                    job.status = JobStatus.IN_PROGRESS
                    job.progress = min(99, 100 * event.step // event.num_steps)
                elif isinstance(event, GenerateFinal):
                    job.error = error_of(event)
                    await self._keep(job, event)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            job.error = error if isinstance(error, TriptychError) else InternalError("the video could not be written")
        finally:
            await events.aclose()
            job.completed_at = int(self._now_s())
            job.status = JobStatus.FAILED if job.error else JobStatus.COMPLETED

    async def _keep(self, job: VideoJob, final: GenerateFinal) -> None:
        job.stage_ms, job.counters = final.stage_ms, final.counters
        if final.frames is None:
            return
        files = await asyncio.to_thread(_encode_all, final.frames, job.request.frames_per_s)
        for variant, data in files.items():
            if not self._files.put((job.job_id, variant), data, len(data)):
                raise Overloaded(f"the {variant} of {len(data)} bytes does not fit the store")
        job.progress = 100

    def get(self, tenant: str, job_id: str) -> VideoJob:
        """Raises NotFound, also for another tenant's job."""
        self._expire()
        job = self._jobs.get(job_id)
        if job is None or job.tenant != tenant:
            raise NotFound(f"no video job {job_id[:64]!r} here", param="video_id")
        return job

    def page(self, tenant: str, *, after: str | None, limit: int, order: str) -> tuple[list[VideoJob], bool]:
        """Jobs by creation, newest first unless `order` is asc, and whether there are more. Raises NotFound."""
        self._expire()
        jobs = [job for job in self._jobs.values() if job.tenant == tenant]
        if order == "desc":
            jobs.reverse()
        if after is not None:
            last = self.get(tenant, after)
            jobs = jobs[jobs.index(last) + 1 :]
        return jobs[:limit], len(jobs) > limit

    def delete(self, tenant: str, job_id: str) -> VideoJob:
        """Forget a job; a running one leaves the batch at the next step edge. Raises NotFound."""
        job = self.get(tenant, job_id)
        del self._jobs[job_id]
        self._drop_files(job_id)
        if task := self._tasks.get(job_id):
            task.cancel()
            job.run.cancel()
        return job

    def content(self, tenant: str, job_id: str, variant: str) -> bytes:
        """Raises InvalidRequest for an unknown variant or an unfinished job, NotFound when the file had to go."""
        job = self.get(tenant, job_id)
        if variant not in VARIANTS:
            raise InvalidRequest(f"variant must be one of {', '.join(VARIANTS)}, got {variant[:64]!r}", param="variant")
        if job.status is not JobStatus.COMPLETED:
            raise InvalidRequest(f"video job {job_id} is {job.status}, it has no content yet")
        data = self._files.lookup((job_id, variant))
        if data is None:
            raise NotFound(f"the {variant} of {job_id} was dropped to make room")
        return data

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expire(self) -> None:
        now_s = self._now_s()
        for job in [job for job in self._jobs.values() if job.expires_at <= now_s and job.completed_at]:
            self._drop_files(job.job_id)
            del self._jobs[job.job_id]

    def _drop_files(self, job_id: str) -> None:
        for variant in VARIANTS:
            self._files.discard((job_id, variant))

    def _drop_oldest_ended(self) -> bool:
        ended = next((job.job_id for job in self._jobs.values() if job.completed_at is not None), None)
        if ended is None:
            return False
        self._drop_files(ended)
        del self._jobs[ended]
        return True


def _encode_all(frames: npt.NDArray[np.uint8], frames_per_s: float) -> dict[str, bytes]:
    return {
        "video": encode_video(frames, frames_per_s),
        "thumbnail": encode_picture(frames[0], "webp"),
        "spritesheet": encode_picture(sprite_sheet(frames), "jpeg", 85),
    }
