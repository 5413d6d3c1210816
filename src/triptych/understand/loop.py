"""The loop around an engine core: receive, step, send. Where mail comes from and events go to is the mailbox's
business."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from triptych.core.events import EngineEvent
from triptych.understand.core import EngineCore

Command = Callable[[EngineCore], Any]


class Mailbox(Protocol):
    """Commands in, events out. Called from the engine's thread only."""

    def receive(self, *, wait: bool) -> Iterable[Command]:
        """All commands that are there; with `wait`, at least one."""
        ...

    def has_mail(self) -> bool: ...

    def send(self, events: list[EngineEvent]) -> None: ...


class EngineLoop:
    """Runs until `stop()` is called from a command."""

    def __init__(self, build: Callable[[Callable[[EngineEvent], None]], EngineCore], mailbox: Mailbox) -> None:
        self._outbox: list[EngineEvent] = []
        self._mailbox = mailbox
        self._is_stopped = False
        self._core = build(self._outbox.append)

    def stop(self) -> None:
        """Cancels what runs: every request still gets its final event."""
        self._core.cancel_all()
        self._is_stopped = True

    def run(self) -> None:
        with torch.inference_mode():
            while not self._is_stopped:
                self._receive()
                if self._core.has_work:
                    self._core.step(self._mailbox.has_mail)
                self._flush()

    def _receive(self) -> None:
        """On a frame of its own: a command holds its request, and that its shared memory, until this returns."""
        for command in self._mailbox.receive(wait=self._core.waits_for_mail):
            command(self._core)

    def _flush(self) -> None:
        if self._outbox:
            self._mailbox.send(list(self._outbox))
            self._outbox.clear()
