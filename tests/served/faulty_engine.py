"""The server's own engine process, `python -m tests.served.faulty_engine ADDRESS [FD]`, with a model that can fail.

Pictures of two sizes come out of its tower as NaN and as an exception. Each tower layer and each forward of the
language model takes, beside its own time, the seconds that a file says ("LAYER STEP"), so that a test can look at a
stage while it lasts. Everything else is the model as it is served.
"""

import os
import sys
import time
from pathlib import Path

import torch

from triptych.cluster import engine_main

DELAYS_VARIABLE = "TRIPTYCH_TEST_DELAYS"
NAN_EMBEDS = 7
RAISING_EMBEDS = 11


class FaultyModel:
    """A `ServedModel` around another one."""

    def __init__(self, served, delays: Path) -> None:
        self._served = served
        self._delays = delays
        self.info, self.device, self.dtype = served.info, served.device, served.dtype
        for layer in served.encoder_layers():
            layer.register_forward_pre_hook(lambda *_: self._sleep(0))

    def __getattr__(self, name):
        return getattr(self._served, name)

    def encode(self, items):
        if any(item.num_embeds == RAISING_EMBEDS for item in items):
            raise RuntimeError("a tower that fails")
        tensors = self._served.encode(items)
        return [torch.full_like(t, torch.nan) if len(t) == NAN_EMBEDS else t for t in tensors]

    def forward(self, *args):
        self._sleep(1)
        return self._served.forward(*args)

    def _sleep(self, which: int) -> None:
        time.sleep(float(self._delays.read_text().split()[which]))


def load(config, load_served=engine_main.load):
    return FaultyModel(load_served(config), Path(os.environ[DELAYS_VARIABLE]))


if __name__ == "__main__":
    engine_main.load = load
    sys.exit(engine_main.main(*sys.argv[1:]))
