"""Triptych: multimodal model serving. Understand and generate on one frame."""

from typing import TYPE_CHECKING, Any

from triptych.core.config import Config, EngineConfig, ModelConfig
from triptych.core.errors import TriptychError
from triptych.core.sampling import SamplingParams

if TYPE_CHECKING:
    from triptych.engine import Engine, Reply

__version__ = "0.1.0"
__all__ = ["Config", "Engine", "EngineConfig", "ModelConfig", "Reply", "SamplingParams", "TriptychError"]


def __getattr__(name: str) -> Any:
    """`Engine` and `Reply` bring torch with them: they are imported when they are asked for."""
    if name in ("Engine", "Reply"):
        from triptych import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
