"""Agreement between ranks: sums, any, and one rank's failure raised on all."""

import os
import subprocess
import sys

import pytest
import torch

from parallel.distributed import agree_any, all_reduce_sum, gather_results, is_main, num_ranks, on_main
from tests.spawn import run_ranks

CPU = torch.device("cpu")


def agree(rank, world_size):
    def fail_on_rank_1():
        if rank == 1:
            raise KeyError("lost")
        return rank

    with pytest.raises(OSError, match="rank 1: KeyError") as on_all:
        gather_results(fail_on_rank_1)
    with pytest.raises(OSError, match="rank 0: ZeroDivisionError"):
        on_main(lambda: 1 // rank)
    return {
        "sums": all_reduce_sum([1.0, float(rank), 1e-17], CPU),
        "any": (agree_any(rank == 2, CPU), agree_any(False, CPU)),
        "gathered": gather_results(lambda: {"rank": rank}),
        "main": (is_main(), on_main(lambda: rank + 41)),
        "message": str(on_all.value),
    }


def test_ranks_agree():
    results = run_ranks(agree, 3)
    for rank, result in enumerate(results):
        assert result["sums"] == [3.0, 3.0, 3e-17]
        assert result["any"] == (True, False)
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert result["main"] == (rank == 0, 41)
        assert result["message"] == results[0]["message"]


def test_without_a_process_group_one_process_is_all():
    assert is_main() and num_ranks() == 1
    assert all_reduce_sum([2.5], CPU) == [2.5] and agree_any(True, CPU)
    assert gather_results(lambda: 7) == [7] and on_main(lambda: 8) == 8


def test_a_plain_python_run_is_a_world_of_one():
    program = (
        "import torch.distributed as dist; from parallel.distributed import init_distributed, shutdown\n"
        "device = init_distributed(10.0)\n"
        "print(device.type, dist.get_rank(), dist.get_world_size())\n"
        "shutdown()\n"
    )
    # RANK without WORLD_SIZE: left over in a shell, not torchrun.
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "LOCAL_RANK")} | {"RANK": "3"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[1:] == ["0", "1"], done.stderr
