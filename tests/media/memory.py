"""How much memory a block of work takes at its height."""

import psutil


class MemoryBound:
    """Asserts that the process' memory high-water mark grew by less than a bound while the block ran."""

    def __init__(self, max_growth_bytes):
        self.max_growth_bytes = max_growth_bytes

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        self.before_bytes = psutil.Process().memory_info().rss

    def __exit__(self, *_):
        with open("/proc/self/status") as status:
            peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        growth_bytes = peak_kb * 1024 - self.before_bytes
        assert growth_bytes < self.max_growth_bytes, growth_bytes
