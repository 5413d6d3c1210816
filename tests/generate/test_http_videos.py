"""Video jobs through a real server: from start to file, listing, cancelling, mistakes."""

from __future__ import annotations

import io
import time
from typing import Any

import av
import pytest
from PIL import Image

from triptych.core.config import GenerateConfig
from triptych.core.errors import RateLimited
from triptych.generate.engine import GenerateEngine
from triptych.generate.run import Run
from triptych.generate.video_jobs import JobStatus, VideoJob, VideoJobs

from .conftest import Door, Toys, request_of

FORM: dict[str, Any] = {
    "model": "clips",
    "prompt": "a wave",
    "size": "64x32",
    "num_frames": 9,
    "num_inference_steps": 3,
}


def wait(http: Any, job_id: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        job = http.get(f"/v1/videos/{job_id}").json()
        if job["status"] in ("completed", "failed"):
            return job
        time.sleep(0.02)
    raise AssertionError(f"{job_id} did not end")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_a_job_from_start_to_file(door: Door):
    """Create, poll, download: the file is an MP4 that plays; the other variants are pictures."""
    extra = {name: FORM[name] for name in ("num_frames", "num_inference_steps")}
    job = door.client.videos.create_and_poll(
        model="clips", prompt="a wave", size="64x32", extra_body=extra, poll_interval_ms=20
    )
    variants = ("video", "thumbnail", "spritesheet")
    content = {name: door.client.videos.download_content(job.id, variant=name).read() for name in variants}

    assert (job.status, job.progress, job.size) == ("completed", 100, "64x32")
    with av.open(io.BytesIO(content["video"])) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert (len(frames), frames[0].shape) == (9, (32, 64, 3))
    assert Image.open(io.BytesIO(content["thumbnail"])).size == (64, 32)
    assert Image.open(io.BytesIO(content["spritesheet"])).size == (5 * 64, 5 * 32)


def test_a_form_creates_a_job(door: Door):
    """Multipart fields, as the stock client sends them, are read with their types; seconds become frames."""
    with door.http() as http:
        fields = {name: str(value) for name, value in FORM.items() if name != "num_frames"}
        fields |= {"size": "32x32", "seconds": "1", "fps": "8"}
        job = http.post("/v1/videos", files={name: (None, value) for name, value in fields.items()}).json()
        ended = wait(http, job["id"])

    assert (ended["status"], ended["triptych"]["num_frames"]) == ("completed", 9)


def test_list_pages_newest_first(door: Door):
    """`after` and `limit` walk through the jobs without a gap or a repeat."""
    with door.http() as http:
        made = [http.post("/v1/videos", json=FORM).json()["id"] for _ in range(3)]
        for job_id in made:
            wait(http, job_id)
        first = http.get("/v1/videos", params={"limit": 2}).json()
        rest = http.get("/v1/videos", params={"limit": 1, "after": first["last_id"]}).json()

    assert [job["id"] for job in first["data"] + rest["data"]] == made[::-1]
    assert first["has_more"]


def test_delete_cancels_and_forgets(door: Door):
    """A deleted running job leaves its engine and is a 404 afterwards."""
    with door.http() as http:
        job_id = http.post("/v1/videos", json=FORM | {"num_inference_steps": 150, "size": "128x128"}).json()["id"]
        assert http.delete(f"/v1/videos/{job_id}").json()["deleted"]
        gone = http.get(f"/v1/videos/{job_id}")
        deadline_s = time.monotonic() + 20
        engine = door.service.engines["clips"]
        while engine._flights and time.monotonic() < deadline_s:
            time.sleep(0.02)

    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    assert not engine._flights


def test_idempotency_key_gives_the_same_job(door: Door):
    """A repeated create with one key answers with the job that is there."""
    with door.http() as http:
        ids = {http.post("/v1/videos", json=FORM, headers={"idempotency-key": "v"}).json()["id"] for _ in range(3)}

    assert len(ids) == 1


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"num_frames": 10}, 400, "num_frames must be 1 more than a multiple of 8, got 10"),
        ({"num_frames": 2601}, 413, "max_generated_frames is 257, the request has 2601"),
        ({"seconds": "long", "num_frames": None}, 400, "seconds must be a number, got 'long'"),
        ({"size": "60x32"}, 400, "width must be a positive multiple of 32 px, got 60"),
        ({"model": "pictures", "size": "32x32"}, 422, "not text-to-video"),
        ({"input_reference": "data:,x"}, 422, "input_reference is not supported"),
        ({"fps": 0.5}, 400, "fps must be between 1 and 120, got 0.5"),
    ],
)
def test_bad_jobs_are_refused_at_creation(door: Door, change: dict[str, Any], status: int, words: str):
    """A job that can never run is refused when it is made, by name."""
    with door.http() as http:
        answer = http.post("/v1/videos", json=FORM | change)

    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up"])
def test_bad_list_queries_are_refused(door: Door, query: str):
    """Page parameters out of range are the caller's error."""
    with door.http() as http:
        assert http.get(f"/v1/videos?{query}").status_code == 400


async def test_jobs_that_have_not_ended_count_as_running_requests(toys: Toys):
    """A tenant with room for two gets a third job refused with 429's error until one has ended; a repeated call is no
    new job, and another tenant is not held up."""
    engine = GenerateEngine(toys.kind("ltx"), GenerateConfig(warm_up=False))
    await engine.start()
    jobs = VideoJobs(time.time)

    def create(tenant: str, name: str, run: Run | None = None) -> VideoJob:
        request = request_of(name, num_frames=9, num_steps=2)
        return jobs.create(tenant, "clips", request, run or Run(engine, [request]), max_open=2)

    try:
        first, second = create("a", "1"), create("a", "2")
        assert create("a", "2", second.run) is second
        with pytest.raises(RateLimited, match="max_concurrent_requests is 2, and 2 video jobs have not ended"):
            create("a", "3")
        assert create("b", "4").tenant == "b"
        await jobs._tasks[first.job_id]
        assert create("a", "5").status is JobStatus.QUEUED
    finally:
        await jobs.close()
        await engine.close()
    assert not engine._flights
