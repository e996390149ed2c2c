"""What a training process knows of itself while it runs, for Prometheus: one small HTTP server a rank, off by default.

Training writes numbers into a dict; text is made in the server's thread when somebody asks.  Whatever fails here is
named in one warning and never reaches training.  What is exported: `utils.monitor_metrics.METRICS`; docs/monitoring.md.
"""

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from utils.counts import counts
from utils.exposed_communication import without_communication
from utils.goodput import Goodput
from utils.machine_state import machine_state
from utils.monitor_metrics import METRICS, Key, MetricsCollector

_NUM_INTERVALS = 1000  # steps whose times the 99th percentile is taken of
_LOOK_EVERY = 100  # steps between looks at whether the server still lives
PROCESS_BEGAN = time.time()
log = logging.getLogger("train")


class Monitor:
    """The numbers of this rank, and the server that gives them away.  Every method may be called from any thread.

    run: name of the run.  port: 0 = no server; else this rank's is port + its number on the node.
    host: the address to listen on.  disk: a folder on the disk to watch.
    """

    def __init__(
        self, run: str, rank: int = 0, port: int = 0, host: str = "127.0.0.1", disk: str = ".",
        goodput: Goodput | None = None,
    ):  # fmt: skip
        self.goodput = goodput or Goodput()
        self.current_phase: Callable[[], str | None] = lambda: None
        self.between_ended_at: Callable[[], float] = lambda: 0.0  # time.time() of the last validation or save
        self.saving_since: Callable[[], float | None] = lambda: None  # time.monotonic() of a save that goes on
        self._values: dict[Key, float] = {}
        self._intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._sources: list[Callable[[], Mapping[str, float]]] = [lambda: machine_state(disk)]
        self._communication: dict[str, float] = {}
        self._save_every = 0
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._calls = 0
        self.port, self._server, self._thread = 0, None, None
        for name, metric in METRICS.items():
            if name.endswith("_total") and not metric.label:
                self._values[name, ""] = 0.0
            self._values |= {(name, label): 0.0 for label in metric.known}
        now = time.time()
        self.set("trainer_start_timestamp_seconds", PROCESS_BEGAN)
        self.set("trainer_last_step_timestamp_seconds", now)
        self.set("trainer_checkpoint_last_success_timestamp_seconds", PROCESS_BEGAN)
        if port:
            node = os.environ.get("NODE_NAME") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
            labels = {"run": run, "rank": str(rank), "node": node}
            self._serve(labels, port + int(os.environ.get("LOCAL_RANK", "0")), host)

    # ---- What others report ------------------------------------------------------------------------------------------

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a metric; its name and label must be in METRICS."""
        self._values[name, label] = float(value)

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a metric."""
        with self._lock:
            self._values[name, label] = self._values.get((name, label), 0.0) + amount

    def plan(self, num_steps: int, start_step: int, save_every: int, skipped_budget: float) -> None:
        """Say what the run is to do."""
        self._save_every = save_every
        self.set("trainer_num_steps", num_steps)
        self.set("trainer_step", start_step)
        self.set("trainer_samples_skipped_budget", skipped_budget)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note that `step` steps are done.

        numbers: of the last one, by the names of metrics.jsonl: step_s, <phase>_s since the last call, loss and
        <name>_loss, grad_norm and <name>_grad_norm, lr, samples (of all steps), bad_samples; others are passed over.
        """
        interval = self.goodput.step(step, numbers.get("step_s", 0.0), self._phases(numbers))
        if self._calls:  # not the first: compiling, filling caches
            self._intervals.append(interval)
        self.set("trainer_step", step)
        self.set("trainer_step_seconds", interval)
        self.set("trainer_last_step_timestamp_seconds", time.time())
        for name, value in numbers.items():
            if name.endswith("grad_norm"):
                self.set("trainer_grad_norm", value, name)
            elif name == "loss" or name.endswith("_loss"):
                self.set("trainer_loss", value, name)
        if "samples" in numbers:  # those of this step: a counter that starts from 0 with each process
            self.add("trainer_samples_total", numbers["samples"] / max(1, step))
        for name, metric in _SAME.items():
            if name in numbers:
                self.set(metric, numbers[name])
        self._calls += 1
        if self._thread is not None and self._calls % _LOOK_EVERY == 0 and not self._thread.is_alive():
            self._warn("thread", "the metrics server has stopped")
            self._thread = None

    def end(self, numbers: Mapping[str, float]) -> None:
        """Note the phases after the last step: <phase>_s."""
        self.goodput.end(self._phases(numbers))

    def _phases(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Count and return {phase: seconds} of numbers named as in metrics.jsonl."""
        names = (name for name in numbers if name.endswith("_s") and not name.endswith("_per_s") and name != "step_s")
        phases = {name[:-2]: numbers[name] for name in names}
        for phase, seconds in without_communication(phases, self._communication).items():
            self.add("trainer_phase_seconds_total", seconds, phase)
        return phases

    def validation(self, losses: Mapping[str, float]) -> None:
        """Note the mean losses of a validation: those named val_loss and val_<name>_loss."""
        for name, value in losses.items():
            if name.startswith("val_") and name.endswith("loss"):
                self.set("trainer_validation_loss", value, name)

    def restart(self, reason: str, amount: int = 1) -> None:
        """Count starts of the run after its first."""
        known = METRICS["trainer_restarts_total"].known
        self.add("trainer_restarts_total", amount, reason if reason in known else "other")

    def rollback(self) -> None:
        """Count a return to an earlier checkpoint."""
        self.add("trainer_rollbacks_total")

    def checkpoint(self, stall_s: float, duration_s: float, num_bytes: int) -> None:
        """Note that a checkpoint was published.

        stall_s: how long training waited for it; duration_s: from the begin of the save; num_bytes: over all ranks.
        """
        self.add("trainer_checkpoint_stall_seconds_total", stall_s)
        self.set("trainer_checkpoint_stall_seconds", stall_s)
        self.set("trainer_checkpoint_duration_seconds", duration_s)
        self.set("trainer_checkpoint_bytes", num_bytes)
        self.set("trainer_checkpoint_last_success_timestamp_seconds", time.time())

    def checkpoint_found(self) -> None:
        """Note that the checkpoint of this step was there before, and is whole."""
        self.set("trainer_checkpoint_last_success_timestamp_seconds", time.time())

    def checkpoint_failed(self, amount: int = 1) -> None:
        """Count saves that were not published."""
        self.add("trainer_checkpoint_failures_total", amount)

    def probe(self, seconds: Mapping[str, float]) -> None:
        """Note what a `Probe` measured: {"compute": seconds, <group of ranks>: seconds of an all-reduce}."""
        for name, value in seconds.items():
            if name == "compute":
                self.set("trainer_compute_probe_seconds", value)
            else:
                self.set("trainer_all_reduce_probe_seconds", value, name)

    def communication(self, shares: Mapping[str, float]) -> None:
        """Note which share of each phase is exposed communication; the phases' seconds are told apart by it."""
        self._communication = dict(shares)
        for phase, share in shares.items():
            self.set("trainer_exposed_communication_ratio", share, phase)

    def watch(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Ask `source` for {metric: number} at each scrape, in the server's thread; it must be quick."""
        self._sources.append(source)

    # ---- What is exported --------------------------------------------------------------------------------------------

    def values(self) -> dict[Key, float]:
        """Return every metric as it is now."""
        found = dict(self._values)
        for read in (self._derived, self._counted, *self._sources):
            try:
                found |= {name if isinstance(name, tuple) else (name, ""): float(x) for name, x in read().items()}
            except Exception as error:  # a scrape must not end for one number
                self.add("trainer_monitor_errors_total")
                self._warn(f"source {type(error).__name__}", f"a metric cannot be had: {error!r}")
        return found | {_ERRORS: self._values[_ERRORS]}

    def _derived(self) -> dict[Key, float]:
        found = {("trainer_goodput_seconds_total", state): s for state, s in self.goodput.seconds.items()}
        intervals = sorted(self._intervals)
        if intervals:
            found["trainer_step_p99_seconds", ""] = intervals[math.ceil(0.99 * len(intervals)) - 1]
            # With all that lies between steps: a validation may take longer than the steps to the next one.
            passed = sum(seconds for state, seconds in self.goodput.seconds.items() if state != "restart")
            found["trainer_checkpoint_expected_interval_seconds", ""] = self._save_every * passed / max(1, self._calls)
        stepped = self._values["trainer_last_step_timestamp_seconds", ""]
        found["trainer_last_progress_timestamp_seconds", ""] = max(stepped, self.between_ended_at())
        began = self.saving_since()
        found["trainer_checkpoint_in_progress_seconds", ""] = 0.0 if began is None else time.monotonic() - began
        if (phase := self.current_phase()) in METRICS["trainer_in_phase"].known:
            found["trainer_in_phase", phase] = 1.0
        return found

    def _counted(self) -> dict[Key, float]:
        named = {(f"trainer_{name}_total", kind): number for (name, kind), number in counts().items()}
        return {key: number for key, number in named.items() if key[0] in METRICS}

    def _serve(self, labels: Mapping[str, str], port: int, host: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server

            registry = CollectorRegistry(auto_describe=False)
            registry.register(MetricsCollector(labels, self.values))
            self._server, self._thread = start_http_server(port, host, registry)
            self.port = self._server.server_port
        except Exception as error:  # the port is taken, the package is missing, …
            self._warn("server", f"no metrics on {host}:{port}: {error}")

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self._thread = None

    def _warn(self, kind: str, message: str) -> None:
        """Say it once a kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s; training goes on", message)


_ERRORS = ("trainer_monitor_errors_total", "")
_SAME = {"lr": "trainer_learning_rate", "bad_samples": "trainer_samples_skipped_total"}
