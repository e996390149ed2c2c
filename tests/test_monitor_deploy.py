"""The alert rules and the dashboard, against what a process really exports."""

import itertools
import json
import re
import types
from pathlib import Path

import pytest
import torch
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.free_ports import free_ports
from tests.test_monitor import scrape
from tools.grafana import dashboard_text
from utils import machine_state
from utils.monitor import Monitor
from utils.monitor_metrics import METRICS

REPOSITORY = Path(__file__).parent.parent
RULES = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((REPOSITORY / "deploy/grafana/training.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
register_default_plugins()  # the models of panels and queries
NAME = re.compile(r"\btrainer_[a-z0-9_]+\b")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the metrics of a scrape of a process that has saved, validated and probed, on a machine with a GPU."""
    patch = pytest.MonkeyPatch()
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError, NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=50),
        nvmlDeviceGetTemperature=lambda handle, sensor: 50, nvmlDeviceGetPowerUsage=lambda handle: 350000,
    )  # fmt: skip
    patch.setattr(machine_state, "_nvml", lambda: (nvml, "handle"))
    for name in ("is_available", "is_initialized"):
        patch.setattr(torch.cuda, name, lambda: True)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        patch.setattr(torch.cuda, name, lambda: 2**30)
    monitor = Monitor("run", port=free_ports(), disk=str(tmp_path_factory.mktemp("disk")))
    monitor.plan(100, 0, 10, 50)
    for step in (1, 2):
        monitor.step(step, {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "samples": 4, "step_s": 0.1, "data_wait_s": 0.0})
    monitor.validation({"val_loss": 1.0})
    monitor.checkpoint(1.0, 1.0, 100)
    monitor.communication({"forward": 0.25})
    monitor.probe({"compute": 0.1, "all": 0.1})
    monitor.watch(lambda: {"trainer_data_queue_length": 2, "trainer_checkpoint_disk_free_bytes": 1})
    found = scrape(monitor.port)
    monitor.close()
    patch.undo()
    return {name for name, _ in found}


def test_a_full_process_exports_every_metric_of_the_table(exported):
    assert exported == METRICS.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_metric_of_a_rule_is_exported(exported, rule):
    used = set(NAME.findall(rule["expr"]))
    assert used <= exported and (used or rule["alert"] == "TrainerUnreachable")  # which looks at Prometheus' own `up`
    assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_metric_of_a_panel_is_exported(exported, panel):
    assert panel["type"] in ("timeseries", "stat") and panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
    for target in panel["targets"]:
        used = set(NAME.findall(target["expr"]))
        assert used and used <= exported, target["expr"]
        assert 'run=~"$run"' in target["expr"] and target["legendFormat"], target["expr"]


def test_the_dashboard_is_what_its_description_makes():
    text = (REPOSITORY / "deploy/grafana/training.json").read_text(encoding="utf-8")
    assert text == dashboard_text(), "run: python -m tools.grafana"


def test_the_dashboard_can_be_provisioned_and_linked_to(exported):
    assert DASHBOARD["uid"] == "qwen-image-training"
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "run", "rank"]
    marks = {mark["name"]: mark["target"]["expr"] for mark in DASHBOARD["annotations"]["list"]}
    assert marks.keys() == {"start", "checkpoint"}
    assert {name for expr in marks.values() for name in NAME.findall(expr)} <= exported
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for a, b in itertools.combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


def test_grafana_knows_every_field_of_the_dashboard():
    """Read into the models that Grafana publishes of its schema and written again: a misspelt field would be lost."""
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))

    def lost(ours, theirs, path=""):
        if isinstance(ours, dict):
            for key, value in ours.items():
                yield from lost(value, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key}"]
        elif isinstance(ours, list):
            assert len(ours) == len(theirs), path
            for mine, other in zip(ours, theirs, strict=True):
                yield from lost(mine, other, path)
        elif ours != theirs:
            yield path

    # Annotations have more fields, which belong to the data source: Prometheus' are not in the models.
    own = ("target.refId", "target.expr", "target.interval", "useValueForTime", "titleFormat")
    assert set(lost(DASHBOARD, read)) == {f".annotations.list.{name}" for name in own}
    misspelt = json.loads(json.dumps(DASHBOARD).replace('"fillOpacity"', '"fillOpacty"'))
    assert misspelt != DASHBOARD
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(misspelt)))
    assert len(set(lost(misspelt, read))) > len(own)


def test_every_alert_is_tested_and_described():
    tested = (REPOSITORY / "tests/deploy/rules_test.yaml").read_text()
    described = (REPOSITORY / "docs/monitoring.md").read_text(encoding="utf-8")
    for rule in RULES:
        fires = [
            case
            for test in yaml.safe_load(tested)["tests"]
            for case in test["alert_rule_test"]
            if case["alertname"] == rule["alert"]
        ]
        assert {bool(case.get("exp_alerts")) for case in fires} == {True, False}, rule["alert"]
        assert f"`{rule['alert']}`" in described, rule["alert"]
    for name in METRICS:
        assert f"`{name}`" in described, name
