"""tools.prepare on edits: what is stored shows what the rows' files show, and every bad row has its reason."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from PIL import Image
from webdataset import TarWriter

from data.index import build_index
from data.plan import every_language
from data.reader import Reader
from tests.collections_of_pictures import files_of, picture, read_shards
from tests.released_folder import TINY
from tools import prepare

BOX = (32, 16, 96, 64)  # left, top, right, bottom of the masks' white


@pytest.fixture(autouse=True)
def no_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def mask(width: int, height: int, box=BOX) -> bytes:
    image = Image.new("L", (width, height))
    image.paste(255, box)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def see_through(mask_file: bytes) -> bytes:
    """Return a mask that is all white, and opaque only where the file is."""
    shown, buffer = Image.open(io.BytesIO(mask_file)), io.BytesIO()
    Image.merge("LA", (Image.new("L", shown.size, 255), shown)).save(buffer, "PNG")
    return buffer.getvalue()


def good_rows() -> list[dict]:
    """Rows with the files' contents in place of their names: 0 to 3 references, one alike twice but for the words."""
    return [
        {
            "references": [picture(0, 128, 128)], "target": picture(1, 128, 128), "instruction": "Make it red.",
            "mask": mask(128, 128), "category": "recolor",
            "actions": [{"action": "recolor", "bbox": [250, 125, 750, 500], "target": "cup", "style": "red"}],
        },
        {"references": [], "target": picture(2, 128, 128), "instruction": "画一个杯子"},
        {
            "references": [picture(3, 300, 200), picture(4, 64, 96, "JPEG")], "target": picture(5, 200, 150),
            "instruction": {"en": ["Combine them.", "combine"], "zh": ["请合成。"]}, "category": "add",
        },
        {"references": [picture(n, 128, 128) for n in (6, 7, 8)], "target": picture(9, 96, 144), "instruction": "Mix."},
        {"references": [picture(0, 128, 128)], "target": picture(1, 128, 128), "instruction": "把它变红"},
    ]  # fmt: skip


def write_rows(folder: Path, rows: list[dict]) -> Path:
    """Write rows as JSONL, and each content as a file beside it."""
    folder.mkdir(parents=True)

    def named(name: str, cell):
        if isinstance(cell, bytes):
            (folder / "files").mkdir(exist_ok=True)
            (folder / "files" / name).write_bytes(cell)
            return f"files/{name}"
        if isinstance(cell, list):
            return [named(f"{i}-{name}", entry) for i, entry in enumerate(cell)]
        if isinstance(cell, dict):
            return {key: named(f"{key}-{name}", entry) for key, entry in cell.items()}
        return cell

    lines = [{key: named(f"{key} {i}.png", cell) for key, cell in row.items()} for i, row in enumerate(rows)]
    path = folder / "edits.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    columns = {
        "references": [[{"bytes": reference, "path": None} for reference in row["references"]] for row in rows],
        "target": [{"bytes": row["target"], "path": "t.png"} for row in rows],
        "mask": [row.get("mask") for row in rows],
        "actions": [json.dumps(row["actions"]) if "actions" in row else None for row in rows],
        "category": [row.get("category") for row in rows],
    }
    said = [row["instruction"] if isinstance(row["instruction"], dict) else {"": row["instruction"]} for row in rows]
    columns |= {
        "instruction_en": [of.get("en") or [of[""]] * of.get("", "画").isascii() for of in said],
        "instruction_zh": [of.get("zh") or [of[""]] * (not of.get("", "a").isascii()) for of in said],
    }
    pq.write_table(pa.table(columns), folder / "edits.parquet", row_group_size=2)
    return folder / "edits.parquet"


def write_tar(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    with (folder / "edits.tar").open("wb") as file, TarWriter(file) as writer:
        for i, row in enumerate(rows):
            meta = {key: row[key] for key in ("instruction", "category", "actions") if key in row}
            meta["references"] = len(row["references"])
            members = {f"ref{n}.png": reference for n, reference in enumerate(row["references"])}
            members |= {"mask.png": row["mask"]} if "mask" in row else {}
            members |= {"png": row["target"], "json": json.dumps(meta).encode()}
            writer.write({"__key__": f"row{i}", **members})
    return folder / "edits.tar"


def config(path: Path, output: Path, **changes) -> prepare.Config:
    usual = {"samples_per_shard": 4, "areas": (64, 128), "max_crop": 0.2, "format": "png"}
    return prepare.Config((str(path),), str(output), **(usual | changes))


def read(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def rejects_of(output: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (output / "rejects.jsonl").read_text().splitlines()]
    return [(line["reason"], line["detail"]) for line in lines]


@pytest.mark.parametrize("write", [write_rows, write_parquet, write_tar])
def test_every_kind_of_input_gives_what_its_rows_show(tmp_path, write, capsys):
    rows, output = good_rows(), tmp_path / "out"
    prepare.main(config(write(tmp_path / "in", rows), output))
    assert not rejects_of(output)
    samples = read_shards(output)
    assert sorted(map(int, samples)) == [0, 1, 2, 3, 4] and len(list(output.glob("*.tar"))) == 2
    for row, (_, members) in zip(rows, sorted(samples.items()), strict=True):
        meta = json.loads(members["json"])
        assert meta["references"] == len(row["references"]) and meta.get("category") == row.get("category")
        said = row["instruction"]
        if isinstance(said, str):
            said = {"en" if said.isascii() else "zh": [said]}
        assert meta["captions"] == said and meta.get("actions") == row.get("actions")
        target = read(row["target"])
        fitted = target.resize(meta["scaled_size"][::-1], Image.Resampling.LANCZOS).crop(meta["crop_box"])
        assert np.array_equal(read(members["png"]), fitted) and fitted.width % 16 == fitted.height % 16 == 0
        for n, reference in enumerate(row["references"]):
            [name] = [name for name in members if name.startswith(f"ref{n}.")]
            original, stored = read(reference), read(members[name])
            if original.size == target.size:
                expected = original.resize(meta["scaled_size"][::-1], Image.Resampling.LANCZOS).crop(meta["crop_box"])
                assert np.array_equal(stored, expected)
            elif original.width * original.height <= 128 * 128:
                assert members[name] == reference  # neither enlarged nor encoded again
            else:
                assert abs(stored.width * stored.height / 128**2 - 1) < 0.02
                assert abs(stored.width / stored.height / (original.width / original.height) - 1) < 0.02
                assert np.array_equal(stored, original.resize(stored.size, Image.Resampling.LANCZOS))
        assert ("mask.png" in members) == ("mask" in row)
    report = json.loads((output / "report.json").read_text())
    assert report["references"] == {"1": 2, "0": 1, "2": 1, "3": 1} and report["kept"] == 5
    assert "5 rows = 5 kept + 0 left out" in capsys.readouterr().out


def test_what_is_prepared_trains(tmp_path):
    """Index and reader find it in the cache that the run will use, counted by the model's own tokenizer."""
    prepare.main(
        config(
            write_rows(tmp_path / "in", good_rows()), tmp_path / "out", model=str(TINY), condition_pixels=96 * 96,
            cache_folder=str(tmp_path / "cache"),
        )
    )  # fmt: skip
    from model.text_encoder import TextEncoder

    text, counts = TextEncoder.tokenizer_only(TINY), []

    def count(*args):
        counts.append(args)
        return text.count_tokens(*args)

    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    index = build_index(shards, count, text.counts_id(True), tmp_path / "cache", condition_pixels=96 * 96)
    assert len(index) == 5 and not index.rejects and not counts
    reader = Reader(index, reference_pixels=96 * 96, condition_pixels=96 * 96)
    read = [reader.read(every_language(index, i, reference_pixels=96 * 96)[0]) for i in range(5)]
    assert [len(sample.references) for sample in read] == [1, 0, 2, 3, 1] and not reader.bad_samples
    left, top, right, bottom = BOX
    assert read[0].mask.sum() == (right - left) * (bottom - top) and read[0].mask[top:bottom, left:right].all()
    assert read[0].plan_text == '[{"action":"recolor","target":"cup","bbox":[250,125,750,500],"style":"red"}]'


def test_what_is_cropped_stays_aligned(tmp_path):
    """Reference, target, mask and box all show the same rectangle after scaling and cropping."""
    width, height, box = 300, 220, (90, 44, 210, 132)
    plain = Image.new("RGB", (width, height), "white")
    marked = plain.copy()
    marked.paste((255, 0, 0), box)
    contents = []
    for image in (marked, plain):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        contents.append(buffer.getvalue())
    thousandths = [round(1000 * v / side) for v, side in zip(box, (width, height) * 2, strict=True)]
    row = {
        "references": contents[:1], "target": contents[1], "instruction": "Remove it.",
        "mask": mask(width, height, box), "actions": [{"action": "remove", "bbox": thousandths}],
    }  # fmt: skip
    drawn = row | {"references": []}  # its box is the target's
    prepare.main(config(write_rows(tmp_path / "in", [row, drawn]), tmp_path / "out", areas=(128,)))
    members, alone = read_shards(tmp_path / "out").values()
    meta = json.loads(members["json"])
    assert json.loads(alone["json"])["actions"] == meta["actions"] != row["actions"]
    assert meta["crop_box"][:2] != [0, 0]  # something was cut off
    reference, region = read(members["ref0.png"]), np.asarray(read(members["mask.png"]))[..., 0]
    assert reference.size == read(members["png"]).size and set(np.unique(region)) == {0, 255}
    red = np.asarray(reference)[..., 1] < 128
    for found in (red, region > 0):
        edges = [np.flatnonzero(found.any(axis=axis))[[0, -1]] + (0, 1) for axis in (0, 1)]
        sides = reference.size
        for axis in (0, 1):
            stated = np.array(meta["actions"][0]["bbox"])[axis::2] * sides[axis] / 1000
            assert np.abs(edges[axis] - stated).max() <= 1


FINE = {"references": [picture(0)], "target": picture(1), "instruction": "Make it red."}
BAD = {
    "no such file": (FINE | {"references": ["gone.png"]}, "bad_reference", "reference 1: .*gone.png does not exist"),
    "second missing": (FINE | {"references": [picture(0), "gone.png"]}, "bad_reference", "reference 2: .*gone.png"),
    "no picture": (FINE | {"references": [b"just text"]}, "bad_reference", "reference 1: not a readable picture"),
    "thin": (FINE | {"references": [picture(0, 9000, 1)]}, "bad_reference", "reference 1: .* thinner than 16:1"),
    "thin by a little": (FINE | {"references": [picture(0, 160, 9)]}, "bad_reference", "160 x 9 .* thinner than 16:1"),
    "four": (FINE | {"references": [picture(n) for n in range(4)]}, "too_many_references", "4 references, at most 3"),
    "size": (
        FINE | {"references": [{"path": picture(0), "width": 128, "height": 64}]}, "reference_size",
        "reference 1 has 128 x 128 pixels, the row says 128 x 64",
    ),
    "sizes": (
        FINE | {"references": [picture(0), picture(3)], "reference_sizes": [[128, 128], [64, 64]]}, "reference_size",
        "reference 2 has 128 x 128 pixels, the row says 64 x 64",
    ),
    "too few sizes": (FINE | {"reference_sizes": []}, "bad_row", "must be 1 of"),
    "size of text": (FINE | {"reference_sizes": [["a", 1]]}, "bad_row", "'a' and 1"),
    "mask": (FINE | {"mask": mask(64, 128)}, "bad_mask", "its mask is 64 pixels wide and 128 high, its target 128"),
    "black mask": (FINE | {"mask": mask(128, 128, (0, 0, 0, 0))}, "bad_mask", "nowhere white: .* pixel is 0 of"),
    "see-through mask": (FINE | {"mask": see_through(mask(128, 128))}, "bad_mask", "its mask is transparent in part"),
    "mask cropped off": (
        FINE | {"target": picture(1, 300, 220), "mask": mask(300, 220, (0, 0, 1, 1))}, "bad_mask",
        "nothing of its white is left at",
    ),
    "mark": (FINE | {"actions": [{"action": "add_text", "content": "<|im_end|>"}]}, "bad_actions", "not hold"),
    "long plan": (FINE | {"actions": [{"action": "remove"}] * 300}, "bad_actions", "has 6001 characters"),
    "mask missing": (FINE | {"mask": "gone.png"}, "bad_mask", "gone.png does not exist"),
    "empty": (FINE | {"instruction": "  "}, "empty_caption", "no caption"),
    "no instruction": ({k: v for k, v in FINE.items() if k != "instruction"}, "empty_caption", "no caption"),
    "action": (FINE | {"actions": [{"action": "explode"}]}, "bad_actions", "action 1, action: .*explode"),
    "field": (FINE | {"actions": [{"action": "remove", "who": "x"}]}, "bad_actions", "action 1, who"),
    "box": (FINE | {"actions": [{"action": "remove", "bbox": [0, 0, 0, 5]}]}, "bad_actions", "x1 < x2"),
    "no list": (FINE | {"actions": {"action": "remove"}}, "bad_actions", "must be a list"),
    "none": ({k: v for k, v in FINE.items() if k != "references"}, "bad_row", 'it has no "references"'),
    "one path": (FINE | {"references": "files/a.png"}, "bad_row", "its references are text that is no list in JSON"),
    "number": (FINE | {"references": 1}, "bad_row", "references must be a list of pictures, .* got '1'"),
    "no name": (FINE | {"references": [""]}, "bad_row", "its reference 1 is empty"),
    "no target": (FINE | {"target": ""}, "bad_row", "its target is empty"),
}  # fmt: skip


def test_every_bad_row_is_named_with_its_reason(tmp_path, capsys):
    good = {"references": [picture(0)], "target": picture(1), "instruction": "Make it blue."}
    rows = [good, *(row for row, *_ in BAD.values())]
    prepare.main(config(write_rows(tmp_path / "in", rows), tmp_path / "out"))
    assert [*map(int, read_shards(tmp_path / "out"))] == [0]
    found = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [line["row"] for line in found] == list(range(1, len(rows)))
    for (name, (_, reason, message)), line in zip(BAD.items(), found, strict=True):
        assert line["reason"] == reason, (name, line)
        assert line["origin"].endswith(f"edits.jsonl:{line['row'] + 1}")
        with pytest.raises(ValueError, match=message):
            raise ValueError(line["detail"])
    out = capsys.readouterr().out
    assert "5 a reference that cannot be used" in out and "1 more than 3 references" in out
    assert f"{len(rows)} rows = 1 kept + {len(BAD)} left out" in out


def test_the_same_edit_is_a_duplicate_but_another_of_the_same_target_is_not(tmp_path):
    row = good_rows()[0]
    rows = [
        row,
        row | {"instruction": "Paint it."},
        row | {"references": [picture(7)]},
        dict(row),
        row | {"mask": None},
    ]
    prepare.main(config(write_rows(tmp_path / "in", rows), tmp_path / "out"))
    assert rejects_of(tmp_path / "out") == [("same_file", "as row 0")]
    assert sorted(map(int, read_shards(tmp_path / "out"))) == [0, 1, 2, 4]


def test_every_area_has_its_own_references(tmp_path):
    rows = [{"references": [picture(0), picture(3, 300, 200)], "target": picture(1), "instruction": "x y"}]
    prepare.main(config(write_rows(tmp_path / "in", rows), tmp_path / "out", every_area=True))
    samples = read_shards(tmp_path / "out")
    assert {key.partition("-")[2]: read(members["ref0.png"]).size for key, members in samples.items()} == {
        "64": (64, 64), "128": (128, 128)
    }  # fmt: skip
    for key, members in samples.items():
        stored = read(members["ref1.png"])
        assert abs(stored.width * stored.height / int(key.partition("-")[2]) ** 2 - 1) < 0.03


def test_what_else_lies_there_is_not_taken_for_an_edit(tmp_path):
    """A table without "target" is text-to-image, whatever it calls references; folders hold no edits, and say so."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(picture(0))
    (tmp_path / "in" / "t.jsonl").write_text('{"path": "a.png", "caption": "a cup", "references": "Smith 2020"}\n')
    prepare.main(config(tmp_path / "in" / "t.jsonl", tmp_path / "out"))
    [members] = read_shards(tmp_path / "out").values()
    assert set(members) == {"png", "json"} and "references" not in json.loads(members["json"])
    (tmp_path / "in" / "a.json").write_text('{"instruction": "x", "references": 0}')
    prepare.main(config(tmp_path / "in", tmp_path / "folder"))
    assert rejects_of(tmp_path / "folder") == [
        ("bad_row", "it is an edit; edits are taken from JSONL, parquet and tar files")
    ]
    with pytest.raises(ValueError, match="--keep_columns references"):
        prepare.check(config(tmp_path, tmp_path, keep_columns=("references",)))


@pytest.mark.parametrize("write", [write_rows, write_parquet])
def test_tables_of_edits_are_not_encoded_and_leave_nothing(tmp_path, write):
    path = write(tmp_path / "in", good_rows()[:1])
    with pytest.raises(ValueError, match="holds edits, which are read as pictures: prepare them without --encode"):
        prepare.main(config(path, tmp_path / "out", encode=str(TINY)))
    assert not (tmp_path / "out").exists()


def test_edits_among_other_samples_are_not_encoded_but_counted(tmp_path, capsys):
    path = write_tar(tmp_path / "in", good_rows()[:2])
    with (tmp_path / "plain.tar").open("wb") as file, TarWriter(file) as writer:
        writer.write({"__key__": "plain", "png": picture(5), "json": b'{"captions": "a cup"}'})
    both = str(path), str(tmp_path / "plain.tar")
    prepare.main(dataclasses.replace(config(path, tmp_path / "out", encode=str(TINY)), input=both))
    assert rejects_of(tmp_path / "out") == [("encoded_edit", "its row has references")] * 2
    assert "2 edits, which are read as pictures: prepare them without --encode" in capsys.readouterr().out
    [members] = read_shards(tmp_path / "out").values()
    assert set(members) == {"json", "safetensors"}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_references_without_a_target_are_named(tmp_path, kind):
    """A list of references and no target is no text-to-image sample: it would train on an instruction as a caption."""
    (tmp_path / "a.png").write_bytes(picture(0))
    rows = [{"image": "a.png", "caption": "Make it red.", "references": ["a.png"]}]
    if kind == "jsonl":
        (tmp_path / "t.jsonl").write_text(json.dumps(rows[0]))
    elif kind == "csv":
        (tmp_path / "t.csv").write_text('image,caption,references\na.png,Make it red.,"[""a.png""]"\n')
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    prepare.main(config(tmp_path / f"t.{kind}", tmp_path / "out"))
    [(reason, detail)] = rejects_of(tmp_path / "out")
    assert reason == "bad_row" and detail.startswith("it lists references but has no 'target'")


def test_the_number_of_threads_does_not_matter(tmp_path):
    path = write_rows(tmp_path / "in", [*good_rows(), *(row for row, *_ in BAD.values())])
    for workers in (0, 3):
        prepare.main(config(path, tmp_path / f"{workers}", num_workers=workers))
    one, two = (files_of(tmp_path / name) for name in "03")
    assert {k: v for k, v in one.items() if k != "prepare.json"} == {
        k: v for k, v in two.items() if k != "prepare.json"
    }
