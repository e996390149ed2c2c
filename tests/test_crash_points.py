"""Killed at every change of the file system or request to S3: a complete checkpoint always loads, bit-equal."""

import gc
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from parallel import checkpoint
from parallel.checkpoint_retention import problem
from parallel.checkpoint_saver import CheckpointSaver
from parallel.checkpoint_storage import open_storage
from tests.faults.crash_points import Ended, counted, fork, fork_ranks, in_clean_process
from tests.s3_server import KEYS, put, s3_server
from utils.config import parse

STEPS = (1, 2, 3, 4)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Return what two ranks hold; those with a rank in the name are that rank's alone."""
    return {
        "model.a": torch.arange(12.0).view(3, 4) + 100 * step,
        "model.b": torch.full((5,), step),
        "optimizer.a.step": torch.tensor(float(step)),
        "rank0.c": torch.full((2, 2), -step).bfloat16(),
        "rank1.d": torch.full((3,), step, dtype=torch.uint8),
    }


def own_tensors(step: int) -> dict[str, torch.Tensor]:
    """Return what this rank, or the only one, holds."""
    own = f"rank{torch.distributed.get_rank()}." if torch.distributed.is_initialized() else "rank"
    return {name: t for name, t in tensors_of(step).items() if not name.startswith("rank") or name.startswith(own)}


def save(folder, step: int) -> None:
    checkpoint.save(folder, step, own_tensors(step), {"step": step})


def assert_loads(folder, step: int) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(step).items()}
    assert checkpoint.load(folder, step, tensors) == {"step": step}
    assert all(torch.equal(tensors[name], expected) for name, expected in tensors_of(step).items())


def check(folder, newest: set[int]) -> int:
    """Assert that what counts as valid is whole, and that the newest is one of these; return it."""
    found = checkpoint.latest(folder)
    assert found in newest, (found, newest)
    for step in STEPS:
        if problem(open_storage(folder), step) is None:
            assert_loads(folder, step)
    return found


# ---- What is killed -------------------------------------------------------------------------------------------------


def prepare_save(folder) -> None:
    save(folder, 1), save(folder, 2)


def prepare_again(folder: Path) -> None:
    """A damaged folder of the step that is saved, and one that another kill left behind."""
    prepare_save(folder)
    os.truncate(folder / "step-00000002" / "index.json", 10)
    (folder / ".step-00000002.1234.partial").mkdir()
    (folder / ".step-00000002.1234.partial" / "rank-00000-00000.bin").write_bytes(b"of a save that was killed")


def prepare_prune(folder) -> None:
    save(folder, 1), save(folder, 2), save(folder, 3)


def run_saver(folder, mode: str) -> None:
    saver = CheckpointSaver(folder, mode, keep_last=1, timeout_s=20)
    saver.save(3, own_tensors(3), {"step": 3})
    saver.save(4, own_tensors(4), {"step": 4})
    saver.close()


# Name → (what lies there before, what is killed, on how many ranks, steps that may be the newest, that of a whole run).
SCENARIOS = {
    "save": (prepare_save, partial(save, step=3), 2, {2, 3}, 3),
    "save again": (prepare_again, partial(save, step=2), 2, {1, 2}, 2),
    "prune": (prepare_prune, partial(checkpoint.prune, keep_last=1), 1, {3}, 3),
    "save and prune": (prepare_save, partial(run_saver, mode="none"), 2, {2, 3, 4}, 4),
    "in a thread": (prepare_save, partial(run_saver, mode="thread"), 2, {2, 3, 4}, 4),
}


def sweep(folder: Path | str, name: str, every: int) -> tuple[int, set[int]]:
    """Kill each rank at every `every`-th point and return how many times, and the newest steps after it.

    With every = 1 each point is killed with and without a power cut, else they take turns.  An s3:// folder is seen
    from forked processes only.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what is never freed is not copied in every fork
    prepare, action, num_ranks, allowed, last = SCENARIOS[name]
    is_local, num_points, seen, number = isinstance(folder, Path), 0, set(), 0
    in_process = _call if is_local else _call_in_fork
    if is_local:
        prepare(folder / "before")

    def run(place, victim=0, kill_at=0, power_cut=False) -> list[Ended]:
        if num_ranks == 1:
            return [fork(counted(partial(action, place)), kill_at, power_cut)]
        return fork_ranks(partial(action, place), num_ranks, victim, kill_at, power_cut)

    for victim in range(num_ranks):
        kill_at = 1
        while kill_at:
            both = (False, True) if every == 1 and is_local else (is_local and kill_at // every % 2 == victim,)
            for power_cut in both:
                number += 1
                place = folder / str(number) if is_local else f"{folder}/{name.replace(' ', '-')}/{number}"
                in_process(partial(shutil.copytree, folder / "before", place) if is_local else partial(prepare, place))
                ended = run(place, victim, kill_at, power_cut)
                was_killed = ended[victim].was_killed
                assert was_killed or not any(of_rank.error for of_rank in ended), ended
                assert not any(of_rank.was_killed for i, of_rank in enumerate(ended) if i != victim), "a rank hangs"
                seen.add(in_process(partial(check, place, allowed if was_killed else {last})))
                num_points += was_killed
                if number % 6 == 0:  # the same again finishes the work
                    again = run(place)
                    assert not any(of_rank.error or of_rank.was_killed for of_rank in again), again
                    in_process(partial(check, place, {last}))
                if is_local:
                    shutil.rmtree(place)
            kill_at = kill_at + every if was_killed else 0
    return num_points, seen


def _call(function):
    return function()


def _call_in_fork(function):
    ended = fork(lambda crash: function())
    assert not ended.error and not ended.was_killed, ended
    return ended.result


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_some_changes_of_the_file_system(tmp_path, name):
    every = {"prune": 3, "save": 6, "save again": 8}.get(name, 20)
    num_points, seen = in_clean_process(sweep, tmp_path, name, every)
    assert num_points >= 4
    assert len(seen) > 1 or name == "prune"


@pytest.mark.exhaustive
def test_killed_at_every_change_of_the_file_system(tmp_path):
    found = {name: in_clean_process(sweep, tmp_path / name, name, 1) for name in SCENARIOS}
    print({name: num_points for name, (num_points, _) in found.items()})
    assert sum(num_points for num_points, _ in found.values()) >= 300
    assert all(seen == SCENARIOS[name][3] for name, (_, seen) in found.items()), found


# ---- S3 -------------------------------------------------------------------------------------------------------------


def sweep_s3(names: list[str], every: int) -> dict[str, tuple[int, set[int]]]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    with s3_server(limit_s=1500) as url:
        os.environ.update(KEYS, AWS_ENDPOINT_URL=url)
        put(url, "/bucket")
        return {name: sweep("s3://bucket/run", name, every) for name in names}


def test_killed_at_some_requests_to_s3():
    found = in_clean_process(sweep_s3, ["save", "prune"], 3)
    assert all(num_points >= 3 for num_points, _ in found.values()), found


@pytest.mark.exhaustive
def test_killed_at_every_request_to_s3():
    found = in_clean_process(sweep_s3, [name for name in SCENARIOS if name != "save again"], 1)
    print({name: num_points for name, (num_points, _) in found.items()})
    assert all(seen == SCENARIOS[name][3] for name, (_, seen) in found.items()), found


# ---- An export ------------------------------------------------------------------------------------------------------


def sweep_export(folder: Path, every: int) -> int:
    """Kill an export at every `every`-th change: checkpoints stay as they are, and what has its name is whole."""
    torch.set_num_threads(1)
    from tests.released_folder import make_released, same_bytes, weights_of
    from tests.run_folder import SMALL, make_run
    from tools import export

    model = make_released(folder / "model", SMALL)
    weights = weights_of(model)
    run, num_points, kill_at, seen = make_run(folder / "run", model, weights, steps=(3, 4)), 0, 1, set()
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    gc.freeze()
    while kill_at:
        output = folder / f"out-{kill_at}"
        arguments = ["--run", str(run), "--output", str(output), "--dtype", "float32"]
        ended = fork(counted(partial(export.main, parse(export.Config, args=arguments))), kill_at, kill_at % 2 == 0)
        assert ended.was_killed or not ended.error, ended.error
        assert before == {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
        assert output.exists() or ended.was_killed
        if output.exists():
            assert same_bytes(weights_of(output), weights)
        seen.add(output.exists())
        num_points += ended.was_killed
        kill_at = kill_at + every if ended.was_killed else 0
        shutil.rmtree(output, ignore_errors=True)
    assert seen == {True, False}
    return num_points


def test_an_export_killed_at_some_changes_of_the_file_system(tmp_path):
    assert in_clean_process(sweep_export, tmp_path, 40) >= 3


@pytest.mark.exhaustive
def test_an_export_killed_at_every_change_of_the_file_system(tmp_path):
    assert in_clean_process(sweep_export, tmp_path, 1) >= 100
