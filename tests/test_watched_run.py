"""The train script on two ranks with a port: what is there to scrape while it runs, and what its folder says after."""

import json
import threading

from tests.free_ports import free_ports
from tests.script_runs import run_script
from tests.test_monitor import scrape


def test_queue_and_communication_of_a_run_that_is_watched(tmp_path):
    port, printed, seen = free_ports(2), [], [{}, {}]
    flags = [
        "--run_folder", str(tmp_path / "run"), "--cache_folder", str(tmp_path / "cache"), "--num_steps", "12",
        "--global_batch_size", "4", "--max_tokens_per_micro_batch", "120", "--eval_every", "0", "--sample_every", "0",
        "--save_every", "0", "--log_every", "1", "--metrics_port", str(port), "--profile_every", "4",
        "--prefetch_steps", "3",
    ]  # fmt: skip
    run = threading.Thread(target=lambda: printed.append(run_script("train_mmdit.py", flags, ranks=2)))
    run.start()
    while run.is_alive():
        for rank in (0, 1):
            try:
                seen[rank] |= scrape(port + rank)
            except OSError:  # not yet, or no longer
                pass
        run.join(0.2)
    assert printed[0][0] == 0, printed
    for numbers in seen:
        assert numbers["trainer_data_queue_length", ""] == 3  # as many as asked for: filled while a step is computed
        assert 0 < numbers["trainer_exposed_communication_ratio", "forward"] < 1
        assert numbers["trainer_phase_seconds_total", "communication"] > 0
        assert numbers["trainer_monitor_errors_total", ""] == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "forward_exposed" in line] == [*range(4, 12)]
    assert all(0 <= lines[-1][f"{phase}_exposed"] < 1 for phase in ("forward", "backward"))
    assert all(line["communication_s"] > 0 for line in lines)
    assert "USDT" not in printed[0][1]  # the profiler's own line at each begin
