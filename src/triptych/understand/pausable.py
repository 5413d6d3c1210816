"""A model call that pauses at layer edges, so that an encoder never stands between decode steps for its whole run (F9).

The call runs in a greenlet of the engine's own thread: nothing runs beside it, no layer is rewritten, and the same
OpenMP team serves both. Before each layer a hook asks whether to pause; if so, control goes back to whoever resumed
the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet


class LayerEdges:
    """The hooks on a tower's layers. One per served model; at most one pausable call at a time."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self.should_pause: Callable[[], bool] = _never
        self._handles = [layer.register_forward_pre_hook(self._at_edge) for layer in layers]

    def _at_edge(self, *_: Any) -> None:
        current = getcurrent()
        if isinstance(current, _PausableGreenlet) and self.should_pause():
            current.parent.switch()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _PausableGreenlet(greenlet):
    pass


def _never() -> bool:
    return False


class PausableCall:
    """One call of `function`, made in slices. The result, or the exception, comes out of the last `resume`."""

    def __init__(self, edges: LayerEdges, function: Callable[[], Any]) -> None:
        self._edges = edges
        self._greenlet = _PausableGreenlet(function)
        self._has_started = False

    def resume(self, should_pause: Callable[[], bool]) -> tuple[bool, Any]:
        """Run until done or until `should_pause()` at a layer edge; at least one layer. Returns (is_done, result)."""
        self._edges.should_pause = should_pause if self._has_started else _after_first(should_pause)
        self._has_started = True
        result = self._greenlet.switch()
        return self._greenlet.dead, result

    def abort(self) -> None:
        """Unwind a paused call; its tensors go with it."""
        if not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)


def _after_first(should_pause: Callable[[], bool]) -> Callable[[], bool]:
    is_first = True

    def check() -> bool:
        nonlocal is_first
        was_first, is_first = is_first, False
        return not was_first and should_pause()

    return check
