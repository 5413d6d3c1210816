"""A paused call gives the same result, passes on errors, and can be thrown away."""

import pytest
import torch
from torch import nn

from triptych.understand.pausable import LayerEdges, PausableCall


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


def test_pausing_at_every_edge_changes_nothing(tower):
    """Five layers, a pause wherever one is asked for: the same tensor."""
    edges = LayerEdges(list(tower))
    x = torch.ones(1, 4)
    call = PausableCall(edges, lambda: tower(x))
    num_slices, is_done, result = 0, False, None
    while not is_done:
        is_done, result = call.resume(lambda: True)
        num_slices += 1

    torch.testing.assert_close(tower(x), result)
    assert num_slices == 5


def test_without_a_reason_to_pause_it_runs_through(tower):
    edges = LayerEdges(list(tower))

    is_done, result = PausableCall(edges, lambda: tower(torch.ones(1, 4))).resume(lambda: False)

    assert is_done
    assert result.shape == (1, 4)


def test_an_error_comes_out_of_resume(tower):
    """A wrong shape raises where the call is resumed, not in the hook."""
    edges = LayerEdges(list(tower))

    with pytest.raises(RuntimeError, match="shapes"):
        PausableCall(edges, lambda: tower(torch.ones(1, 3))).resume(lambda: False)


def test_abort_unwinds_the_call(tower):
    """Clean-up code inside the call runs, and a later call is not disturbed."""
    edges = LayerEdges(list(tower))
    unwound = []

    def work():
        try:
            return tower(torch.ones(1, 4))
        finally:
            unwound.append(True)

    call = PausableCall(edges, work)
    call.resume(lambda: True)
    call.abort()

    assert unwound == [True]
    assert PausableCall(edges, lambda: tower(torch.ones(1, 4))).resume(lambda: False)[0]
