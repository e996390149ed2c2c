"""Every metric that a training process exports, and what gives them to Prometheus.

Names follow Prometheus' practice: base units, `_seconds`, `_bytes`, `_total` for what only grows.  Each series has the
labels run (the run folder's name), rank and node, and at most one more, whose values are a few fixed words: no path, no
key of a sample, nothing that a user typed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from utils.goodput import STATES
from utils.phase_timer import BETWEEN_STEPS
from utils.run_events import REASONS

Key = tuple[str, str]  # metric, value of its own label ("" where it has none)
DATA_ERRORS = ("checksum", "unreachable", "changed", "bad_sample")  # as `data` counts them


@dataclass(frozen=True)
class Metric:
    """One metric: what it says, the label of its own, and the label's values that exist from the start, at 0."""

    help: str
    label: str = ""
    known: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    # Progress
    "trainer_step": Metric("Optimizer steps done."),
    "trainer_num_steps": Metric("Optimizer steps that the run is to do."),
    "trainer_samples_total": Metric("Samples trained on since this process began, over all ranks."),
    "trainer_last_step_timestamp_seconds": Metric(
        "When the last step was done; before the first, when the run was set up."
    ),
    "trainer_last_progress_timestamp_seconds": Metric(
        "When the last step was done, or a later validation, sample grid or save between steps."
    ),
    "trainer_start_timestamp_seconds": Metric("When this process began."),
    "trainer_restarts_total": Metric("Starts after the first, by what ended the one before.", "reason", REASONS),
    "trainer_goodput_seconds_total": Metric("Wall-clock time by what it went into, since this start.", "state", STATES),
    # Time
    "trainer_step_seconds": Metric("Time of the last step, without checkpoints and validation."),
    "trainer_step_p99_seconds": Metric("99th percentile of the last 1000 steps' times."),
    "trainer_phase_seconds_total": Metric(
        "Time by phase of the step, exposed communication apart; on GPUs that of the device.", "phase"
    ),
    "trainer_exposed_communication_ratio": Metric(
        "Share of a phase's time in which this rank communicated and computed nothing, in the last profiled step.",
        "phase",
    ),
    "trainer_in_phase": Metric("1 while the process is in this phase between steps.", "phase", BETWEEN_STEPS),
    # Probes
    "trainer_all_reduce_probe_seconds": Metric("Median time of a small all-reduce.", "group"),
    "trainer_compute_probe_seconds": Metric("Median time of a fixed matrix product of this rank alone."),
    # Checkpoints
    "trainer_checkpoint_stall_seconds": Metric("How long the last save kept training from going on."),
    "trainer_checkpoint_stall_seconds_total": Metric("How long saves kept training from going on."),
    "trainer_checkpoint_duration_seconds": Metric("From the begin of the last save until it was published."),
    "trainer_checkpoint_in_progress_seconds": Metric("For how long a save has been under way; 0 = none is."),
    "trainer_checkpoint_bytes": Metric("Size of the last published checkpoint."),
    "trainer_checkpoint_last_success_timestamp_seconds": Metric(
        "When the last checkpoint was published; before the first, when this process began."
    ),
    "trainer_checkpoint_expected_interval_seconds": Metric("Time from save to save at the present pace; 0 = never."),
    "trainer_checkpoint_failures_total": Metric("Saves that were not published."),
    "trainer_checkpoint_verify_failures_total": Metric("Checkpoints found damaged."),
    # Data
    "trainer_data_errors_total": Metric("Reads that did not give what was asked for.", "kind", DATA_ERRORS),
    "trainer_data_retries_total": Metric("Reads tried again here; what obstore tries again by itself is not known."),
    "trainer_samples_skipped_total": Metric("Samples of the run that could not be used and were replaced."),
    "trainer_samples_skipped_budget": Metric("How many may be, before the run stops."),
    "trainer_data_queue_length": Metric("Steps read ahead."),
    "trainer_cache_hits_total": Metric("Blocks of shards found in the cache."),
    "trainer_cache_misses_total": Metric("Blocks of shards fetched."),
    # Numbers
    "trainer_loss": Metric("Mean loss of the last step, by name.", "name"),
    "trainer_validation_loss": Metric("Mean loss of the last validation.", "name"),
    "trainer_grad_norm": Metric("Gradient norm of the last step before clipping, by name.", "name"),
    "trainer_learning_rate": Metric("Learning rate of the last step."),
    "trainer_non_finite_steps_total": Metric("Steps whose loss or gradient norm was not finite."),
    "trainer_skipped_steps_total": Metric("Steps whose update was left out.", "reason", ("non_finite", "spike")),
    "trainer_rollbacks_total": Metric("Returns to an earlier checkpoint, over all starts."),
    # Machine
    "trainer_host_memory_bytes": Metric("Resident memory of the process."),
    "trainer_gpu_memory_allocated_bytes": Metric("GPU memory in tensors."),
    "trainer_gpu_memory_reserved_bytes": Metric("GPU memory held by PyTorch."),
    "trainer_gpu_memory_peak_bytes": Metric("Most GPU memory in tensors since the start."),
    "trainer_gpu_utilization_ratio": Metric("Share of the last sampling period in which a kernel ran (NVML)."),
    "trainer_gpu_temperature_celsius": Metric("Temperature of the GPU (NVML)."),
    "trainer_gpu_power_watts": Metric("Power the GPU takes (NVML)."),
    "trainer_disk_free_bytes": Metric("Room left where the run folder lies."),
    "trainer_checkpoint_disk_free_bytes": Metric("Room left where the checkpoints lie; none on S3."),
    "trainer_monitor_errors_total": Metric("Times that a metric could not be had."),
}  # fmt: skip


class MetricsCollector:
    """Turns the values of a process into Prometheus' families, when it is asked: training only writes to a dict.

    values(): {(metric, label value): number}, called in the exporter's thread.
    """

    def __init__(self, labels: Mapping[str, str], values: Callable[[], Mapping[Key, float]]):
        self._labels, self._values = dict(labels), values

    def collect(self) -> Iterator:
        """Yield a family a metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_metric: dict[str, list[tuple[str, float]]] = {}
        for (name, label), value in self._values().items():
            by_metric.setdefault(name, []).append((label, value))
        for name, metric in METRICS.items():
            if name not in by_metric:
                continue
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            names = [*self._labels, metric.label] if metric.label else [*self._labels]
            found = family(name, metric.help, labels=names)
            for label, value in by_metric[name]:
                found.add_metric([*self._labels.values(), label] if metric.label else [*self._labels.values()], value)
            yield found
