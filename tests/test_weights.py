"""Released weights reach the right place on every mesh, exactly; or all ranks raise and nothing has changed."""

import contextlib
import os
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import parallel.weights
from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.mesh import build_mesh
from parallel.safetensors_files import read_headers
from parallel.tensor_parallel import apply_tensor_parallel
from parallel.weights import has_weights, load_weights, read_safetensors, weight_files
from tests.range_server import range_server
from tests.spawn import run_ranks
from tests.test_safetensors_files import write_folder
from tests.toy_model import PLAN, UNITS, Toy
from utils import byte_source
from utils.byte_source import LocalFile, Patience

MESHES = {
    1: [(1, 1, 1, 1)],
    3: [(1, 3, 1, 1)],
    4: [(1, 4, 1, 1), (1, 2, 1, 2), (2, 2, 1, 1), (2, 1, 1, 2), (1, 1, 1, 4)],
}


def toy_tensors(dtype=torch.float32):
    random = torch.Generator().manual_seed(5)
    return {name: torch.randn(p.shape, generator=random).to(dtype) for name, p in Toy().named_parameters()}


@pytest.fixture
def folder(tmp_path):
    tensors = toy_tensors()
    names = sorted(tensors)
    return write_folder(tmp_path / "toy", [{n: tensors[n] for n in part} for part in (names[::2], names[1::2])])


def sharded_toy(sizes, dtype=torch.float32):
    mesh = build_mesh("cpu", *sizes)
    with torch.device("meta"):
        model = Toy().to(dtype)
    apply_tensor_parallel(model, PLAN, mesh["tp"])
    shard_model(model, UNITS, mesh, dtype, torch.float32, True)
    return model.to_empty(device="cpu")


def constant(model, value=7.0):
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(value)
    return model


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def full(model):
    return {
        n: p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()
    }


# ---- The right bytes ------------------------------------------------------------------------------------------------
def load_on_ranks(rank, world_size, location, cases):
    results = []
    for sizes, dtype in cases:
        model = sharded_toy(sizes, dtype)
        names = load_weights(model, location)
        assert names == {name for name, _ in model.named_parameters()}
        results.append(full(model))
    return results


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_gets_the_file(folder, world_size):
    cases = list(product(MESHES[world_size], (torch.float32, torch.bfloat16)))
    expected = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert expected.keys() == toy_tensors().keys()
    for results in run_ranks(load_on_ranks, world_size, folder, cases):
        for (sizes, dtype), values in zip(cases, results, strict=True):
            for name, value in expected.items():
                assert torch.equal(values[name], value.to(dtype)), (sizes, dtype, name)


def test_whole_on_one_process(folder):
    expected = toy_tensors()
    tensors = read_safetensors(folder)
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[n], v) for n, v in expected.items())
    model = Toy()
    assert load_weights(model, folder) == expected.keys()
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    assert all(p.untyped_storage().resizable() for p in model.parameters())  # as before
    files = weight_files(folder)
    assert files.keys() == expected.keys() and all(n in load_file(file) for n, file in files.items())


# ---- Values that are not in the files -------------------------------------------------------------------------------
class Extended(Toy):
    def __init__(self):
        super().__init__()
        self.language_embed = nn.Embedding(3, 2)


def test_only_what_the_weights_lack_is_drawn(folder):
    drawn = []

    def init(name, parameter, generator):
        drawn.append(name)
        nn.init.normal_(parameter, generator=generator)

    with torch.device("meta"):
        model, scratch = Extended(), Extended()
    materialize(model, torch.device("cpu"), init, 3, folder, optional=("language_embed.weight",))
    assert drawn == ["language_embed.weight"]
    materialize(scratch, torch.device("cpu"), init, 3)
    assert drawn[1:] == [name for name, _ in scratch.named_parameters()]
    expected = toy_tensors() | {"language_embed.weight": scratch.language_embed.weight}
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())


def test_what_is_optional(folder):
    model = constant(Extended())
    with pytest.raises(ValueError, match="1 tensors missing.*language_embed.weight"):
        load_weights(model, folder)
    assert load_weights(model, folder, optional=("language_embed.weight",)) == toy_tensors().keys()
    assert (model.language_embed.weight == 7).all() and torch.equal(model.out.bias, toy_tensors()["out.bias"])


# ---- Faults ---------------------------------------------------------------------------------------------------------
def without(tensors):
    del tensors["out.bias"]


def with_another(tensors):
    tensors["other"] = torch.zeros(1)


def transposed(tensors):
    tensors["blocks.0.up.weight"] = tensors["blocks.0.up.weight"].T.contiguous()


def of_integers(tensors):
    tensors["out.bias"] = tensors["out.bias"].to(torch.int32)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_the_length(path):
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)


MISFITS = [
    (without, r"1 tensors missing \(first \['out.bias'\]\), 0 not of this model"),
    (with_another, r"0 tensors missing \(first \[\]\), 1 not of this model \(first \['other'\]\)"),
    (transposed, r"blocks.0.up.weight in .* has shape \(12, 48\), the model needs \(48, 12\)"),
    (of_integers, "out.bias in .* has dtype torch.int32, which does not become"),
    (cut, "cut short: its tensors need"),
    (flip_the_length, "header would be 18446744073709551615 bytes"),
]


def raises_on_ranks(rank, world_size, locations, prepare=None):
    """Return each location's error, having seen that no parameter changed."""
    messages = []
    for location in locations:
        model = constant(sharded_toy((1, 2, 1, world_size // 2)))
        with (prepare or contextlib.nullcontext)(), pytest.raises(ValueError) as caught:
            load_weights(model, location)
        assert all((local(parameter) == 7).all() for parameter in model.parameters()), location
        messages.append(str(caught.value))
    return messages


def test_all_ranks_raise_before_a_parameter_changes(tmp_path):
    locations = []
    for damage, _ in MISFITS:
        path, tensors = tmp_path / damage.__name__ / "model.safetensors", toy_tensors()
        path.parent.mkdir()
        if damage not in (cut, flip_the_length):
            damage(tensors)
        save_file(tensors, path)
        if damage in (cut, flip_the_length):
            damage(path)
        locations.append(path.parent)
    results = run_ranks(raises_on_ranks, 4, [*locations, tmp_path / "none"])
    assert all(messages == results[0] for messages in results)
    for message, (_, pattern) in zip(results[0], [*MISFITS, (None, "no .safetensors file in")], strict=True):
        assert re.search(pattern, message), message


@contextlib.contextmanager
def missing_here():
    """Let a file be missing on rank 1 alone: another machine's disk."""
    if torch.distributed.get_rank() != 1:
        yield
        return

    def missing(location, **_):
        raise FileNotFoundError(f"{location} does not exist")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel.weights, "open_source", missing)
        yield


def test_a_file_that_one_rank_lacks(folder):
    for messages in run_ranks(raises_on_ranks, 2, [folder], missing_here):
        assert messages[0].endswith("does not exist (on rank 1)")


def fail_midway(rank, world_size, folder):
    model = sharded_toy((1, 2, 1, 1))
    before = LocalFile.read_into

    def failing(self, offset, buffer):
        if offset > 600 and rank == 1:
            raise OSError("the disk is broken")
        before(self, offset, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFile, "read_into", failing)
        with pytest.raises(ValueError) as caught:
            load_weights(model, folder)
    return str(caught.value)


def test_a_read_that_fails_midway_on_one_rank(tmp_path):
    save_file(toy_tensors(), tmp_path / "model.safetensors")
    header = min(entry.offset for entry in read_headers(tmp_path).values())
    assert header > 600  # so that only tensors are out of reach
    for message in run_ranks(fail_midway, 2, tmp_path):
        assert message == "the weights are loaded in part, so this run cannot go on: the disk is broken (on rank 1)"


# ---- Remote ---------------------------------------------------------------------------------------------------------
HASTY = Patience(max_retries=3, first_wait_s=0.01, max_wait_s=0.02, stall_s=10, total_s=30)


def load_remote(rank, world_size, url):
    byte_source.DEFAULT_PATIENCE = HASTY
    model = constant(sharded_toy((1, 2, 1, 1)))
    try:
        assert has_weights(url) and not has_weights(url + "/none")
        load_weights(model, url)
    except ValueError as error:
        return str(error)
    return full(model)


def test_ranges_from_a_web_server(folder):
    files = {f"/toy/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
    with range_server(files) as server:
        server.faults = [None] * 4 + [503, "cut", 500]  # the first four are the index, twice, and the headers
        for values in run_ranks(load_remote, 2, f"{server.url}/toy"):
            assert isinstance(values, dict), values
            assert all(torch.equal(values[name], value) for name, value in toy_tensors().items())
        # Rank 0 alone asked for sizes and headers: once for has_weights, once to load.
        assert not server.faults
        heads = [path for method, path, *_ in server.requests if method == "HEAD" and "/none/" not in path]
        assert len(heads) == 2 * 2 + 2 * 1 + 2  # the index is looked for and read, twice; then each of two files
        server.requests.clear()
        server.forever = 500
        for message in run_ranks(load_remote, 2, f"{server.url}/toy"):
            assert "could not be read" in message


def change_midway(rank, world_size, url):
    byte_source.DEFAULT_PATIENCE = HASTY
    model = sharded_toy((1, 2, 1, 1))
    before = byte_source.RemoteFile.read_into

    def other_version(self, offset, buffer):
        self.version = '"before"'  # as if the header had come from an earlier version
        before(self, offset, buffer)

    if rank == 1:
        byte_source.RemoteFile.read_into = other_version
    with pytest.raises(ValueError) as caught:
        load_weights(model, url)
    return str(caught.value)


def test_a_remote_file_that_changes(folder):
    files = {f"/toy/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
    with range_server(files) as server:
        for message in run_ranks(change_midway, 2, f"{server.url}/toy"):
            assert "loaded in part" in message and "changed while it was read" in message and "on rank 1" in message


def test_has_weights(folder, tmp_path):
    assert has_weights(folder) and has_weights(next(folder.glob("*.safetensors")))
    assert (
        not has_weights(tmp_path) and not has_weights(tmp_path / "none") and not has_weights(tmp_path / "x.safetensors")
    )
    with pytest.raises(ValueError, match="no reader for gs://"):
        has_weights("gs://bucket/folder")
