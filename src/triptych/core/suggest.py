"""The known name nearest to a mistyped one, for errors that help."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.75) -> str | None:
    """The most similar of `known`, or None when none is near. Case and hyphens do not count as differences."""
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    wanted = name.lower().replace("-", "_")
    matches = difflib.get_close_matches(wanted, plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` or nothing."""
    match = nearest(name, known, cutoff=0.6)
    return f", did you mean {match!r}?" if match else ""
