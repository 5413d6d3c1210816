"""One call of `MediaPlane.open`: its items side by side, and what all of them have taken of the budget so far."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded
from triptych.core.media import MediaHeader
from triptych.media.budget import check_limit, check_request

T = TypeVar("T")


class OpenRequest:
    """Owner of the request's tasks. Over its bytes, it ends at once, while the downloads still run."""

    def __init__(self, tier: Tier, tenant: str) -> None:
        self.tier = tier
        self.tenant = tenant
        self.num_bytes = 0
        self._headers: list[MediaHeader] = []
        self._refusal: BudgetExceeded | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def add_bytes(self, num_bytes: int) -> None:
        """Raises BudgetExceeded (`max_request_media_bytes`)."""
        self.num_bytes += num_bytes
        check_limit(self.tier, "max_request_media_bytes", self.num_bytes)

    def add_header(self, header: MediaHeader) -> None:
        """One more item is open. Raises BudgetExceeded (`max_request_pixels`)."""
        self._headers.append(header)
        check_request(self._headers, self.tier)

    def see_bytes(self, num_bytes: int) -> None:
        """Like `add_bytes`, from a download that others may share: ends this request, and not the download."""
        try:
            self.add_bytes(num_bytes)
        except BudgetExceeded as error:
            self._refusal = error
            for task in self._tasks:
                task.cancel()

    async def run_all(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Results in order. On the first failure the rest is cancelled, and has ended, before it is raised."""
        tasks = [asyncio.ensure_future(one) for one in work]
        if not tasks:
            return []
        self._tasks.extend(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if self._refusal is not None:
                raise self._refusal
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Arrival:
    """The bytes of one download in flight, and the requests that wait for it: each is charged for all of them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.requests: list[OpenRequest] = []

    def join(self, request: OpenRequest) -> None:
        self.requests.append(request)
        request.see_bytes(self.num_bytes)

    def leave(self, request: OpenRequest) -> None:
        self.requests.remove(request)

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        for request in list(self.requests):
            request.see_bytes(num_bytes)
