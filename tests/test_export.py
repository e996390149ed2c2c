"""Export: bit for bit what was loaded, whole or absent, in little memory."""

import dataclasses
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file

from model.mmdit import MMDiT
from parallel.safetensors_writer import TensorSpec, write_sharded
from parallel.weights import read_safetensors
from tests.released_folder import TINY, make_released, same_bytes, weights_of
from tests.run_folder import SMALL, make_run, make_runs_on_meshes
from tests.spawn import run_ranks
from tools import export
from utils.config import parse
from utils.random_streams import torch_generator

REPOSITORY = Path(__file__).resolve().parent.parent
# Number of ranks → every (dp_replicate, dp_shard, cp, tp) that makes it.
MESHES = {n: [m for m in itertools.product((1, 2, 4), repeat=4) if math.prod(m) == n] for n in (1, 2, 4)}
# With and without sequence parallelism, under which other weights are replicated.
MESHES = {n: [(m, by_rows) for m in meshes for by_rows in {False, m[3] > 1}] for n, meshes in MESHES.items()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released") / "small", SMALL)


@pytest.fixture(scope="module")
def run(released, tmp_path_factory):
    """A run whose checkpoints hold the released weights as their average and others as raw weights."""
    average = weights_of(released)
    raw = {name.replace("ema.", "model."): -tensor for name, tensor in average.items()}
    return make_run(tmp_path_factory.mktemp("runs") / "run", released, average | raw, steps=(3, 5))


# ---- Round trip -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", MESHES)
def test_what_was_loaded_on_any_mesh_is_exported_bit_for_bit(tmp_path, world_size):
    released = {name: make_released(tmp_path / name, SMALL, dtype) for name, dtype in DTYPES.items()}
    run_ranks(make_runs_on_meshes, world_size, MESHES[world_size], released, tmp_path)
    for case in MESHES[world_size]:
        for dtype, model in released.items():
            run, output = tmp_path / f"{dtype}-{case}", tmp_path / f"out-{dtype}-{case}"
            kind, sign = ("raw", 1) if dtype == "bfloat16" else ("ema", -1)
            export.main(export.Config(str(run), str(output), weights=kind, dtype=dtype, max_shard_gb=4e-5))
            original = {name: sign * tensor for name, tensor in read_safetensors(model / "transformer").items()}
            assert same_bytes(read_safetensors(output / "transformer"), original)
            assert len(list((output / "transformer").glob("*.safetensors"))) > 1
            opened, info = QwenImageTransformer2DModel.from_pretrained(
                output / "transformer", torch_dtype=DTYPES[dtype], output_loading_info=True, local_files_only=True
            )
            assert not any(info.values()), info
            assert same_bytes(dict(opened.state_dict()), original)


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_comfyui_file(tmp_path, zero_cond_t):
    model = make_released(tmp_path / "model", dataclasses.replace(SMALL, zero_cond_t=zero_cond_t))
    run = make_run(tmp_path / "run", model, weights_of(model))
    output = tmp_path / "mine.safetensors"
    export.main(export.Config(str(run), str(output), format="comfyui", dtype="float32"))
    tensors = load_file(output)
    marker = tensors.pop("__index_timestep_zero__", None)
    assert (marker is not None) == zero_cond_t and (marker is None or marker.numel() == 0)
    assert same_bytes(tensors, read_safetensors(model / "transformer"))
    with safe_open(output, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt" and metadata["step"] == "3" and metadata["weights"] == "ema"
    export.main(export.Config(str(run), str(output), format="comfyui", overwrite=True))
    assert {tensor.dtype for name, tensor in load_file(output).items() if not name.startswith("_")} == {torch.bfloat16}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_shards_are_as_small_as_asked_and_any_reader_opens_them(tmp_path):
    random = torch_generator(0, 0, "shards", "test")
    sizes = torch.randint(0, 400, (40,), generator=random).tolist()
    tensors = {f"layer.{i}.weight": torch.randn(size, generator=random) for i, size in enumerate(sizes)}
    tensors |= {"scalar": torch.tensor(1.5), "half": torch.randn(3, 2, 5).bfloat16(), "big": torch.randn(3000)}
    tensors["not contiguous"] = torch.randn(6, 4).T
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_sharded(tmp_path, "weights", specs, tensors.__getitem__, 4000, {"who": "测试"})
    files = sorted(tmp_path.glob("*.safetensors"))
    assert same_bytes(read_safetensors(tmp_path), tensors)
    assert [p for p in files if p.stat().st_size > 4000] == [p for p in files if "big" in load_file(p)]
    small = [p.stat().st_size for p in files if "big" not in load_file(p)]
    assert sum(small) > 0.6 * 4000 * len(small)
    index = json.loads((tmp_path / "weights.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()


# ---- Memory ---------------------------------------------------------------------------------------------------------


MEASURE = """
import sys
from tools import export

def memory(kind):  # MB
    line = next(line for line in open("/proc/self/status") if line.startswith(kind))
    return int(line.split()[1]) * 1024 / 1e6

run, large, output = sys.argv[1:]
export.main(export.Config(run, output + "/small"))  # whatever is imported late is there now
for dtype in ("float32", "bfloat16"):
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = memory("VmRSS")
    export.main(export.Config(large, f"{output}/{dtype}", dtype=dtype))
    print("measured", memory("VmHWM") - before, memory("VmHWM"), file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_memory_is_two_tensors(run, tmp_path):
    config = dataclasses.replace(
        SMALL, num_layers=3, num_attention_heads=28, attention_head_dim=32, axes_dims_rope=(8, 12, 12)
    )
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "transformer/config.json").write_text(json.dumps(config.to_json()))
    tensors = {f"ema.{name}": parameter.detach() for name, parameter in MMDiT(config).named_parameters()}
    sizes = [4 * tensor.numel() / 1e6 for tensor in tensors.values()]
    large = make_run(tmp_path / "large", model, tensors)
    # glibc would otherwise keep freed blocks of this size for later; those of a real model are beyond its limit.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(run), str(large), str(tmp_path / "out")],
        cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("measured")]
    assert len(measured) == 2 and sum(sizes) > 350 and 15 < max(sizes) < 20
    for growth, peak in measured:
        assert float(growth) < 2 * max(sizes) + 5
        assert float(peak) < 2 * max(sizes) + 500  # the whole process, with Python and torch


# ---- What can go wrong ----------------------------------------------------------------------------------------------


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "out")))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"run": "nowhere"}, ["nowhere", "no run folder"]),
        ({"run": str(TINY / "transformer")}, ["names no model"]),
        ({"step": "4"}, ["no checkpoint of step 4", "[3, 5]"]),
        ({"step": "newest"}, ["--step", "latest", "newest"]),
        ({"model": "nowhere"}, ["nowhere", "--model"]),
        ({"model": str(TINY)}, ["not of the network", "--model"]),
        ({"format": "comfyui"}, ["one file", ".safetensors"]),
        ({"output": "out.safetensors"}, ["a folder"]),
        ({"max_shard_gb": 0.0}, ["--max_shard_gb"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_message(run, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        export.main(export.Config(**({"run": str(run), "output": "out"} | change)))
    assert all(word in str(error.value) for word in words), error.value
    assert left_behind(tmp_path) == []


def test_the_command_line_names_the_formats(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(export.Config, args=["--run", "a", "--output", "b", "--format", "gguf"])
    assert stop.value.code == 2
    printed = "".join(capsys.readouterr())
    assert all(word in printed for word in ("gguf", "diffusers", "comfyui"))


def test_the_newest_valid_checkpoint_or_a_named_one(run, tmp_path, capsys):
    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    data = next((broken / "checkpoints/step-00000005").glob("rank-*.bin"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="does not match its checksum"):
        export.main(export.Config(str(broken), str(tmp_path / "out"), step="5"))
    assert left_behind(tmp_path) == []
    for step, output in (("latest", "out1"), ("3", "out2")):
        export.main(export.Config(str(broken), str(tmp_path / output), step=step))
        assert "step 3" in capsys.readouterr().out
    (broken / "checkpoints/step-00000003/commit.json").unlink()
    with pytest.raises(ValueError, match="no valid checkpoint"):
        export.main(export.Config(str(broken), str(tmp_path / "out")))


def test_a_checkpoint_that_is_pruned_meanwhile(run, tmp_path, monkeypatch):
    pruned = tmp_path / "run"
    shutil.copytree(run, pruned)

    def slow(*args):  # so slow that training has deleted the checkpoint before the comparison
        write_sharded(*args)
        shutil.rmtree(pruned / "checkpoints")

    monkeypatch.setattr(export, "write_sharded", slow)
    with pytest.raises(ValueError, match="can no longer be read"):
        export.main(export.Config(str(pruned), str(tmp_path / "out")))
    assert left_behind(tmp_path) == []


def test_an_average_that_was_never_kept(released, tmp_path):
    run = make_run(tmp_path / "run", released, weights_of(released, "raw"))
    with pytest.raises(ValueError, match="no ema weights"):
        export.main(export.Config(str(run), str(tmp_path / "out")))


def test_a_part_of_the_pipeline_is_missing(run, released, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(released, model)
    shutil.rmtree(model / "scheduler")
    with pytest.raises(ValueError, match="no scheduler/"):
        export.main(export.Config(str(run), str(tmp_path / "out"), model=str(model)))
    (model / "model_index.json").unlink()
    with pytest.raises(ValueError, match="no model_index.json"):
        export.main(export.Config(str(run), str(tmp_path / "out"), model=str(model)))
    export.main(export.Config(str(run), str(tmp_path / "out.safetensors"), format="comfyui", model=str(model)))


def test_an_earlier_export_is_replaced_only_when_asked_and_by_a_whole_one(run, tmp_path, monkeypatch):
    output = tmp_path / "out"
    config = export.Config(str(run), str(output), step="3", dtype="float32")
    export.main(config)
    before = read_safetensors(output / "transformer")
    other = dataclasses.replace(config, weights="raw")
    with pytest.raises(ValueError, match="--overwrite"):
        export.main(other)
    other = dataclasses.replace(other, overwrite=True)

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "weight_files", full_disk)  # the last thing before the comparison
        with pytest.raises(ValueError, match="No space left"):
            export.main(other)
    assert same_bytes(read_safetensors(output / "transformer"), before) and left_behind(tmp_path) == ["out"]

    (tmp_path / ".out.partial").mkdir()  # as a killed export leaves it
    (tmp_path / ".out.partial/export.json").write_text("{}")
    export.main(other)
    assert same_bytes(read_safetensors(output / "transformer"), {name: -tensor for name, tensor in before.items()})
    assert left_behind(tmp_path) == ["out"]


def test_what_is_no_export_is_never_replaced(run, released, tmp_path):
    precious, downloaded, file = (tmp_path / name for name in ("precious", "downloaded", "other.safetensors"))
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    shutil.copytree(released, downloaded)
    for output in (precious, downloaded):
        with pytest.raises(ValueError, match="not an earlier export"):
            export.main(export.Config(str(run), str(output), overwrite=True))
    file.write_text("no safetensors")
    for _ in range(2):
        with pytest.raises(ValueError, match="not an earlier export"):
            export.main(export.Config(str(run), str(file), format="comfyui", overwrite=True))
        shutil.copyfile(next((released / "transformer").glob("*.safetensors")), file)
    for source in (released, released.parent, run, run.parent):
        with pytest.raises(ValueError, match="made from"):
            export.main(export.Config(str(run), str(source), overwrite=True))
    assert (precious / "thesis.txt").exists() and (run / "config.json").exists()


@pytest.mark.parametrize("what", ["a flipped bit", "a lost file", "another file's tensors"])
def test_what_the_disk_did_to_it_is_noticed(run, tmp_path, monkeypatch, what):
    def broken_disk(folder, *args):
        write_sharded(folder, *args)
        first, second = sorted(folder.glob("*.safetensors"))[:2]
        if what == "a lost file":
            second.unlink()
        elif what == "a flipped bit":
            content = bytearray(first.read_bytes())
            content[-1] ^= 0x40
            first.write_bytes(content)
        else:
            shutil.copyfile(first, second)

    monkeypatch.setattr(export, "write_sharded", broken_disk)
    with pytest.raises(ValueError):
        export.main(export.Config(str(run), str(tmp_path / "out"), max_shard_gb=2e-5))
    assert left_behind(tmp_path) == []


def test_the_disk_must_have_room(run, tmp_path, monkeypatch):
    free = 60 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, free))
    with pytest.raises(ValueError, match="0.06 GB free"):
        export.main(export.Config(str(run), str(tmp_path / "out")))
    assert left_behind(tmp_path) == []


def test_hard_links_share_only_what_nobody_edits(run, released, tmp_path):
    export.main(export.Config(str(run), str(tmp_path / "copied")))
    export.main(export.Config(str(run), str(tmp_path / "linked"), hard_links=True))
    for output, shared in (("copied", False), ("linked", True)):
        for name in ("vae/diffusion_pytorch_model.safetensors", "vae/config.json", "tokenizer/tokenizer.json"):
            assert (tmp_path / output / name).read_bytes() == (released / name).read_bytes()
            expected = shared and name.endswith(".safetensors")
            assert (tmp_path / output / name).samefile(released / name) == expected
