"""What the machine does at this moment, learnt from what it just did: the encoder's and the prefill's rate."""

from __future__ import annotations

from triptych.understand.schedule.rows import Row

MIN_SLICE_LAYERS = 2  # of an encoder between two decode steps; one costs throughput and first tokens, and buys little
_WEIGHT = 0.2


class Pace:
    """Exponential averages. `max_decode_stall_ms` is the time that anything else may put between two decode steps, on a
    machine where `MIN_SLICE_LAYERS` of the encoder take no longer."""

    def __init__(self, *, max_decode_stall_ms: float, max_step_tokens: int) -> None:
        self.max_decode_stall_ms = max_decode_stall_ms
        self._max_step_tokens = max_step_tokens
        self.reset()

    def reset(self) -> None:
        """Nothing is known of the machine yet."""
        self.encoder_flops_per_s = 1e11
        self.encoder_layer_ms = 0.0
        self.prefill_ms_per_token = 0.0

    @property
    def stall_ms(self) -> float:
        return max(self.max_decode_stall_ms, MIN_SLICE_LAYERS * self.encoder_layer_ms)

    def prefill_cap_tokens(self, *, is_decoding: bool) -> int:
        """How many prefill tokens a step may carry. Unbounded but for the step where nobody decodes."""
        if not is_decoding or self.prefill_ms_per_token <= 0:
            return self._max_step_tokens
        return max(1, int(self.stall_ms / self.prefill_ms_per_token))

    def note_step(self, rows: list[Row], elapsed_s: float) -> None:
        num_prefill = sum(row.num_new for row in rows if not row.seq.is_decoding)
        if num_prefill >= 16:
            self.prefill_ms_per_token = _blend(self.prefill_ms_per_token, elapsed_s * 1e3 / num_prefill)

    def note_slice(self, num_layers: int, elapsed_s: float) -> None:
        if num_layers > 0:
            self.encoder_layer_ms = _blend(self.encoder_layer_ms, elapsed_s * 1e3 / num_layers)

    def note_encode(self, cost_flops: float, elapsed_s: float) -> None:
        if cost_flops > 0 and elapsed_s > 0:
            self.encoder_flops_per_s = _blend(self.encoder_flops_per_s, cost_flops / elapsed_s)


def _blend(average: float, value: float) -> float:
    return value if average <= 0 else average + _WEIGHT * (value - average)
