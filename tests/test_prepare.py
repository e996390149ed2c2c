"""tools.prepare: equal for any number of ranks, resumable after kill -9, and no row without a trace."""

import dataclasses
import io
import json
import multiprocessing
import resource
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image

from data.index import build_index
from data.reader import Reader
from tests.collections_of_pictures import KINDS, files_of, picture, read_shards, records, write_collection
from tests.spawn import run_ranks
from tools import prepare, prepare_shards
from tools.prepare_progress import Progress
from tools.prepare_sample import REASONS

TINY = Path(__file__).resolve().parent.parent / "assets/tiny"


@pytest.fixture(autouse=True)
def no_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def config(path: Path, output: Path, **changes) -> prepare.Config:
    usual = {"samples_per_shard": 4, "areas": (64, 128), "max_crop": 0.2, "num_workers": 2}
    return prepare.Config((str(path),), str(output), **(usual | changes))


def faulty_collection(folder: Path) -> Path:
    """A folder with one of everything that is left out, among 14 good ones."""
    folder.mkdir(parents=True)

    def add(name: str, image: bytes, caption: bytes | None = b"a thing", extension: str = "txt") -> None:
        (folder / name).write_bytes(image)
        if caption is not None:
            (folder / name).with_suffix(f".{extension}").write_bytes(caption)

    for i in range(14):
        add(f"{i:02d}-good.png", picture(i), f"第{i}个".encode() if i % 3 else b"thing %d" % i)
    add("03-uncaptioned.png", picture(50), None)
    add("05-blank.png", picture(51), b" \n\xef\xbb\xbf ")
    add("06-broken.png", picture(52), b"{no json", "json")
    add("07-text.jpg", b"this is no picture")
    add("08-cut.png", picture(53)[:200])
    add("09-small.png", picture(54, 40, 40))
    add("10-long.png", picture(55, 1000, 100))
    add("11-again.png", picture(2))
    add("12-smaller.jpg", picture(4, 96, 96, "JPEG", quality=85))
    (folder / "readme.md").write_text("neither")
    return folder


EXPECTED = {
    "03-uncaptioned.png": "empty_caption", "05-blank.png": "empty_caption", "06-broken.png": "refused_caption",
    "07-text.jpg": "undecodable", "08-cut.png": "undecodable", "09-small.png": "too_small",
    "10-long.png": "too_extreme", "11-again.png": "same_file", "12-smaller.jpg": "same_picture",
}  # fmt: skip


def test_nothing_is_lost_without_a_reason(tmp_path, capsys):
    source, output = faulty_collection(tmp_path / "in"), tmp_path / "out"
    prepare.main(config(source, output))
    report = json.loads((output / "report.json").read_text())
    rejects = [json.loads(line) for line in (output / "rejects.jsonl").read_text().splitlines()]
    assert {Path(r["origin"]).name: r["reason"] for r in rejects} == EXPECTED
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
    prepare.main(config(write_collection(tmp_path / "in", kind, rows), tmp_path / "out", license="CC0"))
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
    prepare.main(config(source, tmp_path / "out", format="png", duplicates="exact"))
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
    prepare.main(config(source, tmp_path / "out", every_area=True))
    sizes: dict[str, list] = {}
    for key, members in read_shards(tmp_path / "out").items():
        image = next(content for extension, content in members.items() if extension != "json")
        sizes.setdefault(key.partition("-")[0], []).append((key.partition("-")[2], Image.open(io.BytesIO(image)).size))
    assert sizes["0000000000"] == [("128", (128, 128)), ("64", (64, 64))]
    assert sizes["0000000003"] == [("", (64, 64))] and len(sizes) == 7
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["kept"] == 7 and report["samples"] == sum(map(len, sizes.values())) == 13


def _prepare(rank, world_size, cfg):
    prepare.main(cfg)


def test_one_and_two_ranks_write_the_same_bytes(tmp_path):
    source = faulty_collection(tmp_path / "in")
    prepare.main(config(source, tmp_path / "one", num_workers=0))
    run_ranks(_prepare, 2, config(source, tmp_path / "two", num_workers=3))
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert list(one) == list(two) and len([name for name in one if name.endswith(".tar")]) == 6
    assert {name for name in one if one[name] != two[name]} == set()


def _prepare_slowly(cfg, delay_s):
    make = prepare_shards.make_sample

    def slow(*args):
        time.sleep(delay_s)
        return make(*args)

    prepare_shards.make_sample = slow
    prepare.main(cfg)


def _wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("when", ["in the first shard", "between", "in the last"])
def test_after_kill_9_at_most_one_shard_is_made_again(tmp_path, when, monkeypatch):
    source, output = faulty_collection(tmp_path / "in"), tmp_path / "out"
    cfg = config(source, output, num_workers=0)
    prepare.main(dataclasses.replace(cfg, output=str(tmp_path / "whole")))
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_prepare_slowly, args=(cfg, 0.03))
    process.start()
    work = output / ".work"
    done = {"in the first shard": 0, "between": 3, "in the last": 5}[when]
    try:
        _wait_for(lambda: len(list(work.glob("*.jsonl"))) >= done and list(work.glob("*.tar.*.tmp")))
    finally:
        process.kill()
        process.join()
    before = {path.name: path.stat() for path in work.iterdir() if path.suffix in (".tar", ".jsonl")}
    num_done = sum(name.endswith(".jsonl") for name in before)
    assert done <= num_done < 6 and not list(output.glob("*.tar"))
    begun = {path.name.split(".")[0] for path in work.glob("*.tar*")}
    assert len(begun) <= num_done + 1  # so at most one shard's work is lost
    made = []
    monkeypatch.setattr(prepare, "make_shard", lambda *a, f=prepare.make_shard: (made.append(a[1]), f(*a)))
    prepare.main(cfg)
    assert len(made) == 6 - num_done and not {f"train-{number:06d}.jsonl" for number in made} & before.keys()
    assert files_of(output) == files_of(tmp_path / "whole") and not work.exists()


def test_a_start_stopped_while_it_publishes_goes_on(tmp_path, monkeypatch):
    source, output = faulty_collection(tmp_path / "in"), tmp_path / "out"
    prepare.main(config(source, tmp_path / "whole"))
    publish = prepare.publish_shard

    def stop_at_3(output, number, repeated):
        if number == 3:
            raise KeyboardInterrupt
        publish(output, number, repeated)

    monkeypatch.setattr(prepare, "publish_shard", stop_at_3)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(config(source, output))
    assert len(list(output.glob("*.tar"))) == 3
    monkeypatch.undo()
    prepare.main(config(source, output))
    assert files_of(output) == files_of(tmp_path / "whole")


def test_what_is_complete_stays_and_is_looked_after(tmp_path):
    source, output = write_collection(tmp_path / "in", "csv", records()), tmp_path / "out"
    prepare.main(config(source, output))
    before = files_of(output)
    prepare.main(config(source, output, num_workers=0))  # how it runs may change
    assert files_of(output) == before
    with pytest.raises(ValueError, match=r"another configuration:\n  --quality: 95 there, 80 here\nuse the same"):
        prepare.main(config(source, output, quality=80))
    shard = output / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    with pytest.raises(ValueError, match="train-000001.tar is of .* bytes, it was made with"):
        prepare.main(config(source, output))
    shard.unlink()
    with pytest.raises(ValueError, match="train-000001.tar is missing"):
        prepare.main(config(source, output))
    write_collection(tmp_path / "in", "csv", records(9))
    with pytest.raises(ValueError, match="the input has changed since .*: 7 rows then, 9 now"):
        prepare.main(config(source, output))


def test_bad_values_and_folders_are_refused_before_anything_is_written(tmp_path):
    source = write_collection(tmp_path / "in", "csv", records(2))
    for changes, message in (
        ({"format": "gif"}, "--format is one of jpg, png, webp; got 'gif'"),
        ({"duplicates": "no"}, "--duplicates is one of"),
        ({"areas": (100,)}, "a multiple of 16 pixels; got 100"),
        ({"areas": ()}, "--areas names no area"),
        ({"max_crop": 2.0}, "--max_crop must be from 0 to 0.5"),
        ({"name": "a/b"}, "--name"),
        ({"samples_per_shard": 0}, "--samples_per_shard must be at least 1"),
        ({"caption_columns": ("text",)}, "no column 'text'; it has file_name, caption_en"),
        ({"model": str(tmp_path)}, "no tokenizer/ in"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare.main(config(source, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds other files .thesis.tex …. and no prepare.json"):
        prepare.main(config(source, tmp_path / "other"))
    with pytest.raises(ValueError, match="--output .*thesis.tex cannot be a folder"):
        prepare.main(config(source, tmp_path / "other" / "thesis.tex"))
    assert files_of(tmp_path / "other") == {"thesis.tex": b"mine"}
    (source.parent / "table.csv").write_text("image,caption\n")
    with pytest.raises(ValueError, match="has no rows"):
        prepare.main(config(source, tmp_path / "out"))


def test_a_missing_picture_is_counted_not_fatal(tmp_path):
    source = write_collection(tmp_path / "in", "jsonl", records(3))
    (tmp_path / "in/pictures" / records()[1]["name"]).unlink()
    prepare.main(config(source, tmp_path / "out"))
    [reject] = map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())
    assert reject["reason"] == "unreachable" and "does not exist" in reject["detail"] and reject["row"] == 1


def test_a_full_disk_leaves_nothing_half_written_and_the_run_goes_on_later(tmp_path):
    source, output = write_collection(tmp_path / "in", "csv", records()), tmp_path / "out"
    prepare.main(config(source, tmp_path / "whole"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # then a write fails, as on a full disk
    try:
        with pytest.raises(ValueError, match="train-000000.tar cannot be written: .*same command again"):
            prepare.main(config(source, output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in output.rglob("*")) == [".work", "lock", "prepare.json"]
    prepare.main(config(source, output))
    assert files_of(output) == files_of(tmp_path / "whole")


def test_two_at_once_in_one_folder(tmp_path):
    source, output = write_collection(tmp_path / "in", "csv", records()), tmp_path / "out"
    process = multiprocessing.get_context("forkserver").Process(
        target=_prepare_slowly, args=(config(source, output), 0.5)
    )
    process.start()
    try:
        _wait_for(lambda: (output / "prepare.json").exists())
        with pytest.raises(ValueError, match="another process is writing to"):
            prepare.main(config(source, output))
    finally:
        process.kill()
        process.join()


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.sources = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_sound_page_that_needs_nothing_else(tmp_path):
    source = faulty_collection(tmp_path / "in")
    (source / "00-good.txt").write_text("<script>alert('一')</script> & more")
    prepare.main(config(source, tmp_path / "out", name="宠物", category="<b>pets</b>", model=str(TINY),
                        cache_folder=str(tmp_path / "cache")))  # fmt: skip
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    parsed = _Page()
    parsed.feed(text)
    assert not parsed.open and parsed.tags.count("svg") >= 6
    assert not {"script", "link", "iframe", "b>pets"} & set(parsed.tags) and "url(" not in text
    assert parsed.sources and all(source.startswith("data:image/jpeg;base64,") for source in parsed.sources)
    assert "&lt;script&gt;alert(&#x27;一&#x27;)" in text and "宠物" in text and "第1个" in text
    assert all(name.capitalize() in text for reason, name in REASONS.items() if reason in EXPECTED.values())
    # With a tokenizer lengths are tokens, and the index is there: it needs no token counted again.
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["caption_length_unit"] == "tokens"
    assert report["shards"] == 6

    from model.text_encoder import TextEncoder

    tokenizer = TextEncoder.tokenizer_only(TINY)
    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    index = build_index(shards, lambda text: 1 / 0, tokenizer.tokenizer_id, tmp_path / "cache")
    tokens = [n for i in range(len(index)) for n in index[i].caption_tokens.get("zh", ())]
    spread = report["caption_lengths"]["zh"]
    assert sum(spread["counts"].values()) == len(tokens) and spread["max"] == max(tokens)
    assert spread["mean"] == pytest.approx(sum(tokens) / len(tokens), abs=0.01)


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, caplog):
    caplog.set_level("INFO", "prepare")
    for screen in (_Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", screen)
        with Progress(12, True, 2) as progress:
            progress.skip(4)
            for _ in range(8):
                progress.advance()
        lines = [record.getMessage() for record in caplog.records]
        if screen.isatty():
            assert "rank 0 of 2: 100%" in screen.getvalue() and "12/12" in screen.getvalue() and not lines
            assert "pictures/s" in screen.getvalue()
        else:
            assert not screen.getvalue() and len(lines) == 1
            assert lines[0].startswith("12/12 pictures of 1 of 2 processes, ") and lines[0].endswith("/s, 00:00 left")


def test_threads_do_not_change_the_order():
    def slow_first(i):
        time.sleep(0.02 if i % 7 == 0 else 0)
        return i

    assert list(prepare_shards.ordered_map(slow_first, range(40), 4)) == list(range(40))
