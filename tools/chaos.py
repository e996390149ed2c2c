"""Rehearse faults: run a training command undisturbed, then with each fault, and make a table of what became of it.

    python -m tools.chaos -- train_mmdit.py --num_steps 12 --save_every 4 --log_every 1
    python -m tools.chaos --random 12 -- train_mmdit.py --num_steps 60 --save_every 5 …        12 faults in one run
    python -m tools.chaos --random 12 --checkpoints s3 -- train_mmdit.py …  likewise, with checkpoints on S3
    python -m tools.chaos --kinds kill hang --table faults.md -- train_mmdit.py …

The command is launched as launch.sh does, on this machine, and launched again whenever it ends otherwise than complete,
as a scheduler would.  Its --run_folder is set to one inside --folder.  Kinds: see utils/fault_injection.py.

Faults of the disk are real where this process may mount a tmpfs, in a name space of its own (`unshare`): as root, and
for others where the kernel allows it; elsewhere they hit what the ranks write.  Faults of S3 happen in a proxy before
moto's server, which requirements-dev.txt installs, or before AWS_ENDPOINT_URL, see tools/faulty_store.py.
"""

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.chaos_report import Outcome, check_table, markdown, write_table
from tools.chaos_run import Launcher
from tools.faulty_store import start_store
from utils.config import parse, run_main
from utils.fault_injection import Fault

# Of each kind that can be met in any run: the phase it strikes in and its value.  The disk is used in a save.
CASES = {
    "kill": ("forward", None), "stop": ("forward", None), "hang": ("backward", None), "slow": ("data_wait", 2.0),
    "exit": ("optimizer", None), "error": ("forward", None), "oom": ("backward", None), "term": ("forward", None),
    "int": ("backward", None), "usr1": ("forward", None), "nan": ("forward", None), "spike": ("forward", None),
    "badsample": ("forward", None), "full": ("checkpoint", None), "readonly": ("checkpoint", None),
    "slowdisk": ("checkpoint", 0.02), "inodes": ("checkpoint", None), "s3error": ("checkpoint", None),
    "s3stall": ("checkpoint", None), "s3cut": ("checkpoint", None), "s3denied": ("checkpoint", None),
    "clock": ("forward", None),
}  # fmt: skip
_SKIPPED = ("nan", "spike", "badsample")  # a step is skipped; after all others the weights are the undisturbed run's
_DISK, _STORE = ("full", "readonly", "inodes"), ("s3error", "s3stall", "s3cut", "s3denied")
HARMLESS = tuple(kind for kind in CASES if kind not in _SKIPPED)
_SPIKE_STEP = 36  # by then it is known what is usual
# Of a kind more flags of the command: a spike needs some steps before it, and two bad steps are enough to go back.
_FLAGS = {"spike": ("--num_steps", "40"), "badsample": ("--rollback_after", "2")}
_IN_NAMESPACE = "CHAOS_IN_NAMESPACE"


@dataclass(frozen=True)
class Config:
    folder: str = "runs/chaos"  # everything that is written; must not hold an earlier rehearsal
    kinds: tuple[str, ...] = tuple(CASES)  # faults to rehearse, one run each
    random: int = 0  # instead: so many random ones in one run
    seed: int = 0  # of the random ones
    checkpoints: str = "local"  # with random faults: local, tmpfs (a file system of its own) or s3
    ranks: int = 2  # processes
    step: int = 6  # the step that is disturbed, and
    save_step: int = 8  # the one before which a disturbed save happens: a multiple of the command's --save_every
    hang_s: float = 5.0  # the command's deadline for a phase
    timeout_s: float = 600.0  # a run that takes longer, all starts together, is given up
    table: str = ""  # file to write the table to, as Markdown, between its marks if it has them; nothing = print it


def cases(cfg: Config, num_steps: int, save_every: int) -> dict[str, list[Fault]]:
    """Return name → faults of each run to make.  Raises: ValueError for a kind, place or number that makes no sense."""
    if unknown := [kind for kind in cfg.kinds if kind not in CASES]:
        raise ValueError(f"--kinds must be of {', '.join(CASES)}; got {', '.join(unknown)}")
    if cfg.checkpoints not in ("local", "tmpfs", "s3"):
        raise ValueError(f"--checkpoints must be local, tmpfs or s3, got {cfg.checkpoints!r}")
    if cfg.random:
        return _random_faults(cfg, num_steps, save_every)
    return {kind: _faults(cfg, kind, num_steps, save_every) for kind in cfg.kinds}


def _faults(cfg: Config, kind: str, num_steps: int, save_every: int) -> list[Fault]:
    phase, value = CASES[kind]
    if kind == "spike":
        steps = [_SPIKE_STEP]  # of as many as _FLAGS say
    elif phase == "checkpoint":
        steps = [cfg.save_step]
        if not 0 < cfg.save_step <= num_steps or save_every < 1 or cfg.save_step % save_every:
            raise ValueError(
                f"{kind}: --save_step {cfg.save_step} must be a multiple of the command's --save_every {save_every}, "
                f"up to its --num_steps {num_steps}: elsewhere nothing is saved that could be disturbed"
            )
    else:
        steps = [cfg.step, cfg.step + 1] if kind == "badsample" else [cfg.step]
        if not 0 <= steps[0] <= steps[-1] < num_steps:
            raise ValueError(
                f"{kind}: --step {cfg.step} must be 0 to {num_steps - len(steps)}: the command's --num_steps "
                f"{num_steps} ends before it would strike"
            )
    return [Fault(kind, cfg.ranks - 1, step, phase, value) for step in steps]


def _random_faults(cfg: Config, num_steps: int, save_every: int) -> dict[str, list[Fault]]:
    """Return as many faults as asked for, at steps of their own: each kind once, while there are enough."""
    kinds = [k for k in cfg.kinds if k in HARMLESS and (k not in _STORE or cfg.checkpoints == "s3")]
    if not kinds or not 0 < cfg.random < num_steps or not 0 < save_every < num_steps:
        raise ValueError(
            f"--random {cfg.random} needs --kinds that leave the weights alone, more --num_steps than that, got "
            f"{num_steps}, and --save_every below them, got {save_every}"
        )
    draw = random.Random(cfg.seed)
    asked = [k for k in ("kill", "term", "hang", "full", "s3error") if k in kinds]
    asked = draw.sample(asked, min(len(asked), cfg.random))
    rest = [k for k in kinds if k not in asked]
    chosen = asked + draw.sample(rest, min(len(rest), cfg.random - len(asked)))
    chosen += draw.choices(kinds, k=cfg.random - len(chosen))
    saves, drawn, taken = list(range(save_every, num_steps, save_every)), [], set()
    for kind in sorted(chosen, key=lambda kind: CASES[kind][0] != "checkpoint"):  # those of saves have fewer places
        phase, value = CASES[kind]
        free = [s for s in (saves if phase == "checkpoint" else range(1, num_steps)) if s not in taken]
        step = draw.choice(free or saves)
        taken.add(step)
        if kind in _DISK:
            value = 2.0  # seconds: a save in the background outlasts its phase
        drawn.append(Fault(kind, draw.randrange(cfg.ranks), step, phase, value))
    return {f"{cfg.random} random faults": sorted(drawn, key=lambda fault: fault.step)}


def place(cfg: Config, name: str) -> str:
    """Return where the checkpoints of a run go, or all it writes."""
    if cfg.random:
        return cfg.checkpoints
    return "s3" if name in _STORE else "tmpfs" if name in _DISK else "local"


def main(cfg: Config, command: list[str]) -> None:
    launcher = Launcher(Path(cfg.folder), command, cfg.ranks, cfg.hang_s, cfg.timeout_s)
    planned = cases(cfg, launcher.number("--num_steps"), launcher.number("--save_every"))
    if cfg.table:
        check_table(Path(cfg.table))
    places, left_out = {name: place(cfg, name) for name in planned}, {}
    why_no_store = start_store()[1] if "s3" in places.values() else ""
    print("undisturbed …", flush=True)
    undisturbed = launcher.run("undisturbed", [])
    if undisturbed.codes != [0]:
        raise ValueError(f"the undisturbed run ended with {undisturbed.codes}; see {undisturbed.folder}/printed.txt")
    outcomes: list[tuple[Outcome, list[str]]] = []
    for name, faults in planned.items():
        if places[name] == "s3" and why_no_store:
            left_out[name] = why_no_store
            print(f"{name}: left out, {why_no_store}", flush=True)
            continue
        if places[name] == "tmpfs" and not os.environ.get(_IN_NAMESPACE):
            print(f"{name}: no tmpfs can be mounted here (see --help): the fault hits what the ranks write", flush=True)
            places[name] = "local"
        print(f"{name} …", flush=True)
        outcome = launcher.run(name.replace(" ", "-"), faults, places[name], _FLAGS.get(name, ()))
        outcomes.append((outcome, outcome.cells(undisturbed)))
        print(f"  {' | '.join(outcomes[-1][1])}", flush=True)
    text = markdown(undisturbed, outcomes, launcher.words, left_out)
    if cfg.table:
        write_table(Path(cfg.table), text)
    else:
        print(text)


def _enter_namespace() -> None:
    """Start this program anew where it can mount, in a name space of mounts that ends with it, if that is possible."""
    if os.environ.get(_IN_NAMESPACE):
        return
    for flags in (["-m"], ["-Urm"]):  # as root; as root of a name space of users
        try:
            tried = ["unshare", *flags, "sh", "-c", "mount -t tmpfs chaos /mnt"]
            if subprocess.run(tried, capture_output=True, timeout=20).returncode == 0:
                os.environ[_IN_NAMESPACE] = "1"
                os.execvp("unshare", ["unshare", *flags, sys.executable, "-m", "tools.chaos", *sys.argv[1:]])
        except (OSError, subprocess.TimeoutExpired):
            continue


if __name__ == "__main__":
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    config = parse(Config, __doc__, arguments[:split])
    _enter_namespace()
    run_main(lambda cfg: main(cfg, arguments[split + 1 :]), config)
