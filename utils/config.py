"""Command line, errors and run folder of the scripts."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import tyro

Config = TypeVar("Config")
# These decide how far and how closely a run is watched, not what it computes: they may change on resume.
MAY_CHANGE = frozenset({
    "num_steps", "log_every", "eval_every", "eval_samples", "sample_every", "sample_prompts", "sample_size",
    "sample_steps", "sample_cfg_scale", "save_every", "keep_checkpoints", "log_samples", "num_workers",
    "prefetch_steps", "latents_cache_gib", "text_cache_gib", "timeout_s", "cache_folder", "run_folder",
    "dp_replicate", "dp_shard", "cp", "tp", "reshard_after_forward", "activation_checkpointing", "max_bad_samples",
    "max_tokens_per_micro_batch",
})  # fmt: skip


def parse(config_class: type[Config], description: str | None = None) -> Config:
    """Turn the command line into a config; `--help` shows each field's comment, an unknown flag is an error."""
    return tyro.cli(
        config_class,
        description=description,
        use_underscores=True,
    )


def run_main(main: Callable[[Config], None], config: Config) -> None:
    """Call main(config).  What a user can get wrong is printed once, without a traceback wall, and exits with 2."""
    try:
        main(config)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            logging.getLogger("train").debug("traceback", exc_info=True)
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr, flush=True)
        # Other ranks raised alike; leave without waiting for collectives that will not come.
        sys.stdout.flush()
        os._exit(2)


def write_run_folder(folder: Path, config: object, script: str, may_change: Collection[str] = MAY_CHANGE) -> None:
    """Put the resolved config, the script's text and the git diff into the run folder (call on rank 0).

    Raises: ValueError if the folder belongs to a run with other settings that decide what is computed.
    """
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    path = folder / "config.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        changed = [
            f"--{name}: {earlier.get(name)!r} there, {settings.get(name)!r} here"
            for name in sorted(settings.keys() | earlier.keys())
            if earlier.get(name) != settings.get(name) and name not in may_change
        ]
        if changed:
            raise ValueError(
                f"{folder} is a run with another configuration:\n  " + "\n  ".join(changed)
                + "\nuse the same values to resume it, or another --run_folder for a new run"
            )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    _write(folder / Path(script).name, Path(script).read_text())
    diff = _git("diff", "HEAD", cwd=Path(script).parent)
    commit = _git("rev-parse", "HEAD", cwd=Path(script).parent)
    if commit is not None:
        _write(folder / "git.diff", f"# commit {commit.strip()}\n{diff or ''}")


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text)
    beside.replace(path)


def _git(*arguments: str, cwd: Path) -> str | None:
    """Return git's output, or None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
