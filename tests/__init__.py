"""The tests. With pytest-xdist each worker gets its share of the cores, notebook kernels and other children included.

OpenMP's threads wait for work by spinning: two workers with a thread per core each would slow one another down several
times over. The environment is set here, which is before anything imports torch.
"""

import os

from tests.workers import cores

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // _WORKERS))
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
