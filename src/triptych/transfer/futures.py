"""Futures that a waiter may have left."""

from __future__ import annotations

import asyncio
from typing import Any


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give `future` its result, or `error` where there is one, unless its waiter has gone. On the future's loop."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
