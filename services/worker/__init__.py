"""One engine per device. Knows tensors, models and kernels; knows no user, no deadline and no policy."""

import os

# Threads of the OpenMP runtime spin for milliseconds at every barrier unless configured. On a machine that also
# runs a gateway, a scheduler and Redis that costs many times what the computation does (measured with two threads on
# two busy cores: 20 ms of CPU time a step against 1.7 at batch 1, 465 against 108 at batch 200). Before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
