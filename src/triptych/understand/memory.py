"""How much memory the engine has taken, and how much there is: of its GPU, or of the process on a CPU."""

from __future__ import annotations

import psutil
import torch


def device_memory_bytes(device: torch.device) -> tuple[int, int]:
    """(used by this engine, in all). On a GPU what torch's allocator holds of it; on a CPU the process' resident set, and
    the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    return psutil.Process().memory_info().rss, psutil.virtual_memory().total
