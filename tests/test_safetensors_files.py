"""Headers give every tensor's bytes exactly, and any damage is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.safetensors_files import find_files, read_headers
from tests.range_server import range_server

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"


def some_tensors():
    random = torch.Generator().manual_seed(0)
    floats = {str(dtype): torch.randn(3, 5, generator=random).to(dtype) for dtype in FLOATS}
    integers = {str(dtype): torch.arange(7).to(dtype) for dtype in INTEGERS}
    return floats | integers | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "truth": torch.tensor([True])}


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
)  # fmt: skip


def write_folder(folder, parts):
    """Write one file for each dict of tensors, and the index."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for i, tensors in enumerate(parts, 1):
        file = f"{STEM}-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def folder(tmp_path):
    tensors = {f"w{i}": torch.full((2, 3), float(i)) for i in range(4)}
    names = list(tensors)
    return write_folder(tmp_path / "transformer", [{n: tensors[n] for n in part} for part in (names[:2], names[2:])])


def test_every_byte_is_where_the_header_says(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(some_tensors(), path, metadata={"format": "pt"})
    stored, content = read_headers(path), path.read_bytes()
    expected = load_file(path)
    assert stored.keys() == expected.keys() and len(stored) == 17
    for name, tensor in expected.items():
        entry = stored[name]
        assert (entry.shape, entry.dtype, entry.file.size) == (tuple(tensor.shape), tensor.dtype, len(content))
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[entry.offset : entry.offset + entry.num_bytes] == raw


def test_a_header_longer_than_the_first_read(tmp_path):
    names = [f"{i:04d}" + "x" * 2000 for i in range(200)]
    save_file({name: torch.tensor([float(i)]) for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    assert read_headers(tmp_path).keys() == set(names)


def test_a_folder_with_and_without_an_index(folder):
    stored = read_headers(folder)
    assert {name: entry.file.location[-24:] for name, entry in stored.items()} == {
        "w0": "00001-of-00002.safetensors"[-24:], "w1": "00001-of-00002.safetensors"[-24:],
        "w2": "00002-of-00002.safetensors"[-24:], "w3": "00002-of-00002.safetensors"[-24:],
    }  # fmt: skip
    assert read_headers(f"{folder}/") == stored
    (folder / INDEX).unlink()
    assert read_headers(folder) == stored


def damaged(header=None, data=b"\0" * 24, length=None):
    """Return a file's bytes: by default two sound tensors, float32 (2,) and (4,)."""
    if header is None:
        header = SOUND
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SOUND = {"a": entry(0, 8, [2]), "b": entry(8, 24, [4])}
DAMAGE = {
    "empty file": (b"", "header would be 0 bytes long; the file has 0"),
    "seven bytes": (b"\x10\0\0\0\0\0\0", "the file has 7"),
    "pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1", "header would be"),
    "huge header length": (damaged(length=2**63), "header would be 9223372036854775808 bytes long"),
    "no header": (damaged(length=0), "header would be 0 bytes"),
    "cut in the header": (damaged()[:40], "cut short: its header is"),
    "cut in the data": (damaged()[:-1], "cut short: its tensors need 24 bytes, it has 23"),
    "bytes too many": (damaged(data=b"\0" * 25), "1 bytes too many"),
    "not JSON": (damaged(b"{not json}"), "header cannot be read"),
    "not text": (damaged(b"\xff\xfe\xfd\xfc"), "header cannot be read"),
    "nested without end": (damaged(b"[" * 200_000), "header cannot be read"),
    "a list": (damaged([1, 2]), "header cannot be read"),
    "a name twice": (
        damaged(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                b'"a":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}'), "a stands in it twice",
    ),
    "unknown dtype": (damaged(SOUND | {"b": entry(8, 24, [4], "F4")}), "b has the unknown dtype 'F4'"),
    "unhashable dtype": (damaged(SOUND | {"b": entry(8, 24, [4], ["F32"])}), "entry for b is damaged"),
    "overlap": (damaged(SOUND | {"b": entry(4, 20, [4])}, b"\0" * 20), "b overlaps the tensor before it by 4 bytes"),
    "same range": (damaged({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, b"\0" * 8), "b overlaps"),
    "hole": (damaged(SOUND | {"b": entry(12, 28, [4])}, b"\0" * 28), "a hole of 4 bytes before b"),
    "hole at the start": (damaged({"b": entry(4, 20, [4])}, b"\0" * 20), "a hole of 4 bytes before b"),
    "shape and range differ": (damaged(SOUND | {"b": entry(8, 24, [5])}), r"b, F32 \(5,\), needs 20 bytes and has 16"),
    "negative shape": (damaged(SOUND | {"b": entry(8, 24, [-4])}), "entry for b is damaged"),
    "fractional offset": (damaged(SOUND | {"b": entry(8.0, 24, [4])}), "entry for b is damaged"),
    "backward range": (damaged({"a": entry(8, 0, [2])}), "needs 8 bytes and has -8"),
    "three offsets": (damaged({"a": entry(0, 8, [2]) | {"data_offsets": [0, 8, 24]}}), "entry for a is damaged"),
    "no shape": (damaged({"a": {"dtype": "F32", "data_offsets": [0, 24]}}), "entry for a is damaged"),
    "not an entry": (damaged({"a": 1}), "entry for a is damaged"),
}  # fmt: skip


def test_the_damage_is_the_only_thing_wrong(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(damaged())
    assert read_headers(tmp_path)["b"].shape == (4,)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_an_error(tmp_path, kind):
    content, message = DAMAGE[kind]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_headers(tmp_path)
    assert "model.safetensors is not a sound safetensors file" in str(caught.value)
    assert str(caught.value).endswith("copy it again")


def remove_a_file(folder):
    next(folder.glob("*-00002-*")).unlink()


def name_a_tensor_too_many(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["w9"] = index["weight_map"]["w0"]
    (folder / INDEX).write_text(json.dumps(index))


def swap_two_files(folder):
    index = json.loads((folder / INDEX).read_text())
    files = index["weight_map"]
    files["w0"], files["w2"] = files["w2"], files["w0"]
    (folder / INDEX).write_text(json.dumps(index))


def leave_the_folder(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w0": "../secret.safetensors"}}))


def add_a_file(folder):
    save_file({"w9": torch.zeros(1)}, folder / "other.safetensors")


def repeat_a_tensor(folder):
    (folder / INDEX).unlink()
    shutil.copy(next(folder.glob("*-00002-*")), folder / "other.safetensors")


FOLDER_DAMAGE = [
    (remove_a_file, "00002-of-00002.safetensors is not there"),
    (name_a_tensor_too_many, "disagree on 1 tensors, first w9"),
    (swap_two_files, "disagree on 2 tensors, first w0"),
    (leave_the_folder, "is not an index"),
    (lambda folder: (folder / INDEX).write_text("[]"), "is not an index"),
    (lambda folder: (folder / INDEX).write_bytes(b"\xff{"), "is not an index"),
    (add_a_file, "disagree on 1 tensors, first w9"),
    (repeat_a_tensor, "w2 is in both"),
]


@pytest.mark.parametrize("damage, message", FOLDER_DAMAGE)
def test_a_damaged_folder_is_an_error(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        read_headers(folder)


def test_where_there_is_nothing(tmp_path):
    assert find_files(tmp_path) == ([], {}) and find_files(tmp_path / "none") == ([], {})
    assert find_files(tmp_path / "none.safetensors") == ([], {})
    with pytest.raises(ValueError, match="no .safetensors file in"):
        read_headers(tmp_path)


def test_a_folder_on_a_web_server(folder):
    files = {f"/transformer/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with range_server(files) as server:
        url = f"{server.url}/transformer"
        local, remote = read_headers(folder), read_headers(url)
        assert remote.keys() == local.keys()
        for name, entry in remote.items():
            assert (entry.offset, entry.shape, entry.dtype) == (local[name].offset, local[name].shape, torch.float32)
            assert entry.file.location == f"{url}/{local[name].file.location.rpartition('/')[2]}"
            assert entry.file.version == '"first"'
        one = f"{url}/{STEM}-00001-of-00002.safetensors"
        assert read_headers(one).keys() == {"w0", "w1"} and find_files(one) == ([one], {})
        # One file of the known name needs no index; an empty folder holds nothing.
        server.files = {"/transformer/model.safetensors": files[f"/transformer/{STEM}-00001-of-00002.safetensors"]}
        assert read_headers(url + "/").keys() == {"w0", "w1"}
        server.files = {f"/transformer/{INDEX}": files[f"/transformer/{INDEX}"]}
        with pytest.raises(ValueError, match="-of-00002.safetensors is not there"):
            read_headers(url)
        server.files = {}
        assert find_files(url) == ([], {})
        with pytest.raises(ValueError, match="of a URL's folder the names diffusion_pytorch_model"):
            read_headers(url)
        server.forever = 403
        server.files = files
        with pytest.raises(PermissionError):
            read_headers(url)
