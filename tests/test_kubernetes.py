"""Kubernetes manifests: against the API's schemas, against each other, and what `./launch.sh k8s` makes of them."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

import train_mmdit
from tools.kubernetes import KINDS, Config, jobs_of, manifests
from utils.config import parse
from utils.exit_codes import FINAL
from utils.stop_note import TO_BE_CONTINUED

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = ["train_mmdit.py", "--tp", "4", "--data", "/data/a b/*.tar"]
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def plain(kind: str) -> list[dict]:
    return [*yaml.safe_load_all((REPOSITORY / f"deploy/k8s/{kind}.yaml").read_text())]


def lost_fields(given, kept, path="") -> list[str]:
    """Return the paths of what a model did not keep: it does not know the field."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [lost for key in given for lost in lost_fields(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            lost for i, pair in enumerate(zip(given, kept, strict=True)) for lost in lost_fields(*pair, f"{path}[{i}]")
        ]
    return [] if given == kept else [path]


def check_schema(manifest: dict) -> None:
    """Raise if a field is misspelt or of another type: core objects by the API's schema, others by their models."""
    if manifest["kind"] in MODELS:
        assert lost_fields(manifest, MODELS[manifest["kind"]].from_dict(manifest).to_dict()) == []
        for job in jobs_of(manifest):  # what the schemas of core objects know more than the models
            spec = {"completions": 1, "parallelism": 1} | job  # a TrainJob's come from its numNodes
            check_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec})
    else:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def check_job(job: dict, host: str, domain: str, nodes: int | None) -> None:
    """What no schema says.  host: of pod 0, in the headless service `domain`; nodes: None if an operator fills in."""
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert job["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"  # as podFailurePolicy needs
    if nodes is not None:
        assert job["completions"] == job["parallelism"] == int(variables["NNODES"]) == nodes
        assert variables["RDZV_ENDPOINT"] == f"{host}.{domain}:29400" and len(host) <= 63
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert all(
        rule["onExitCodes"]["containerName"] == container["name"] and 0 not in rule["onExitCodes"]["values"]
        and rule["onExitCodes"]["operator"] == "In" for rule in rules[:2]
    )  # fmt: skip
    assert set(rules[0]["onExitCodes"]["values"]) == FINAL and rules[1]["onExitCodes"]["values"] == [TO_BE_CONTINUED]
    assert pod["terminationGracePeriodSeconds"] >= int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 30
    # To process 1, which is the launcher since the shell in launch.sh gives way to it.
    assert container["lifecycle"]["preStop"]["exec"]["command"][2].startswith("while kill -USR1 1;")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    sizes = [volume["emptyDir"]["sizeLimit"] for volume in volumes.values() if "emptyDir" in volume]
    for quantity in (*limits.values(), *requests.values(), *sizes):
        assert re.fullmatch(r"\d+(Ki|Mi|Gi|Ti|m)?", str(quantity))
    assert int(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) < 512
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"rendezvous": 29400, "metrics": 9870}
    assert job["template"]["metadata"]["annotations"]["prometheus.io/port"] == "9870"


def check(objects: list[dict], kind: str, name: str, nodes: int) -> None:
    for manifest in objects:
        check_schema(manifest)
    named = {manifest["kind"]: manifest for manifest in objects}
    if kind == "job":
        service, job = named["Service"], named["Job"]
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        # The Job's controller gives its pods this label.
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == name
        check_job(job["spec"], f"{name}-0", name, nodes)
        assert job["spec"]["backoffLimit"] == 20 * nodes
    elif kind == "jobset":
        (job,) = jobs_of(named["JobSet"])
        assert named["JobSet"]["spec"]["network"]["subdomain"] == name
        check_job(job, f"{name}-node-0-0", name, nodes)
    else:
        runtime, train = named["TrainingRuntime"], named["TrainJob"]
        assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] != train["metadata"]["name"] == name
        assert train["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == nodes
        (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        labels = replicated["template"]["metadata"]["labels"]
        assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"} and replicated["name"] == "node"
        check_job(replicated["template"]["spec"], "", "", None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_manifests_are_valid(kind):
    check(plain(kind), kind, "train", 2)


def test_the_volumes_are_valid_and_those_of_the_jobs():
    for claim in plain("volumes"):
        check_schema(claim)
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for kind in KINDS for manifest in plain(kind) for job in jobs_of(manifest)
        for volume in job["template"]["spec"]["volumes"] if "persistentVolumeClaim" in volume
    }  # fmt: skip
    assert claims == {claim["metadata"]["name"] for claim in plain("volumes")}


def test_all_kinds_have_the_same_pod():
    """What differs: where pods meet, and what Kubeflow's TrainJob says itself."""
    pods = {kind: [job["template"]["spec"] for m in plain(kind) for job in jobs_of(m)][0] for kind in KINDS}
    pods["job"].pop("subdomain")
    pods["job"]["containers"][0]["env"][2]["value"] = pods["jobset"]["containers"][0]["env"][2]["value"]
    assert pods["job"] == pods["jobset"]
    for pod in (pods["job"], pods["trainjob"]):
        container = pod["containers"][0]
        container["env"] = [v for v in container["env"] if v["name"] in ("NODE_NAME", "MAX_RESTARTS", "NCCL_DEBUG")]
        container.pop("command"), container.pop("args", None)
    assert pods["job"] == pods["trainjob"]


@pytest.mark.parametrize("kind", KINDS)
def test_filled_in(kind):
    cfg = Config(
        nodes=5, gpus=0, processes=3, kind=kind, image="r/i:2", name="a-run", namespace="ns", shm_gib=2, grace_s=99
    )
    objects = manifests(cfg, SCRIPT)
    check(objects, kind, "a-run", 5)
    assert all(manifest["metadata"]["namespace"] == "ns" for manifest in objects)
    text = yaml.safe_dump_all(objects)
    assert "nvidia.com/gpu" not in text and "train-" not in text.replace("a-run", "") and text.count("r/i:2") >= 1
    added = ["--run_folder=/runs/a-run", "--cache_folder=/cache", "--metrics_port=9870", "--metrics_host=0.0.0.0"]
    assert [*yaml.safe_load_all(text)] == objects
    (job,) = (job for manifest in objects for job in jobs_of(manifest))
    container = job["template"]["spec"]["containers"][0]
    trainer = objects[-1]["spec"]["trainer"] if kind == "trainjob" else None
    assert (trainer or container)["args"] == SCRIPT + added
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (str(trainer["numProcPerNode"]) if trainer else variables["NGPU"]) == "3"
    assert (
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "99"
        and job["template"]["spec"]["terminationGracePeriodSeconds"] == 99
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_takes_the_flags(kind):
    container = plain(kind)[-1]["spec"]["trainer"] if kind == "trainjob" else None
    (job,) = (job for manifest in plain(kind) for job in jobs_of(manifest))
    script, *flags = (container or job["template"]["spec"]["containers"][0])["args"]
    cfg = parse(train_mmdit.Config, args=flags)
    assert script == "train_mmdit.py"
    assert (cfg.data, cfg.cache_folder, cfg.run_folder) == ("/data/*.tar", "/cache", "/runs/train")
    assert (cfg.metrics_port, cfg.metrics_host) == (9870, "0.0.0.0")


def test_what_the_script_says_itself_stays():
    own = ["a.py", "--run_folder", "/runs/A_b", "--cache-folder=/x", "--metrics_port", "0", "--metrics_host=::"]
    objects = manifests(Config(data_claim=""), own)
    job = objects[1]
    assert job["metadata"]["name"] == "a-b" and job["spec"]["template"]["spec"]["containers"][0]["args"] == own
    assert "/data" not in yaml.safe_dump(job)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_found_where_the_script_serves_them(kind):
    text = yaml.safe_dump_all(manifests(Config(kind=kind), ["a.py", "--metrics-port=1", "--metrics_port", "9000"]))
    assert "9870" not in text and "prometheus.io/port: '9000'" in text and "scrape: 'true'" in text
    assert kind == "trainjob" or text.count("9000") >= 3
    assert "scrape: 'false'" in yaml.safe_dump_all(manifests(Config(kind=kind), ["a.py", "--metrics_port=0"]))
    for wrong in ("x", "-1", "65536", "٣"):
        with pytest.raises(ValueError, match="--metrics_port must be"):
            manifests(Config(kind=kind), ["a.py", "--metrics_port", wrong])


def test_a_run_folder_that_is_lost_with_the_pod_is_refused():
    for lost in ("runs/a", "/cache/a", "/runsa", "/tmp"):
        with pytest.raises(ValueError, match="lost with its pod"):
            manifests(Config(), ["a.py", "--run_folder", lost])


# What YAML 1.2's core schema, or an older reader, takes for a number, a truth value or nothing.
_NO_TEXT = re.compile(
    r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)(e[-+]?\d+)?|0[ox][\da-f]+|[yn~]|yes|no|on|off|true|false|null|", re.I
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scripts_words_arrive_as_they_were_given(kind):
    words = '1e-4|08|0o7|y||~|a\nb: c|狗 #1 "it\'s"|$HOME|$(NNODES)|$$|a\\|- -|{}'.split("|")
    command = f"-m tools.kubernetes --kind {kind} --namespace=1e3 --data_claim= train_mmdit.py --x".split()
    command = [sys.executable, *command, *words[:5]]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60).stdout
    (end,) = (manifest for manifest in yaml.safe_load_all(text) if manifest["kind"] in ("Job", "JobSet", "TrainJob"))
    said = end["spec"]["trainer"] if kind == "trainjob" else jobs_of(end)[0]["template"]["spec"]["containers"][0]
    assert said["args"][2:7] == words[:5]
    for event in yaml.parse(text):
        if isinstance(event, yaml.ScalarEvent) and event.style is None and isinstance(yaml.safe_load(event.value), str):
            assert not _NO_TEXT.fullmatch(event.value), event.value
    objects = manifests(Config(kind=kind), ["a.py", *words])
    trainer = objects[-1]["spec"].get("trainer") or jobs_of(objects[-1])[0]["template"]["spec"]["containers"][0]
    # As Kubernetes expands them: of two $ it makes one.
    assert [re.sub(r"\$\$", "$", word) for word in trainer["args"][1 : 1 + len(words)]] == words
    assert all(re.fullmatch(r"([^$]|\$\$)*", word) for word in trainer["args"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 0}, "--nodes"), ({"namespace": "a.b"}, "--namespace"), ({"data_claim": "a..b"}, "--data_claim"),
        ({"kind": "pod"}, "job, jobset, trainjob"), ({"name": "Ä"}, "--name"),
        ({"name": "x" * 48}, "at most 47"), ({"shm_gib": 512}, "--shm_gib"), ({"gpus": -1}, "--gpus"),
        ({"namespace": "Team A"}, "--namespace must be"), ({"namespace": "x" * 64}, "at most 63"),
        ({"image": ""}, "--image"), ({"image": "a b"}, "got 'a b'"), ({"data_claim": "/data"}, "--data_claim"),
        ({"runs_claim": ""}, "--runs_claim"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_named(settings, said):
    with pytest.raises(ValueError, match=said):
        manifests(Config(**settings), SCRIPT)


def test_the_checks_find_what_is_wrong():
    job = plain("job")[1]
    broken = []
    for change in (
        lambda spec: spec.update(parallelism=3),
        lambda spec: spec["podFailurePolicy"]["rules"].reverse(),
        lambda spec: spec["template"]["spec"].update(terminationGracePeriodSeconds=30),
        lambda spec: spec["template"]["spec"]["volumes"].pop(),
        lambda spec: spec["template"]["spec"]["containers"][0]["resources"]["limits"].update(memory="1 TB"),
    ):
        broken.append(copy.deepcopy(job))
        change(broken[-1]["spec"])
    for manifest in broken:
        with pytest.raises(AssertionError):
            check_job(manifest["spec"], "train-0", "train", 2)
    for field, where in (("backofLimit", job["spec"]), ("mountPaht", job["spec"]["template"]["spec"]["containers"][0])):
        wrong = copy.deepcopy(job)
        target = wrong["spec"] if where is job["spec"] else wrong["spec"]["template"]["spec"]["containers"][0]
        target[field] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            check_schema(wrong)
    wrong = plain("jobset")[0]
    wrong["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError):
        check_schema(wrong)


def test_the_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "tools.kubernetes", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    done = run("--nodes", "3", "train_mmdit.py", "--help", "--seed", "1")  # behind the script all is the script's
    assert done.returncode == 0, done.stderr
    check([*yaml.safe_load_all(done.stdout)], "job", "train-mmdit", 3)
    job = [*yaml.safe_load_all(done.stdout)][1]
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][:4] == ["train_mmdit.py", "--help", "--seed", "1"]
    (missing, other) = run("--nodes", "3"), run("nowhere.py")
    assert missing.returncode == other.returncode == 2 and missing.stdout == other.stdout == ""
    assert "which script?" in missing.stderr and "no script nowhere.py" in other.stderr
