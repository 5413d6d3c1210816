"""Servers under test, as fixtures."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from toy_door import Running, running_server

from triptych.core.config import Config
from triptych.testing.toy_engine import ToyEngine


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Start a server with a configuration and an engine; all are stopped at the end."""
    with ExitStack() as stack:
        yield lambda config=None, engine=None, **served: stack.enter_context(
            running_server(config or Config(), engine or ToyEngine(), **served)
        )


@pytest.fixture(scope="session")
def _shared() -> Iterator[Running]:
    with running_server(Config(), ToyEngine()) as running:
        yield running


@pytest.fixture
def toy(_shared: Running) -> Running:
    """A server with no configuration at all, and an engine that has seen nothing yet."""
    _shared.engine.seen.clear()
    _shared.engine.finals.clear()
    return _shared
