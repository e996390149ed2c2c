"""Checkpoints: bit-equal on any mesh, caught when damaged, whole or absent whatever kills a save."""

import json
import logging
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch

from parallel import checked_writer, checkpoint
from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.mesh import build_mesh, data_parallel
from parallel.slices import local_slice
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from tests.toy_model import PLAN, UNITS, Toy, init_toy, toy_batch
from utils.ema import EMA
from utils.optimizer import build_adamw, optimizer_tensors

MESHES = {4: [(1, 4, 1, 1), (1, 2, 1, 2), (1, 1, 1, 4), (2, 2, 1, 1)], 3: [(1, 3, 1, 1)], 1: [(1, 1, 1, 1)]}


# ---- Any mesh to any mesh -------------------------------------------------------------------------------------------


def train_state(sizes: tuple, seed: int, num_steps: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a toy run after some steps: weights, optimizer, average, and three odd ones out."""
    mesh = build_mesh("cpu", *sizes)
    with torch.device("meta"):
        model = Toy()
    model.requires_grad_().norm_in.requires_grad_(False)  # frozen: weights, but no optimizer state
    apply_tensor_parallel(model, PLAN, mesh["tp"])
    shard_model(model, UNITS, mesh, torch.float32, torch.float32, True)
    materialize(model, torch.device("cpu"), init_toy, seed)
    optimizer = build_adamw(model.named_parameters(), 1e-2, (0.9, 0.99), 1e-8, 0.1)
    ema = EMA(model.named_parameters(), 0.9)
    rank, num_ranks = data_parallel(mesh)
    for step in range(num_steps):
        x, labels, targets = toy_batch(torch.float32, num=12)  # as many on 1, 2, 3 or 4 ranks
        losses = [(model(x[i], labels[i]) - targets[i]).square().sum() for i in range(rank, len(x), num_ranks)]
        (sum(losses) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    tensors = {f"model.{name}": p for name, p in model.named_parameters()}
    tensors |= {f"optimizer.{name}": t for name, t in optimizer_tensors(optimizer, model).items()}
    tensors |= {f"ema.{name}": t for name, t in ema.tensors().items()}
    odd = {"other.counts": torch.arange(5), "other.scalar": torch.tensor(1.5), "other.half": torch.ones(3).bfloat16()}
    return tensors | {name: value * seed for name, value in odd.items()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor).detach().clone()


def save_each(rank, world_size, folder, meshes):
    saved = {}
    for sizes in meshes:
        tensors = train_state(sizes, seed=1, num_steps=2)
        checkpoint.save(folder / str(sizes), 2, tensors, {"step": 2, "note": "狗脸", "list": [1, 2.5, None]})
        saved[sizes] = {name: full(tensor) for name, tensor in tensors.items()}
    return saved if rank == 0 else None


def load_each(rank, world_size, folder, meshes, expected):
    """Load what every mesh saved on every one of `meshes`; each rank compares its own shards."""
    for sizes in meshes:
        tensors = train_state(sizes, seed=2, num_steps=0)  # other weights, no optimizer state yet
        for source, values in expected.items():
            assert checkpoint.latest(folder / str(source)) == 2
            state = checkpoint.load(folder / str(source), 2, tensors)
            assert state == {"step": 2, "note": "狗脸", "list": [1, 2.5, None]}
            for name, tensor in tensors.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                assert torch.equal(local, values[name][local_slice(tensor)]), (source, sizes, name)
    return True


def test_every_mesh_loads_what_every_mesh_saved(tmp_path):
    saved = {}
    for world_size, meshes in MESHES.items():
        saved |= run_ranks(save_each, world_size, tmp_path, meshes)[0]
    some = saved[(1, 1, 1, 1)]
    assert some["optimizer.blocks.0.unused.weight.step"] == 0 and some["optimizer.out.weight.step"] == 2
    assert "model.norm_in.weight" in some and "optimizer.norm_in.weight.exp_avg" not in some
    for world_size, meshes in MESHES.items():
        assert all(run_ranks(load_each, world_size, tmp_path, meshes, saved))
    # One process alone, without a process group, reads full tensors by prefix.
    for sizes, values in saved.items():
        ema = checkpoint.load_tensors(tmp_path / str(sizes), 2, "ema.")
        assert ema.keys() == {name for name in values if name.startswith("ema.")}
        assert all(torch.equal(tensor, values[name]) for name, tensor in ema.items())


# ---- One process: damage --------------------------------------------------------------------------------------------


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(12.0).view(3, 4) + 100 * step,
        "b": torch.full((5,), step),
        "c": torch.tensor(float(step)),
    }


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, tensors_of(step), {"step": step})


def assert_loads(folder: Path, step: int) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(step).items()}
    assert checkpoint.load(folder, step, tensors) == {"step": step}
    assert all(torch.equal(tensors[name], expected) for name, expected in tensors_of(step).items())


def damages(path: Path):
    """Yield (description, function that damages the checkpoint at `path`) for every kind and every file."""
    for file in sorted(path.iterdir()):
        size = file.stat().st_size

        def flip(file=file, at=0, bit=0):
            content = bytearray(file.read_bytes())
            content[at] ^= 1 << bit
            file.write_bytes(content)

        for i, at in enumerate(range(0, size, max(1, size // 23))):
            if file.name != checkpoint.RECORD or chr(file.read_bytes()[at]).isalnum():
                yield f"bit {i % 8} of byte {at} of {file.name}", lambda flip=flip, at=at, i=i: flip(at=at, bit=i % 8)
        for length in (0, 1, size // 2, size - 1):
            yield f"{file.name} cut to {length}", lambda file=file, length=length: os.truncate(file, length)
        yield f"{file.name} grown", lambda file=file: file.write_bytes(file.read_bytes() + b"\0")
        yield f"{file.name} missing", file.unlink
        other = path.with_name("step-00000001") / file.name
        yield f"{file.name} of another step", lambda file=file, other=other: shutil.copy(other, file)
    yield "an extra file", lambda: (path / "__1_0.distcp").write_bytes(b"")

    def swap():
        shutil.rmtree(path)
        shutil.copytree(path.with_name("step-00000001"), path)

    yield "another step's whole folder", swap


def test_every_kind_of_damage_is_caught_before_a_tensor_changes(tmp_path, caplog):
    pristine = tmp_path / "pristine"
    save(pristine, 1), save(pristine, 2)
    cases = len(list(damages(pristine / "step-00000002")))
    assert cases > 80
    for i in range(cases):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine, folder)
        description, damage = list(damages(folder / "step-00000002"))[i]
        damage()
        tensors = tensors_of(7)
        with pytest.raises(ValueError, match="not a valid checkpoint"):
            checkpoint.load(folder, 2, tensors)
        assert all(torch.equal(tensors[name], tensors_of(7)[name]) for name in tensors), description
        with pytest.raises(ValueError, match="not a valid checkpoint"):
            checkpoint.load_tensors(folder, 2, "a")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert checkpoint.latest(folder) == 1, description
        assert "step-00000002" in caplog.text
    assert_loads(folder, 1)


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-x").mkdir()
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(ValueError, match="no commit record"):
        checkpoint.load(tmp_path, 3, {})
    with pytest.raises(ValueError, match="no commit record"):
        checkpoint.load(tmp_path, 4, {})


def test_other_names_shapes_and_dtypes_are_refused_by_name(tmp_path):
    save(tmp_path, 1)
    for change, message in (
        ({"a": None}, r"only in it \(first \['a'\]\)"),
        ({"new": torch.ones(1)}, r"not in it \(first \['new'\]\)"),
        ({"a": torch.ones(4, 3)}, r"a is .*\(3, 4\).* there, .*\(4, 3\).* here"),
        ({"a": torch.ones(3, 4).double()}, "a is .*float32.* there, .*float64.* here"),
    ):
        tensors = {name: tensor for name, tensor in (tensors_of(7) | change).items() if tensor is not None}
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path, 1, tensors)
        assert torch.equal(tensors["b"], tensors_of(7)["b"])
    with pytest.raises(ValueError, match="no tensor named ema"):
        checkpoint.load_tensors(tmp_path, 1, "ema.")


# ---- One process: what is published stays ---------------------------------------------------------------------------


def test_the_record_lists_every_file(tmp_path):
    path = save(tmp_path, 3)
    assert path.name == "step-00000003"
    record = json.loads((path / "commit.json").read_text())
    assert record["files"].keys() == {file.name for file in path.iterdir()} - {"commit.json"}
    for name, entry in record["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"size": len(content), "crc32": __import__("binascii").crc32(content)}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_published_step_is_never_modified(tmp_path):
    path = save(tmp_path, 1)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    assert checkpoint.save(tmp_path, 1, tensors_of(9), {"step": 9}) == path
    assert before == {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    # A damaged one was never there, as far as a save is concerned.
    os.truncate(path / ".metadata", 10)
    save(tmp_path, 1)
    assert_loads(tmp_path, 1)


def test_prune_keeps_the_newest_sound_ones(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "step-00000005" / "commit.json").unlink()
    (tmp_path / ".step-00000006.partial").mkdir()
    checkpoint.prune(tmp_path, 2)
    # 5 is not sound: it does not count, and is left for a person to look at.
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000004", "step-00000005"}
    checkpoint.prune(tmp_path, 0)
    assert checkpoint.latest(tmp_path) == 4
    checkpoint.prune(tmp_path / "none", 1)


# ---- Killed at every call -------------------------------------------------------------------------------------------


def run_and_kill(action, folder: Path, kill_at: int) -> bool:
    """Run `action` in a forked process that dies, buffers unwritten, at its kill_at-th change of the file system.

    Returns whether it died.
    """
    pid = os.fork()
    if pid:
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert exit_code in (0, 9), "the action itself failed"
        return exit_code == 9
    changes = 0

    def count(*_):
        nonlocal changes
        changes += 1
        if changes == kill_at:
            os._exit(9)

    def audit(event, args):
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"):
            if str(folder) in str(args[0]) or event in ("os.remove", "os.rmdir"):  # rmtree names files by descriptor
                count()

    write = checked_writer._CheckedStream.write
    checked_writer._CheckedStream.write = lambda self, data: (count(), write(self, data))[1]
    os.fsync = lambda descriptor: count()  # the kernel outlives the process: nothing to wait for
    sys.addaudithook(audit)
    try:
        action()
        os._exit(0)
    except BaseException:
        os._exit(1)


def prepare(folder: Path, scenario: str) -> None:
    save(folder, 1), save(folder, 2)
    if scenario == "prune":
        save(folder, 3)
    else:  # what is in the way of a save: a damaged folder of that step, and one that another kill left behind
        os.truncate(folder / "step-00000002" / ".metadata", 10)
        (folder / ".step-00000002.partial").mkdir()
        (folder / ".step-00000002.partial" / "__0_0.distcp").write_bytes(b"of a save that was killed")


@pytest.mark.parametrize("scenario", ["save", "prune"])
def test_killed_at_every_change_of_the_file_system(tmp_path, scenario, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def action():
        checkpoint.prune(folder, 1) if scenario == "prune" else save(folder, 2)

    prepare(tmp_path / "before", scenario)
    killed, steps_seen = 0, set()
    while True:
        folder = tmp_path / str(killed)
        shutil.copytree(tmp_path / "before", folder)
        died = run_and_kill(action, folder, killed + 1)
        newest = checkpoint.latest(folder)
        assert newest in ((3,) if scenario == "prune" else (1, 2))
        assert_loads(folder, newest)
        for step in (1, 2, 3):  # whatever counts as valid is whole
            if checkpoint._problem(folder, step) is None:
                assert_loads(folder, step)
        steps_seen.add(newest)
        action()  # the same again finishes the work
        assert checkpoint.latest(folder) == (3 if scenario == "prune" else 2)
        assert not list(folder.glob(".*")) or scenario == "prune"
        if not died:
            break
        killed += 1
    assert killed >= (8 if scenario == "prune" else 20)
    assert steps_seen == ({3} if scenario == "prune" else {1, 2})


# ---- One rank cannot write ------------------------------------------------------------------------------------------


def save_with_one_bad_disk(rank, world_size, folder, kind):
    sizes = (1, world_size, 1, 1)
    tensors = train_state(sizes, seed=1, num_steps=1)
    checkpoint.save(folder, 1, tensors, {"step": 1})
    write = checked_writer._CheckedStream.write
    if rank == 1 and kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif rank == 1 and kind == "short":  # the disk says yes and drops the end
        checked_writer._CheckedStream.write = lambda self, data: write(self, data) and self.raw.truncate(self.size // 2)
    elif rank == 1 and kind == "garbled":
        original = checked_writer._CheckedStream.write

        def garble(self, data):
            original(self, data)
            self.raw.seek(-1, os.SEEK_CUR)
            return self.raw.write(b"\x55")

        checked_writer._CheckedStream.write = garble
    state = {"step": 2} if kind != "states differ" else {"step": 2 + rank}
    if kind == "no json":
        state = {"step": {1, 2}}
    with pytest.raises(ValueError, match="step 2 could not be written") as caught:
        checkpoint.save(folder, 2, tensors, state)
    checked_writer._CheckedStream.write = write
    return str(caught.value), checkpoint.latest(folder), sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["full", "short", "garbled", "states differ", "no json"])
def test_if_one_rank_fails_all_raise_and_nothing_is_published(tmp_path, kind):
    results = run_ranks(save_with_one_bad_disk, 2, tmp_path, kind)
    assert all(newest == 1 and names == ["step-00000001"] for _, newest, names in results)
    expected = {
        "full": "rank 1: OSError(27",
        "short": "__1_0.distcp has",
        "garbled": "__1_0.distcp does not match its checksum",
        "states differ": "the state differs between ranks",
        "no json": "JSON serializable",
    }
    assert all(expected[kind] in message for message, _, _ in results), results
