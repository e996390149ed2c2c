"""Write the Grafana dashboard: `python -m tools.grafana`.

deploy/grafana/training.json is 36 panels of 60 lines that differ in a few words; those words are here.  A test compares
the file with what this makes, so change the dashboard here, or in Grafana and then here.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from utils.config import parse, run_main

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN, RANK, MAIN = 'run=~"$run"', 'run=~"$run", rank=~"$rank"', 'run=~"$run", rank="0"'
_COLUMNS = 24  # of Grafana's grid


def _per_second(metric: str, labels: str) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def _new(metric: str, labels: str) -> str:
    return f"increase({metric}{{{labels}}}[$__rate_interval])"


def _age(metric: str) -> str:
    """Return how old a time is, taken at the scrape."""
    return f"max by (run) (timestamp({metric}{{{RUN}}}) - {metric}{{{RUN}}})"


def _by_run(metric: str) -> str:
    return f"max by (run) ({metric}{{{RUN}}})"


def _by_name(metric: str) -> str:
    return f"max by (run, name) ({metric}{{{RUN}}})"


def _curves(
    title: str, unit: str, *queries: tuple[str, str], note: str = "", width: int = 8, stacked: bool = False,
    log: bool = False, alert: float | None = None, least: float | None = None, most: float | None = None,
) -> dict:  # fmt: skip
    """Return a panel of lines.

    queries: (expression, legend).  width: columns.  alert: where a rule draws the line.  least, most: of the y axis.
    """
    custom = {
        "drawStyle": "line", "lineWidth": 0 if stacked else 1, "fillOpacity": 60 if stacked else 0,
        "showPoints": "never", "spanNulls": False, "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }  # fmt: skip
    defaults = {"unit": unit, "custom": custom, "color": {"mode": "palette-classic"}}
    if log:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    defaults |= {} if least is None else {"min": least}
    defaults |= {} if most is None else {"max": most}
    if alert is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
        steps = [{"color": "green", "value": None}, {"color": "red", "value": alert}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return _panel("timeseries", title, note, width, 8, defaults, options, queries)


def _number(title: str, unit: str, query: str, *steps: tuple[str, float | None], note: str = "",
            decimals: int | None = None) -> dict:  # fmt: skip
    """Return a panel of one number a run; steps: (colour, from which value on)."""
    steps = steps or (("text", None),)
    thresholds = {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}
    defaults = {"unit": unit, "color": {"mode": "thresholds"}, "thresholds": thresholds}
    defaults |= {} if decimals is None else {"decimals": decimals}
    options = {
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto", "textMode": "auto",
        "wideLayout": True, "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }  # fmt: skip
    return _panel("stat", title, note, 4, 4, defaults, options, [(query, "{{run}}")])


def _panel(kind: str, title: str, note: str, width: int, height: int, defaults: dict, options: dict, queries) -> dict:
    targets = [
        {"refId": chr(65 + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend, "range": True}
        for i, (expression, legend) in enumerate(queries)
    ]
    return {
        "type": kind, "title": title, "description": note, "datasource": SOURCE, "gridPos": {"h": height, "w": width},
        "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options, "targets": targets,
    }  # fmt: skip


def _panels() -> dict[str, list[dict]]:
    """Return the panels of each row."""
    good_below = ("green", None)
    steps, planned = _by_run("trainer_step"), _by_run("trainer_num_steps")
    paid = _per_second("trainer_phase_seconds_total", RANK)
    hits, misses = (
        f"sum by (node) ({_per_second(f'trainer_cache_{kind}_total', RANK)})" for kind in ("hits", "misses")
    )
    goodput = "trainer_goodput_seconds_total"
    return {
        "Progress": [
            _number("Step", "locale", steps),
            _number("Done", "percentunit", f"{steps} / {planned}", decimals=1),
            _number("Time left", "dtdurations",
                    f"({planned} - {steps}) / max by (run) (deriv(trainer_step{{{RUN}}}[15m]) > 0)",
                    note="At the pace of the last 15 minutes."),
            _number("Since the last step", "s", _age("trainer_last_step_timestamp_seconds"),
                    good_below, ("orange", 60), ("red", 600)),
            _number("Since the last checkpoint", "s", _age("trainer_checkpoint_last_success_timestamp_seconds")),
            _number("Goodput", "percentunit",
                    f'sum by (run) ({goodput}{{{MAIN}, state="training"}}) / sum by (run) ({goodput}{{{MAIN}}})',
                    ("red", None), ("orange", 0.8), ("green", 0.9), decimals=1,
                    note="Share of all time since this start in which the run moved forward."),
            _curves("Loss", "none", (_by_name("trainer_loss"), "{{run}} {{name}}")),
            _curves("Validation loss", "none", (_by_name("trainer_validation_loss"), "{{run}} {{name}}")),
            _curves("Gradient norm", "none", (_by_name("trainer_grad_norm"), "{{run}} {{name}}"), log=True,
                    note="Before clipping."),
            _curves("Samples a second", "none",
                    (f"max by (run) ({_per_second('trainer_samples_total', RUN)})", "{{run}}"), least=0,
                    note="Over all ranks."),
            _curves("Learning rate", "sci", (_by_run("trainer_learning_rate"), "{{run}}"), least=0),
            _curves("Steps that were not like others", "short",
                    (f"sum by (run) ({_new('trainer_non_finite_steps_total', MAIN)})", "{{run}} not finite"),
                    (f"sum by (run, reason) ({_new('trainer_skipped_steps_total', MAIN)})",
                     "{{run}} skipped: {{reason}}"),
                    (f"sum by (run) ({_new('trainer_rollbacks_total', MAIN)})", "{{run}} rolled back"),
                    (f"sum by (run, reason) ({_new('trainer_restarts_total', RUN)})", "{{run}} restart: {{reason}}"),
                    least=0),
        ],
        "Time": [
            _curves("Where the time goes", "percentunit",
                    (f"sum by (state) ({_per_second(goodput, MAIN)})", "{{state}}"), stacked=True, least=0, most=1,
                    note="Wall-clock time of rank 0 by state. lost: steps that are done again after a restart."),
            _curves("Phases", "s",
                    (f"sum by (phase) ({paid}) / ignoring (phase) group_left "
                     f"sum ({_per_second('trainer_step', RANK)} > 0)", "{{phase}}"), stacked=True, least=0,
                    note="Mean seconds of a step and rank in each phase, exposed communication apart; on GPUs the "
                         "device's time."),
            _curves("Exposed communication", "percentunit",
                    (f"max by (phase, rank) (trainer_exposed_communication_ratio{{{RANK}}})",
                     "rank {{rank}} {{phase}}"),
                    least=0, most=1,
                    note="Share of a phase in which the rank communicates and computes nothing, when last profiled."),
            _curves("Step time", "s",
                    (f"max by (run) (trainer_step_seconds{{{RANK}}})", "{{run}} last"),
                    (f"max by (run) (trainer_step_p99_seconds{{{RANK}}})", "{{run}} 99th percentile"), least=0,
                    note="Without checkpoints and validation; the slowest of the chosen ranks."),
            _curves("Waiting for data", "percentunit",
                    (_per_second("trainer_phase_seconds_total", f'{RANK}, phase="data_wait"'), "rank {{rank}}"),
                    alert=0.1, least=0, note="Alert over 10 %."),
            _curves("All-reduce probe", "s",
                    (f"trainer_all_reduce_probe_seconds{{{RANK}}}", "rank {{rank}} {{group}}"), log=True, alert=0.05,
                    note="A small all-reduce, median of three; alert over 50 ms or three times its median."),
            _curves("Compute probe, against the median rank", "none",
                    (f"trainer_compute_probe_seconds{{{RANK}}} / on (run) group_left quantile by (run) "
                     f"(0.5, trainer_compute_probe_seconds{{{RUN}}})", "rank {{rank}} {{node}}"), alert=1.3,
                    note="A fixed product of each rank alone: who is slow; alert over 1.3."),
        ],
        "Checkpoints": [
            _curves("Saves", "s",
                    (_by_run("trainer_checkpoint_duration_seconds"), "{{run}} until published"),
                    (_by_run("trainer_checkpoint_stall_seconds"), "{{run}} training waited"),
                    (_by_run("trainer_checkpoint_in_progress_seconds"), "{{run}} under way"), least=0,
                    note="Alert over 5 minutes."),
            _curves("Checkpoint size and free disk", "bytes",
                    (_by_run("trainer_checkpoint_bytes"), "{{run}} last checkpoint"),
                    (f"min by (run) (trainer_disk_free_bytes{{{RUN}}})", "{{run}} free"), log=True,
                    note="Alert when there is room for less than three."),
            _curves("Failures", "short",
                    (f"sum by (run) ({_new('trainer_checkpoint_failures_total', MAIN)})", "{{run}} not written"),
                    (f"sum by (run) ({_new('trainer_checkpoint_verify_failures_total', RUN)})", "{{run}} damaged"),
                    least=0),
        ],
        "Data": [
            _curves("Errors and retries", "cps",
                    (f"sum by (kind) ({_per_second('trainer_data_errors_total', RANK)})", "{{kind}}"),
                    (f"sum ({_per_second('trainer_data_retries_total', RANK)})", "retries"), least=0),
            _curves("Samples skipped", "short",
                    (_by_run("trainer_samples_skipped_total"), "{{run}} skipped"),
                    (_by_run("trainer_samples_skipped_budget"), "{{run}} budget"), width=4, least=0,
                    note="Alert over half of the budget; over all of it the run stops."),
            _curves("Read ahead", "short", (f"min by (rank) (trainer_data_queue_length{{{RANK}}})", "rank {{rank}}"),
                    width=4, least=0, note="Steps."),
            _curves("Shard cache hits", "percentunit", (f"{hits} / ({hits} + {misses})", "{{node}}"),
                    least=0, most=1, note="Share of blocks that were in the cache."),
        ],
        "Machine": [
            _curves("GPU utilisation", "percentunit",
                    (f"trainer_gpu_utilization_ratio{{{RANK}}}", "rank {{rank}} {{node}}"), alert=0.85, least=0, most=1,
                    note="Alert under 85 % for ten minutes."),
            _curves("GPU memory", "bytes",
                    *((f"max by (rank) (trainer_gpu_memory_{kind}_bytes{{{RANK}}})", f"rank {{{{rank}}}} {words}")
                      for kind, words in (("allocated", "in tensors"), ("peak", "peak"), ("reserved", "held"))),
                    least=0),
            _curves("Host memory", "bytes", (f"trainer_host_memory_bytes{{{RANK}}}", "rank {{rank}} {{node}}"), least=0,
                    note="Resident memory of each process."),
            _curves("GPU temperature", "celsius",
                    (f"trainer_gpu_temperature_celsius{{{RANK}}}", "rank {{rank}} {{node}}")),
            _curves("GPU power", "watt", (f"trainer_gpu_power_watts{{{RANK}}}", "rank {{rank}} {{node}}"), least=0),
            _curves("Monitor errors", "short",
                    (f"sum by (rank) (trainer_monitor_errors_total{{{RANK}}})", "rank {{rank}}"), least=0,
                    note="Metrics that could not be had."),
        ],
    }  # fmt: skip


def _placed(rows: dict[str, list[dict]]) -> list[dict]:
    """Return the panels with numbers and places: from left to right, a new line where one is full."""
    placed, y = [], 0
    for title, panels in rows.items():
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        placed.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place})
        x, y = 0, y + 1
        for i, panel in enumerate(panels):
            size = panel["gridPos"]
            if x + size["w"] > _COLUMNS:
                x, y = 0, y + panels[i - 1]["gridPos"]["h"]
            placed.append(panel | {"gridPos": size | {"x": x, "y": y}})
            x += size["w"]
        y += panels[-1]["gridPos"]["h"]
    return [{"id": number} | panel for number, panel in enumerate(placed, 1)]


def _mark(name: str, color: str, metric: str) -> dict:
    """Return vertical lines at the times that a metric tells."""
    return {
        "name": name, "datasource": SOURCE, "enable": True, "hide": False, "iconColor": color,
        "target": {"refId": "Anno", "expr": f"max by (run) ({metric}{{{MAIN}}}) * 1000", "interval": "15s"},
        "useValueForTime": "on", "titleFormat": f"{name} {{{{run}}}}",
    }  # fmt: skip


def _choice(name: str, label: str, query: str, sort: int) -> dict:
    """Return a variable whose values are those of a label; all of them unless some are chosen."""
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name},
        "refresh": 2, "sort": sort, "hide": 0, "multi": True, "includeAll": True, "allValue": ".*", "options": [],
    }  # fmt: skip


def dashboard() -> dict:
    """Return the dashboard as Grafana stores it."""
    source = {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
        "hide": 0, "multi": False, "includeAll": False, "options": [],
    }  # fmt: skip
    marks = [
        _mark("start", "red", "trainer_start_timestamp_seconds"),
        _mark("checkpoint", "blue", "trainer_checkpoint_last_success_timestamp_seconds"),
    ]
    choices = [
        _choice("run", "Run", "label_values(trainer_step, run)", 1),
        _choice("rank", "Rank", 'label_values(trainer_step{run=~"$run"}, rank)', 3),
    ]
    return {
        "uid": "qwen-image-training", "title": "Training", "tags": ["training"], "schemaVersion": 39, "version": 1,
        "editable": True, "timezone": "browser", "refresh": "30s", "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"}, "annotations": {"list": marks},
        "templating": {"list": [source, *choices]}, "links": [], "panels": _placed(_panels()),
    }  # fmt: skip


def dashboard_text() -> str:
    """Return the dashboard's file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Config:
    output: str = "deploy/grafana/training.json"


def main(cfg: Config) -> None:
    Path(cfg.output).write_text(dashboard_text(), encoding="utf-8")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
