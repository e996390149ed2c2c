"""A real Slurm for tests: munge, a controller on this machine, and a slurmd on each of some hosts (`hosts.py`)."""

import os
import re
import signal
import subprocess
from pathlib import Path

from tests.deploy.hosts import Hosts
from tests.deploy.programs import require, wait_for
from tests.free_ports import free_ports

# Backfill and long credentials are for busy clusters; a requeued job waits for its credential to expire.  CR_Core:
# otherwise a job takes all of a node's memory, and jobs side by side wait for each other.
_CONFIG = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=5
MinJobAge=86400
SlurmdTimeout=10
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The daemons, and the commands of a login node."""

    def __init__(self, hosts: Hosts, folder: Path):
        require("slurmctld", "slurmd", "sbatch", "munged")
        self.hosts, self.folder = hosts, folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "Slurm":
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        folder.chmod(0o755)  # munge takes no socket's folder that others could replace
        (folder / "slurm.conf").write_text(
            _CONFIG.format(
                controller=os.uname().nodename.partition(".")[0], address=self.hosts.gateway, folder=folder,
                port=free_ports(), slurmd_port=18817,
                nodes="\n".join(
                    f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=8 Gres=gpu:8 State=UNKNOWN"
                    for name, address in self.hosts.address.items()
                ),
            )
        )  # fmt: skip
        for i in range(8):  # pretended GPUs
            (folder / f"gpu{i}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        log = (folder / "daemons.log").open("w")
        options = {"stdout": log, "stderr": log, "env": self.environment, "start_new_session": True}
        munged = [
            "munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge.key",
            f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed",
        ]  # fmt: skip
        self._daemons.append(subprocess.Popen(munged, **options))
        wait_for(lambda: (folder / "munge.sock").exists(), 60, "munge")
        self._daemons.append(subprocess.Popen(["slurmctld", "-D", "-f", f"{folder}/slurm.conf"], **options))
        for name in self.hosts.address:
            self.start_node(name)
        wait_for(lambda: self("sinfo", "-h", "-o", "%T", check=False).split() == ["idle"], 90, "idle Slurm nodes")
        return self

    def __exit__(self, *_) -> None:
        for name in self.hosts.address:
            self.hosts.kill(name)
        for daemon in reversed(self._daemons):
            os.killpg(daemon.pid, signal.SIGKILL)  # with slurmctld's helper
            daemon.wait(timeout=10)

    def start_node(self, name: str) -> None:
        log = (self.folder / f"slurmd-{name}.log").open("a")
        self.hosts.start(
            name, "slurmd", "-D", "-N", name, "-f", f"{self.folder}/slurm.conf",
            stdout=log, stderr=log, env=self.environment,
        )  # fmt: skip

    def __call__(self, *command: str, check: bool = True, **options) -> str:
        """Run a command of a login node and return what it prints."""
        options = {"env": self.environment, "timeout": 240} | options
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return a job's fields."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "--oneliner", "show", "job", number)))

    def wait_for_end(self, number: str, timeout_s: float) -> dict[str, str]:
        """Wait until the job is no longer queued or running and return its fields."""
        ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        wait_for(lambda: self.job(number)["JobState"] in ended, timeout_s, f"the end of job {number}")
        return self.job(number)
