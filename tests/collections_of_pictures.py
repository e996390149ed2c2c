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
