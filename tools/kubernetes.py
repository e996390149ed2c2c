"""Print a Kubernetes job: a manifest of deploy/k8s/ with names, numbers and flags filled in.

    ./launch.sh k8s --nodes 4 --image registry.example.com/train:1 train_mmdit.py --tp 4 > job.yaml
    ./launch.sh k8s --nodes 4 --kind jobset ... | kubectl apply -f -

What stands behind the script is the script's; --run_folder, --cache_folder, --metrics_port and --metrics_host are added
where it does not say them.  The volumes (deploy/k8s/volumes.yaml) are mounted at /data, /runs, /cache.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.launch_command import flag_value, read_command_line, run_folder, run_name
from utils.config import check_values, run_main

FOLDER = Path(__file__).parent.parent / "deploy/k8s"
KINDS = ("job", "jobset", "trainjob")
PORT = 29400  # where the pods meet
METRICS_PORT = 9870
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NAMES = {"namespace": (63, _LABEL), "data_claim": (253, _DOMAIN), "runs_claim": (253, _DOMAIN)}
# Texts to every reader of YAML.  kubectl's also knows numbers such as 1e-4, round which PyYAML puts no quotation marks.
_PLAIN = re.compile(r"(--)?[A-Za-z/][A-Za-z0-9_./:@=-]+")


@dataclass(frozen=True)
class Config:
    nodes: int = 2  # machines, a pod each
    gpus: int = 8  # of each; one process each.  0: none, train on CPUs
    processes: int = 2  # of each machine with --gpus 0
    kind: str = "job"  # job (no operator), jobset (JobSet), trainjob (Kubeflow Trainer 2)
    image: str = "registry.example.com/train:1"  # docs/cluster.md says what it needs
    name: str = ""  # "" = the run folder's name
    namespace: str = ""  # "" = the one that kubectl is set to
    data_claim: str = "training-data"  # PersistentVolumeClaim at /data; "" = none (s3://, https://)
    runs_claim: str = "training-runs"  # at /runs
    cpus: int = 64  # of each machine
    memory_gib: int = 512
    shm_gib: int = 64  # /dev/shm, part of the memory
    cache_gib: int = 500  # of each machine's own disk, at /cache
    grace_s: int = 600  # for the save when a pod has to go


def manifests(cfg: Config, command: Sequence[str]) -> list[dict]:
    """Return the objects to apply.

    command: the script and its flags.
    Raises: ValueError for values that Kubernetes would refuse.
    """
    check_values(cfg, ("nodes", "processes", "cpus", "memory_gib", "shm_gib", "cache_gib", "grace_s"), {"kind": KINDS})
    if cfg.gpus < 0:
        raise ValueError(f"--gpus must be at least 0, got {cfg.gpus}")
    for field, (most, pattern) in _NAMES.items():
        given = getattr(cfg, field)
        if (given or field == "runs_claim") and (len(given) > most or not re.fullmatch(pattern, given)):
            raise ValueError(f"--{field} must be a-z, 0-9 and -, at most {most} characters; got {given!r}")
    if not re.fullmatch(r"\S+", cfg.image):
        raise ValueError(f"--image must be a name such as registry.example.com/train:1, got {cfg.image!r}")
    if cfg.shm_gib >= cfg.memory_gib:
        raise ValueError(f"--shm_gib {cfg.shm_gib} is part of the memory, so it must be less than {cfg.memory_gib}")
    name = cfg.name or re.sub(r"[^a-z0-9]+", "-", run_name(command).lower()).strip("-")
    # A pod's name, with what JobSet adds to it (-node-0-15), is a DNS label: at most 63 characters.
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", name):
        raise ValueError(f"--name must be a-z, 0-9 and -, begin with a letter, at most 47 characters; got {name!r}")
    objects = list(yaml.safe_load_all((FOLDER / f"{cfg.kind}.yaml").read_text(encoding="utf-8")))
    port = _metrics_port(command)
    objects = [_renamed(each, name, port or METRICS_PORT) for each in objects]
    for each in objects:
        if cfg.namespace:
            each["metadata"]["namespace"] = cfg.namespace
        for job in jobs_of(each):
            if "completions" in job:
                job["completions"] = job["parallelism"] = cfg.nodes
            if each["kind"] == "Job":
                job["backoffLimit"] = 20 * cfg.nodes
            _fill_pod(job["template"]["spec"], cfg)
            if not port:
                job["template"]["metadata"]["annotations"]["prometheus.io/scrape"] = "false"
            if each["kind"] != "TrainingRuntime":  # there the TrainJob has them
                job["template"]["spec"]["containers"][0]["args"] = script_arguments(cfg, name, command)
        if each["kind"] == "TrainingRuntime":
            each["spec"]["mlPolicy"]["numNodes"] = cfg.nodes
        if each["kind"] == "TrainJob":
            each["spec"]["trainer"] |= {
                "numNodes": cfg.nodes, "numProcPerNode": cfg.gpus or cfg.processes, "image": cfg.image,
                "args": script_arguments(cfg, name, command),
            }  # fmt: skip
    return objects


def jobs_of(manifest: dict) -> list[dict]:
    """Return the specs of the Jobs that an object is or will make."""
    match manifest["kind"]:
        case "Job":
            return [manifest["spec"]]
        case "JobSet":
            return [job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
        case "TrainingRuntime":
            return [job["template"]["spec"] for job in manifest["spec"]["template"]["spec"]["replicatedJobs"]]
    return []


def script_arguments(cfg: Config, name: str, command: Sequence[str]) -> list[str]:
    """Return the script's command line with what it does not say itself, as Kubernetes' `args`.

    A $ is doubled: Kubernetes makes one of two, and puts a variable where it finds $(NAME).
    Raises: ValueError for a run folder that is gone when its pod is.
    """
    folder = run_folder(command)
    if folder and not Path(folder).is_relative_to("/runs"):
        raise ValueError(f"--run_folder {folder} would be lost with its pod: say one in /runs, the claim --runs_claim")
    added = [] if folder else [f"--run_folder=/runs/{name}"]
    for flag, value in (("cache_folder", "/cache"), ("metrics_port", METRICS_PORT), ("metrics_host", "0.0.0.0")):
        if flag_value(command, flag) is None:
            added.append(f"--{flag}={value}")
    return [argument.replace("$", "$$") for argument in [*command, *added]]


def _metrics_port(command: Sequence[str]) -> int:
    """Return the port at which the script will serve its metrics, 0 for none.

    Raises: ValueError if what the command line says is no port.
    """
    said = str(METRICS_PORT) if (found := flag_value(command, "metrics_port")) is None else found
    if not (said.isascii() and said.isdigit() and int(said) < 2**16):
        raise ValueError(f"--metrics_port must be a port number, or 0 for none; got {said!r}")
    return int(said)


def _renamed(value, name: str, port: int):
    """Return the object with `name` instead of "train", where that is a name of its own: train-0.train:29400.

    port: stands where METRICS_PORT did.
    """
    if isinstance(value, dict):
        return {key: _renamed(inner, name, port) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, name, port) for inner in value]
    if str(value) == str(METRICS_PORT):
        return type(value)(port)
    if isinstance(value, str) and re.fullmatch(r"train(-[0-9a-z-]+)?(\.train(:\d+)?)?", value):
        return re.sub(r"(^|\.)train\b", rf"\g<1>{name}", value)
    return value


def _fill_pod(pod: dict, cfg: Config) -> None:
    container = pod["containers"][0]
    container["image"] = cfg.image
    pod["terminationGracePeriodSeconds"] = cfg.grace_s
    values = {
        "NNODES": cfg.nodes, "NGPU": cfg.gpus or cfg.processes, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": cfg.grace_s,
    }  # fmt: skip
    for variable in container["env"]:
        if variable["name"] in values:
            variable["value"] = str(values[variable["name"]])
    container["resources"] = {
        "requests": {"cpu": str(cfg.cpus), "memory": f"{cfg.memory_gib}Gi"},
        "limits": {"memory": f"{cfg.memory_gib}Gi"} | ({"nvidia.com/gpu": cfg.gpus} if cfg.gpus else {}),
    }
    for volume in pod["volumes"]:
        match volume["name"]:
            case "data":
                volume["persistentVolumeClaim"]["claimName"] = cfg.data_claim
            case "runs":
                volume["persistentVolumeClaim"]["claimName"] = cfg.runs_claim
            case "cache":
                volume["emptyDir"]["sizeLimit"] = f"{cfg.cache_gib}Gi"
            case "shm":
                volume["emptyDir"]["sizeLimit"] = f"{cfg.shm_gib}Gi"
    if not cfg.data_claim:
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "data"]
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "data"]


def main(cfg: Config, command: Sequence[str]) -> None:
    objects = manifests(cfg, command)
    print(f"# Made by ./launch.sh k8s from deploy/k8s/{cfg.kind}.yaml, which explains every part.")
    yaml.dump_all(objects, sys.stdout, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Puts quotation marks around every text that another reader of YAML could take for something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        style = None if _PLAIN.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


if __name__ == "__main__":
    config, script = read_command_line(Config, __doc__)
    run_main(lambda cfg: main(cfg, script), config)
