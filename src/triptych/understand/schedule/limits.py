"""The budgets that one engine schedules under, all in units of their names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`bytes_per_embed`: one row of an encoder's output. `encoder_step_tokens`: the encoder's compute budget for one
    call, in its own tokens; a single larger item still goes, alone."""

    max_step_tokens: int
    max_running: int
    max_waiting: int
    max_model_tokens: int
    encoder_step_tokens: int
    bytes_per_embed: int
    embed_width: int
    vocab_size: int

    def item_bytes(self, num_embeds: int) -> int:
        return num_embeds * self.bytes_per_embed
