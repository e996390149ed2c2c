"""tools.prepare: every kind of input, the right pixels, and no row without a trace."""

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.index import build_index
from data.reader import Reader
from tests.collections_of_pictures import (
    FAULTY_REASONS,
    KINDS,
    faulty_collection,
    files_of,
    picture,
    prepare_config,
    read_shards,
    records,
    write_collection,
)
from tools import prepare, prepare_shards

pytestmark = pytest.mark.usefixtures("no_group_stays")
TINY = Path(__file__).resolve().parent.parent / "assets/tiny"


def test_nothing_is_lost_without_a_reason(tmp_path, capsys):
    source, output = faulty_collection(tmp_path / "in"), tmp_path / "out"
    prepare.main(prepare_config(source, output))
    report = json.loads((output / "report.json").read_text())
    rejects = [json.loads(line) for line in (output / "rejects.jsonl").read_text().splitlines()]
    assert {Path(r["origin"]).name: r["reason"] for r in rejects} == FAULTY_REASONS
    assert [r["row"] for r in rejects] == sorted(r["row"] for r in rejects)
    names = sorted(p.name for p in source.iterdir() if p.suffix in (".png", ".jpg"))  # the order of the rows
    assert all(names[r["row"]] == Path(r["origin"]).name for r in rejects)
    samples = read_shards(output)
    assert {int(key) for key in samples} | {r["row"] for r in rejects} == set(range(23))
    assert report["rows"] == 23 == report["kept"] + report["rejected"] == len(samples) + len(rejects)
    assert sum(report["rejects"].values()) == 9 and report["languages"] == {"zh": 9, "en": 5}
    assert report["ignored"] == 1 and report["ignored_examples"][0].endswith("readme.md")
    assert report["bytes"] == sum(len(content) for members in samples.values() for content in members.values())
    assert "23 rows = 14 kept + 9 left out" in capsys.readouterr().out
    details = {Path(r["origin"]).name: r["detail"] for r in rejects}
    assert details["11-again.png"] == f"as row {names.index('02-good.png')}"
    assert details["09-small.png"] == "40 x 40 pixels would be enlarged 1.60 times for the area 64²"
    # Kept files are the originals, under captions and sizes that training reads.
    index = build_index([str(p) for p in sorted(output.glob("*.tar"))], len, "characters", tmp_path / "cache")
    assert len(index) == 14 and not index.rejects and len(index.shards) == 6
    reader = Reader(index)
    for i in range(14):
        row = int(index.key(i).split("/")[1])
        assert names[row] == f"{i:02d}-good.png"
        pixels = np.asarray(Image.open(source / names[row]).convert("RGB"))
        assert np.array_equal(reader.read_pixels(i).permute(1, 2, 0).numpy(), pixels)
        assert reader.read_captions(i) == ({"zh": [f"第{i}个"]} if i % 3 else {"en": [f"thing {i}"]})
        assert samples[f"{row:010d}"]["png"] == (source / names[row]).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_samples(tmp_path, kind):
    rows = records()
    prepare.main(prepare_config(write_collection(tmp_path / "in", kind, rows), tmp_path / "out", license="CC0"))
    by_caption = {r["caption_zh"]: r for r in rows}
    samples = read_shards(tmp_path / "out")
    assert len(samples) == 7
    for members in samples.values():
        meta = json.loads(members.pop("json"))
        row = by_caption.pop(meta["captions"]["zh"][0])
        assert meta["captions"] == {"zh": [row["caption_zh"]], "en": [row["caption_en"]]}
        assert meta["category"] == row["category"] and meta["license"] == "CC0"
        [content] = members.values()
        original, stored = Image.open(io.BytesIO(row["image"])).convert("RGB"), Image.open(io.BytesIO(content))
        assert meta["original_size"] == [original.height, original.width]
        # What the .json says happened to the picture gives its pixels, up to JPEG.
        scaled = original.resize(meta["scaled_size"][::-1], Image.Resampling.LANCZOS).crop(meta["crop_box"])
        assert stored.size == scaled.size
        difference = np.asarray(stored.convert("RGB"), int) - np.asarray(scaled, int)
        assert abs(difference).mean() < 3
        assert (content == row["image"]) == (original.size == scaled.size)


def test_what_any_reader_would_show_otherwise_is_encoded_anew(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    solid = Image.fromarray(np.asarray(Image.open(io.BytesIO(picture(1)))))
    exif = Image.Exif()
    exif[0x0112] = 6
    solid.save(source / "a-turned.jpg", exif=exif)
    transparent = solid.convert("RGBA")
    transparent.putalpha(128)
    transparent.save(source / "b-alpha.png")
    solid.convert("CMYK").save(source / "c-cmyk.jpg")
    Image.open(io.BytesIO(picture(2))).quantize(16).save(source / "d-palette.png")
    Image.open(io.BytesIO(picture(3))).save(source / "e.bmp")
    frames = [Image.open(io.BytesIO(picture(i))).convert("RGB") for i in (4, 5)]
    frames[0].save(source / "f-moving.webp", save_all=True, append_images=frames[1:])
    Image.open(io.BytesIO(picture(6))).convert("L").save(source / "g-grey.png")
    Image.open(io.BytesIO(picture(7))).save(source / "h.webp", lossless=True)
    for path in list(source.iterdir()):
        path.with_suffix(".txt").write_text(path.stem)
    prepare.main(prepare_config(source, tmp_path / "out", format="png", duplicates="exact"))
    stored = {json.loads(m["json"])["captions"]["en"][0]: m for m in read_shards(tmp_path / "out").values()}
    originals = {path.read_bytes() for path in source.iterdir()}
    kept = {name for name, members in stored.items() if originals & set(members.values())}
    assert len(stored) == 8 and kept == {"g-grey", "h"}
    turned = Image.open(source / "a-turned.jpg").convert("RGB").transpose(Image.Transpose.ROTATE_270)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored["a-turned"]["png"]))), np.asarray(turned))
    faded = np.asarray(Image.open(io.BytesIO(stored["b-alpha"]["png"])), int)
    assert abs(faded - (np.asarray(solid, int) * 128 + 255 * 127) / 255).max() <= 1


def test_a_sample_for_every_area(tmp_path):
    source = write_collection(tmp_path / "in", "csv", records())
    prepare.main(prepare_config(source, tmp_path / "out", every_area=True))
    sizes: dict[str, list] = {}
    for key, members in read_shards(tmp_path / "out").items():
        image = next(content for extension, content in members.items() if extension != "json")
        sizes.setdefault(key.partition("-")[0], []).append((key.partition("-")[2], Image.open(io.BytesIO(image)).size))
    assert sizes["0000000000"] == [("128", (128, 128)), ("64", (64, 64))]
    assert sizes["0000000003"] == [("", (64, 64))] and len(sizes) == 7
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["kept"] == 7 and report["samples"] == sum(map(len, sizes.values())) == 13


def test_bad_values_and_folders_are_refused_before_anything_is_written(tmp_path):
    source = write_collection(tmp_path / "in", "csv", records(2))
    for changes, message in (
        ({"format": "gif"}, "--format is one of jpg, png, webp; got 'gif'"),
        ({"duplicates": "no"}, "--duplicates is one of"),
        ({"areas": (100,)}, "a multiple of 16 up to 8192 pixels; got 100"),
        ({"areas": (100_000,)}, "a multiple of 16 up to 8192 pixels; got 100000"),
        ({"areas": ()}, "--areas names no area"),
        ({"max_crop": 2.0}, "--max_crop must be from 0 to 0.5"),
        ({"name": "a/b"}, "--name"),
        ({"samples_per_shard": 0}, "--samples_per_shard must be at least 1"),
        ({"caption_columns": ("text",)}, "no column 'text'; it has file_name, caption_en"),
        ({"model": str(tmp_path)}, "no tokenizer/ in"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare.main(prepare_config(source, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds other files .thesis.tex …. and no prepare.json"):
        prepare.main(prepare_config(source, tmp_path / "other"))
    with pytest.raises(ValueError, match="--output .*thesis.tex cannot be a folder"):
        prepare.main(prepare_config(source, tmp_path / "other" / "thesis.tex"))
    assert files_of(tmp_path / "other") == {"thesis.tex": b"mine"}
    (source.parent / "table.csv").write_text("image,caption\n")
    with pytest.raises(ValueError, match="has no rows"):
        prepare.main(prepare_config(source, tmp_path / "out"))


def test_a_missing_picture_is_counted_not_fatal(tmp_path):
    source = write_collection(tmp_path / "in", "jsonl", records(3))
    (tmp_path / "in/pictures" / records()[1]["name"]).unlink()
    prepare.main(prepare_config(source, tmp_path / "out"))
    [reject] = map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())
    assert reject["reason"] == "unreachable" and "does not exist" in reject["detail"] and reject["row"] == 1


def test_threads_do_not_change_the_order():
    def slow_first(i):
        time.sleep(0.02 if i % 7 == 0 else 0)
        return i

    assert list(prepare_shards.ordered_map(slow_first, range(40), 4)) == list(range(40))
