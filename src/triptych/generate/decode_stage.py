"""The decode stage: latent to pixels. Its own thread, off the step loop; out of memory is tried again in tiles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from triptych.core.errors import ModelFault
from triptych.generate.flight import Flight
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Row
from triptych.generate.runner import is_out_of_memory
from triptych.generate.stages import GenerateStage


class DecodeStage:
    """One thread."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.num_tiled = 0

    def run(self, flight: Flight) -> None:
        """Decode the flight's row and finish it. Raises ModelFault, and what the model raises."""
        assert flight.row is not None
        flight.close_stage(GenerateStage.DECODE_QUEUE)
        frames, flagged = self._decode(flight.row)
        flight.counters["flagged"] = float(flagged)
        flight.close_stage(GenerateStage.VAE_DECODE)
        flight.finish(frames)

    def _decode(self, row: Row) -> tuple[npt.NDArray[np.uint8], bool]:
        try:
            return self._kind.decode(row)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return self._decode_tiled(row)

    def _decode_tiled(self, row: Row) -> tuple[npt.NDArray[np.uint8], bool]:
        vae = self._kind.vae
        if not hasattr(vae, "enable_tiling"):
            raise ModelFault("out of memory while decoding, and this VAE cannot decode in tiles")
        self.num_tiled += 1
        vae.enable_tiling()
        try:
            return self._kind.decode(row)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise ModelFault("out of memory while decoding, in tiles too") from error
            raise
        finally:
            vae.disable_tiling()
