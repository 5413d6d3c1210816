"""The two caches of an engine as numbers, by the names that `metrics.names.sample_for` knows. Pure."""

from __future__ import annotations

from triptych.understand.blocks import BlockPool
from triptych.understand.encoder_cache import EncoderCache


def prefix_stats(pool: BlockPool, block_bytes: int, prefill_ms_per_token: float) -> dict[str, float]:
    """Hits and misses are blocks; what a hit saves is its tokens' prefill at the pace of this moment."""
    return {
        "kv_blocks_used": pool.num_used,
        "kv_blocks": pool.num_blocks,
        "prefix_cache_bytes": pool.num_cached * block_bytes,
        "prefix_cache_capacity_bytes": pool.num_blocks * block_bytes,
        "prefix_cache_entries": pool.num_cached,
        "prefix_cache_hits": pool.num_hits,
        "prefix_cache_misses": pool.num_misses,
        "prefix_cache_hit_tokens": pool.num_hit_tokens,
        "prefix_cache_queried_tokens": pool.num_queried_tokens,
        "prefix_cache_evictions": pool.num_evictions,
        "prefix_cache_saved_ms": pool.num_hit_tokens * prefill_ms_per_token,
    }


def encoder_stats(cache: EncoderCache) -> dict[str, float]:
    """`encoder_held_bytes` is what cannot be reclaimed now."""
    return {
        "encoder_held_bytes": cache.num_held_bytes,
        "encoder_cache_bytes": cache.num_bytes,
        "encoder_cache_capacity_bytes": cache.capacity_bytes,
        "encoder_cache_entries": len(cache),
        "encoder_cache_hits": cache.num_hits,
        "encoder_cache_misses": cache.num_misses,
        "encoder_cache_evictions": cache.num_evictions,
        "encoder_cache_saved_ms": cache.saved_ms,
    }
