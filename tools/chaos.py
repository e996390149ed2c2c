"""Rehearse faults: run a training command undisturbed, then with each fault, and make a table of what became of it.

    python -m tools.chaos -- train_mmdit.py --num_steps 12 --save_every 4 --log_every 1
    python -m tools.chaos --random 12 -- train_mmdit.py --num_steps 60 --save_every 5 …        12 faults in one run
    python -m tools.chaos --kinds kill hang --table faults.md -- train_mmdit.py …

The command is launched as launch.sh does, on this machine, and launched again whenever it ends otherwise than complete,
as a scheduler would.  Its --run_folder is set to one inside --folder.  Kinds: see utils/fault_injection.py.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.chaos_report import Outcome, markdown
from tools.chaos_run import Launcher
from utils.config import parse, run_main
from utils.fault_injection import Fault

# Of each kind that can be met in any run: the phase it strikes in and its value.  The disk is used in a save.
CASES = {
    "kill": ("forward", None), "stop": ("forward", None), "hang": ("backward", None), "slow": ("data_wait", 2.0),
    "exit": ("optimizer", None), "error": ("forward", None), "oom": ("backward", None), "term": ("forward", None),
    "int": ("backward", None), "usr1": ("forward", None), "nan": ("forward", None), "full": ("checkpoint", None),
    "readonly": ("checkpoint", None), "slowdisk": ("checkpoint", 0.02), "inodes": ("checkpoint", None),
    "clock": ("forward", None),
}  # fmt: skip
# After these the weights are those of the undisturbed run to the bit; a nan or a spike skips a step.
HARMLESS = tuple(kind for kind in CASES if kind != "nan")


@dataclass(frozen=True)
class Config:
    folder: str = "runs/chaos"  # everything that is written; must not hold an earlier rehearsal
    kinds: tuple[str, ...] = tuple(CASES)  # faults to rehearse, one run each
    random: int = 0  # instead: so many random ones in one run
    seed: int = 0  # of the random ones
    ranks: int = 2  # processes
    step: int = 6  # the step that is disturbed, and
    save_step: int = 8  # the one before which a disturbed save happens: a multiple of the command's --save_every
    hang_s: float = 5.0  # the command's deadline for a phase
    timeout_s: float = 600.0  # a run that takes longer, all starts together, is given up
    table: str = ""  # file to write the table to, as Markdown; nothing = print it


def cases(cfg: Config, num_steps: int, save_every: int) -> dict[str, list[Fault]]:
    """Return name → faults of each run to make.  Raises: ValueError for a kind that is not known."""
    if unknown := [kind for kind in cfg.kinds if kind not in CASES]:
        raise ValueError(f"--kinds must be of {', '.join(CASES)}; got {', '.join(unknown)}")
    if not cfg.random:
        faults = {}
        for kind in cfg.kinds:
            phase, value = CASES[kind]
            faults[kind] = [
                Fault(kind, cfg.ranks - 1, cfg.save_step if phase == "checkpoint" else cfg.step, phase, value)
            ]
        return faults
    draw = random.Random(cfg.seed)
    drawn = []
    for step in sorted(draw.sample(range(1, num_steps), cfg.random)):
        kind = draw.choice([kind for kind in cfg.kinds if kind in HARMLESS])
        phase, value = CASES[kind]
        if phase == "checkpoint":
            step = max(save_every, step // save_every * save_every)
        drawn.append(Fault(kind, draw.randrange(cfg.ranks), step, phase, value))
    return {f"{cfg.random} random faults": drawn}


def main(cfg: Config, command: list[str]) -> None:
    launcher = Launcher(Path(cfg.folder), command, cfg.ranks, cfg.hang_s, cfg.timeout_s)
    planned = cases(cfg, launcher.number("--num_steps"), launcher.number("--save_every"))
    print("undisturbed …", flush=True)
    undisturbed = launcher.run("undisturbed", [])
    if undisturbed.codes != [0]:
        raise ValueError(f"the undisturbed run ended with {undisturbed.codes}; see {undisturbed.folder}/printed.txt")
    outcomes: list[Outcome] = []
    for name, faults in planned.items():
        print(f"{name} …", flush=True)
        outcomes.append(launcher.run(name.replace(" ", "-"), faults))
        print(f"  {outcomes[-1].summary(undisturbed)}", flush=True)
    text = markdown(undisturbed, outcomes, launcher.words)
    if cfg.table:
        Path(cfg.table).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    run_main(lambda cfg: main(cfg, arguments[split + 1 :]), parse(Config, __doc__, arguments[:split]))
