"""One thread a process: the ranks of a test share the machine's cores, and results do not depend on their number."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
