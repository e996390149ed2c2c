"""Read runs afterwards: `python -m tools.report RUN [RUN …]` makes one HTML page that needs nothing else.

Curves, samples over time, the validation loss by diffusion time, language and category, time by phase, goodput,
restarts, faults and warnings, and what the runs' configurations differ in.  It reads the run folders alone, also of a
run that is under way.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from tools.report_page import page
from tools.report_run import read_run
from utils.config import parse, run_main


@dataclass(frozen=True)
class Config:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run folders, the first in the first colour
    output: str = ""  # the page; nothing = report.html in the first run's folder


def main(cfg: Config) -> None:
    if not cfg.runs:
        raise ValueError("name at least one run folder: python -m tools.report runs/mmdit")
    runs = [read_run(Path(run)) for run in cfg.runs]
    names = [run.name for run in runs]
    runs = [  # of two that have the same name the folders tell them apart
        replace(run, name=folder) if names.count(run.name) > 1 else run
        for run, folder in zip(runs, cfg.runs, strict=True)
    ]
    output = Path(cfg.output or Path(cfg.runs[0]) / "report.html")
    try:
        output.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error}") from error
    shown = str(output).encode(errors="surrogateescape").decode(errors="replace")  # a terminal takes no other name
    print(f"{shown}: {len(runs)} runs, {output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
