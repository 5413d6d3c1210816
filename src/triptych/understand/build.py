"""From a loaded model and its budgets to an engine core: sizes are derived here, once."""

from __future__ import annotations

from collections.abc import Callable

from triptych.core.clock import Clock
from triptych.core.config import EngineConfig
from triptych.core.errors import InvalidRequest
from triptych.core.events import EngineEvent
from triptych.models.base import ServedModel
from triptych.models.paged_attention import PagedKv
from triptych.understand.blocks import BlockPool
from triptych.understand.core import EngineCore
from triptych.understand.encoder_cache import EncoderCache
from triptych.understand.encoding import EncoderLoop
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.pace import Pace
from triptych.understand.pausable import LayerEdges
from triptych.understand.runner import Runner
from triptych.understand.schedule.limits import SchedulerLimits
from triptych.understand.schedule.scheduler import Scheduler


def build_core(
    served: ServedModel,
    config: EngineConfig,
    *,
    grammar: Callable[[], GrammarCompiler],
    clock: Clock,
    emit: Callable[[EngineEvent], None],
) -> EngineCore:
    """`grammar` is called once, when the first request with a grammar comes."""
    limits = scheduler_limits(served, config)
    num_blocks = num_kv_blocks(served, config, limits)
    kv = PagedKv(
        served.info.kv,
        num_blocks=num_blocks,
        block_size_tokens=config.block_size_tokens,
        dtype=served.dtype,
        device=served.device,
    )
    pool = BlockPool(num_blocks, config.block_size_tokens, prefix_cache=config.prefix_cache)
    scheduler = Scheduler(limits, pool, EncoderCache(config.encoder_cache_bytes))
    runner = Runner(served, kv)
    pace = Pace(max_decode_stall_ms=config.max_decode_stall_ms, max_step_tokens=config.max_step_tokens)
    encoder = EncoderLoop(scheduler, runner, LayerEdges(served.encoder_layers()), pace, clock)
    return EngineCore(
        scheduler,
        runner,
        encoder,
        pace,
        max_media_bytes=config.max_media_bytes,
        grammar=grammar,
        clock=clock,
        emit=emit,
    )


def scheduler_limits(served: ServedModel, config: EngineConfig) -> SchedulerLimits:
    on_cpu = served.device.type == "cpu"
    return SchedulerLimits(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_model_tokens=min(config.max_model_tokens or served.info.max_tokens, served.info.max_tokens),
        encoder_step_tokens=config.encoder_step_tokens or (1024 if on_cpu else 16_384),
        bytes_per_embed=served.info.embed_width * served.dtype.itemsize,
        embed_width=served.info.embed_width,
        vocab_size=served.info.vocab_size,
    )


def num_kv_blocks(served: ServedModel, config: EngineConfig, limits: SchedulerLimits) -> int:
    """As many as the bytes allow, and no more than `max_running` sequences of full length could use."""
    block_bytes = PagedKv.block_bytes(served.info.kv, config.block_size_tokens, served.dtype)
    useful = limits.max_running * -(-limits.max_model_tokens // config.block_size_tokens)
    num_blocks = min(config.kv_cache_bytes // block_bytes, useful)
    if num_blocks < 1:
        raise InvalidRequest(
            f"kv_cache_bytes is {config.kv_cache_bytes}, one block of this model takes {block_bytes}",
            param="kv_cache_bytes",
        )
    return num_blocks
