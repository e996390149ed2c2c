"""Checkpoints: bit-equal on any mesh, caught when damaged, whole or absent whatever kills a save."""

import json
import os
import resource
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel import checkpoint
from parallel.checkpoint_reader import CheckpointReader
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


# ---- Any mesh to any mesh --------------------------------------------------------------------------------------------


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
    odd |= {"other.bytes": torch.arange(7, dtype=torch.uint8), "other.none": torch.empty(0, 3)}
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


def test_what_fills_parameters_tracks_no_gradients(tmp_path, monkeypatch):
    """Two threads that fill parts of one sharded parameter would meet each other's views."""
    modes, fill = [], CheckpointReader._fill
    monkeypatch.setattr(CheckpointReader, "_fill", lambda *args: (modes.append(torch.is_grad_enabled()), fill(*args)))
    checkpoint.save(tmp_path, 1, {"model.a": torch.ones(3), "model.b": torch.ones(2)}, {})
    parameters = {"model.a": torch.nn.Parameter(torch.zeros(3)), "model.b": torch.nn.Parameter(torch.zeros(2))}
    checkpoint.load(tmp_path, 1, parameters)
    assert modes == [False, False] and all(p.requires_grad and p.min() == 1 for p in parameters.values())


# ---- One process: what is refused ------------------------------------------------------------------------------------


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
        ({"a": None}, r"another model: .*only in it \(first \['a'\]\)"),
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


# ---- One process: what may differ -----------------------------------------------------------------------------------


def run_of(trained: tuple[str, ...], keys: tuple[str, ...] = ("step", "exp_avg"), value: float = 1.0) -> dict:
    """Return the tensors of a run of two parameters, of which some are trained."""
    tensors = {f"model.{name}": torch.full((3,), value) for name in ("a.weight", "a.weight_2")}
    return tensors | {f"optimizer.{name}.{key}": torch.full((3,), value) for name in trained for key in keys}


def test_a_parameter_that_was_frozen_starts_with_fresh_state(tmp_path, caplog):
    checkpoint.save(tmp_path, 1, run_of(("a.weight",)), {})
    tensors = run_of(("a.weight", "a.weight_2"), value=0.0)
    checkpoint.load(tmp_path, 1, tensors)
    assert "no optimizer state of 1 parameters (first ['model.a.weight_2']): they start with fresh" in caplog.text
    assert {name: t[0].item() for name, t in tensors.items()} == {
        name: 0.0 if name.startswith("optimizer.a.weight_2") else 1.0 for name in tensors
    }


def test_a_parameter_that_is_frozen_now_leaves_its_state_unused(tmp_path, caplog):
    checkpoint.save(tmp_path, 1, run_of(("a.weight", "a.weight_2")), {})
    tensors = run_of(("a.weight",), value=0.0)
    checkpoint.load(tmp_path, 1, tensors)
    assert "of 1 parameters that are not trained now (first ['model.a.weight_2'])" in caplog.text
    assert all(torch.equal(t, torch.ones(3)) for t in tensors.values())


def test_another_optimizer_is_an_error(tmp_path):
    checkpoint.save(tmp_path, 1, run_of(("a.weight", "a.weight_2")), {})
    tensors = run_of(("a.weight", "a.weight_2"), ("step", "momentum_buffer"), 0.0)
    message = r"another optimizer: 2 tensors not in it \(first \['optimizer.a.weight.momentum_buffer'.* 2 only in it"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, 1, tensors)
    with pytest.raises(ValueError, match="2 tensors not in it"):  # a weight or an average is never fresh
        checkpoint.load(tmp_path, 1, run_of(("a.weight",)) | {"ema.a": torch.zeros(3), "model.new": torch.zeros(3)})
    assert all(not tensor.any() for tensor in tensors.values())


def test_checkpoints_of_the_first_format_load(tmp_path):
    """Files as torch.distributed.checkpoint writes them, under a record that lists them."""
    path = tmp_path / "step-00000003"
    dcp.save(tensors_of(3), storage_writer=dcp.FileSystemWriter(path))
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    files = {name: {"size": len(data), "crc32": zlib.crc32(data)} for name, data in content.items()}
    record = {"format": 1, "step": 3, "state": {"step": 3}, "files": files, "torch": "2.13.0", "num_ranks": 1}
    own = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (path / "commit.json").write_text(json.dumps(record | {"crc32": own}, indent=1))
    assert checkpoint.latest(tmp_path) == 3
    assert_loads(tmp_path, 3)
    assert torch.equal(checkpoint.load_tensors(tmp_path, 3, "a")["a"], tensors_of(3)["a"])
    os.truncate(path / ".metadata", 100)  # a pickle: never opened when it is not what was written
    with pytest.raises(ValueError, match=".metadata has 100 of"):
        checkpoint.load(tmp_path, 3, tensors_of(0))


# ---- One process: what is published stays ----------------------------------------------------------------------------


def test_the_record_lists_every_file(tmp_path):
    path = save(tmp_path, 3)
    assert path.name == "step-00000003"
    record = json.loads((path / "commit.json").read_text())
    assert record["files"].keys() == {file.name for file in path.iterdir()} - {"commit.json"}
    for name, entry in record["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"size": len(content), "crc32": zlib.crc32(content)}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_published_step_is_never_modified(tmp_path):
    path = save(tmp_path, 1)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    assert checkpoint.save(tmp_path, 1, tensors_of(9), {"step": 9}) == path
    assert before == {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    # A damaged one was never there, as far as a save is concerned.
    os.truncate(path / "index.json", 10)
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


# ---- One rank cannot write -------------------------------------------------------------------------------------------


def save_with_one_bad_disk(rank, world_size, folder, kind):
    sizes = (1, world_size, 1, 1)
    tensors = train_state(sizes, seed=1, num_steps=1)
    checkpoint.save(folder, 1, tensors, {"step": 1})
    write = os.write
    if rank == 1 and kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif rank == 1 and kind == "short":  # the disk says yes and drops the end
        os.write = lambda file, data: len(data) + 0 * write(file, bytes(data)[: len(data) // 2])
    elif rank == 1 and kind == "garbled":
        os.write = lambda file, data: write(file, bytes(data)[:-1] + b"\x55")
    state = {"step": 2} if kind != "states differ" else {"step": 2 + rank}
    if kind == "no json":
        state = {"step": {1, 2}}
    with pytest.raises(ValueError, match="step 2 could not be written") as caught:
        checkpoint.save(folder, 2, tensors, state)
    os.write = write
    return str(caught.value), checkpoint.latest(folder), sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["full", "short", "garbled", "states differ", "no json"])
def test_if_one_rank_fails_all_raise_and_nothing_is_published(tmp_path, kind):
    results = run_ranks(save_with_one_bad_disk, 2, tmp_path, kind)
    assert all(newest == 1 and names == ["step-00000001"] for _, newest, names in results)
    expected = {
        "full": "rank 1: OSError(27",
        "short": "rank-00001-00000.bin has",
        "garbled": "rank-00001-00000.bin does not match its checksum",
        "states differ": "the state differs between ranks",
        "no json": "JSON serializable",
    }
    assert all(expected[kind] in message for message, _, _ in results), results
