"""JSON responses, encoded by msgspec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def json_response(payload: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status_code=status, headers=headers, media_type="application/json")
