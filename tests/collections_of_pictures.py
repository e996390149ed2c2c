"""One small collection in every form that tools.prepare reads, for tests."""

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from webdataset import TarWriter

from tools import prepare

KINDS = ("folder", "csv", "tsv", "jsonl", "parquet-struct", "parquet-bytes", "tar")


def picture(seed: int, width: int = 128, height: int = 128, kind: str = "PNG", **options) -> bytes:
    """Return a picture of soft coloured patches; no two seeds look alike."""
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(buffer, kind, **options)
    return buffer.getvalue()


def records(count: int = 7) -> list[dict]:
    """Return rows as {name, image, caption_en, caption_zh, category}; quotes, commas, line ends and emoji in them."""
    sizes = [(128, 128), (96, 144), (200, 150), (64, 64)]
    return [
        {
            "name": f"{'甲乙'[i % 2]} {i}.{'jpg' if i % 3 == 2 else 'png'}",
            "image": picture(i, *sizes[i % 4], kind="JPEG" if i % 3 == 2 else "PNG"),
            "caption_en": [f'a "thing", number {i}', f"line one\nline two of {i}", f"plain {i} 🦊"][i % 3],
            "caption_zh": f"第{i}个东西，好看",
            "category": ["animals", "食物"][i % 2],
        }
        for i in range(count)
    ]


def write_collection(folder: Path, kind: str, rows: list[dict]) -> Path:
    """Write rows as one kind of input; return what --input takes."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = [{"captions": {"en": r["caption_en"], "zh": r["caption_zh"]}, "category": r["category"]} for r in rows]
    if kind == "folder":
        for i, (row, caption) in enumerate(zip(rows, captions, strict=True)):
            path = folder / f"{'deep/er' if i % 2 else '.'}" / row["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row["image"])
            path.with_suffix(".json").write_text(json.dumps(caption, ensure_ascii=False), encoding="utf-8")
        return folder
    if kind in ("csv", "tsv", "jsonl"):
        for row in rows:
            (folder / "pictures").mkdir(exist_ok=True)
            (folder / "pictures" / row["name"]).write_bytes(row["image"])
        lines = [
            {"file_name": f"pictures/{r['name']}"} | {k: r[k] for k in r if "_" in k or k == "category"} for r in rows
        ]
        path = folder / f"table.{kind}"
        with path.open("w", encoding="utf-8", newline="") as file:
            if kind == "jsonl":
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            else:
                writer = csv.DictWriter(file, list(lines[0]), delimiter="\t" if kind == "tsv" else ",")
                writer.writeheader()
                writer.writerows(lines)
        return path
    if kind.startswith("parquet"):
        images = [r["image"] for r in rows]
        if kind == "parquet-struct":
            images = [{"bytes": image, "path": r["name"]} for r, image in zip(rows, images, strict=True)]
        columns = {"image": images} | {n: [r[n] for r in rows] for n in ("caption_en", "caption_zh", "category")}
        pq.write_table(pa.table(columns), folder / "part.parquet", row_group_size=3)
        return folder / "part.parquet"
    path = folder / "some.tar"
    with path.open("wb") as file, TarWriter(file) as writer:
        for row, caption in zip(rows, captions, strict=True):
            stem, _, extension = row["name"].rpartition(".")
            writer.write({"__key__": stem, extension: row["image"], "json": json.dumps(caption).encode()})
    return path


def read_shards(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return {key: {extension: content}} of all shards in a folder, by Python's own tarfile."""
    samples: dict[str, dict[str, bytes]] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                stem, _, extension = member.name.partition(".")
                assert extension not in samples.setdefault(stem, {})
                samples[stem][extension] = archive.extractfile(member).read()
    return samples


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def prepare_config(path: Path, output: Path, **changes) -> prepare.Config:
    """Return settings for a collection, with small shards and pictures."""
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


# Why each of its faulty pictures is left out.
FAULTY_REASONS = {
    "03-uncaptioned.png": "empty_caption", "05-blank.png": "empty_caption", "06-broken.png": "refused_caption",
    "07-text.jpg": "undecodable", "08-cut.png": "undecodable", "09-small.png": "too_small",
    "10-long.png": "too_extreme", "11-again.png": "same_file", "12-smaller.jpg": "same_picture",
}  # fmt: skip
