"""One thread a process: the ranks of a test share the machine's cores, and results do not depend on their number."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def no_group_stays():
    """Leave no process group behind where a test ends within one."""
    yield
    import torch.distributed as dist  # here, since not every test needs torch

    if dist.is_initialized():
        dist.destroy_process_group()
