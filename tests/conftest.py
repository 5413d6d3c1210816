"""Before torch is loaded: one thread that sleeps at barriers. Tiny models are slower with two, on a busy machine forty
times."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
