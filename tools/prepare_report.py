"""What tools.prepare made of its input: rejects.jsonl, report.json and report.html, equal for any number of ranks."""

import heapq
import json
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.images import decode_image
from data.picture_bytes import read_picture_bytes
from data.row import Row
from data.sources import Piece, Source
from tools.prepare_page import Example, page
from tools.prepare_sample import REASONS, Recipe, Sample, make_sample, thumbnail
from tools.prepare_shards import Output, load_repeated, read_records, written_aside

_KEPT_EXAMPLES = 24
_REJECT_EXAMPLES = 6  # of each reason
_MAX_IGNORED = 20


@dataclass
class Report:
    """The content of report.json, and the rows that stand for the others in report.html."""

    content: dict
    kept: list[dict] = field(default_factory=list)  # records
    rejected: dict[str, list[dict]] = field(default_factory=dict)  # lines of rejects.jsonl by reason

    def summary(self) -> str:
        """Return the figures in a few lines."""
        c = self.content
        lines = [
            f"done: {c['rows']} rows = {c['kept']} kept + {c['rejected']} left out",
            f"  samples   {c['samples']} in {c['shards']} shards, {c['bytes'] / 2**20:.1f} MiB, "
            f"{c['original_files']} as their original files",
            *(f"  left out  {count:>6} {REASONS[reason]}" for reason, count in c["rejects"].items()),
        ]
        if c["ignored"]:
            lines.append(f"  ignored   {c['ignored']} files that are neither picture nor caption")
        if not c["kept"]:
            lines.append("  nothing   can be trained on: see the first lines of rejects.jsonl for what is wrong")
        return "\n".join([*lines, f"  report    {c['page']}"])


def write_report(
    output: Output, title: str, sources: Sequence[Source], shards: Sequence[Piece], recipe: Recipe, counts_tokens: bool
) -> Report:
    """Write the three files; all shards are published."""
    report = _collect(output, sources, shards, counts_tokens)
    kept = [_kept_example(record, shards, recipe) for record in report.kept]
    rejected = {reason: [_reject_example(line, shards) for line in lines] for reason, lines in report.rejected.items()}
    with written_aside(output.folder / "report.json") as file:
        file.write(
            (json.dumps(report.content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        )
    with written_aside(output.folder / "report.html") as file:
        file.write(page(title, report.content, kept, rejected).encode("utf-8", "backslashreplace"))
    report.content["page"] = str(output.folder / "report.html")
    return report


def _collect(output: Output, sources: Sequence[Source], shards: Sequence[Piece], counts_tokens: bool) -> Report:
    """Go once over all records, writing rejects.jsonl on the way."""
    totals: Counter = Counter()
    counts: dict[str, Counter] = defaultdict(Counter)
    lengths: dict[str, Counter] = defaultdict(Counter)
    rejects: Counter = Counter()
    kept: list[tuple] = []
    examples: dict[str, list[dict]] = defaultdict(list)
    max_cropped = 0.0
    with written_aside(output.folder / "rejects.jsonl") as file:
        for record in _judged(output, shards):
            totals["rows"] += 1
            if "reason" in record:
                totals["rejected"] += 1
                rejects[record["reason"]] += 1
                file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
                chosen = examples[record["reason"]]
                chosen.append(record)
                if len(chosen) > _REJECT_EXAMPLES:  # any, but always the same
                    chosen.remove(max(chosen, key=lambda r: zlib.crc32(b"%d" % r["row"])))
                continue
            totals["kept"] += 1
            counts["categories"][record["category"]] += 1
            if "references" in record:
                counts["references"][str(record["references"])] += 1
            languages = record["caption_lengths"]
            counts["language_sets"][" + ".join(languages)] += 1
            for language, values in languages.items():
                counts["languages"][language] += 1
                counts["wordings"][language] += len(values)
                lengths[language].update(values)
            for sample in record["samples"]:
                totals["samples"] += 1
                totals["bytes"] += sample["bytes"]
                totals["original_files"] += sample["original_file"]
                counts["areas"][str(sample["area"])] += 1
                counts["ratios"][sample["ratio"]] += 1
                counts["sizes"]["{1} x {0}".format(*sample["size"])] += 1
                max_cropped = max(max_cropped, sample["cropped"])
            heapq.heappush(kept, (-int(record["digest"], 16), -record["row"], record))
            if len(kept) > _KEPT_EXAMPLES:
                heapq.heappop(kept)
    ignored = [name for source in sources for name in getattr(source, "ignored", [])]
    content = {
        **{name: totals[name] for name in ("rows", "kept", "rejected", "samples", "bytes", "original_files")},
        "shards": len(shards),
        "inputs": [{"location": source.location, "rows": source.num_rows} for source in sources],
        "rejects": {reason: rejects[reason] for reason in REASONS if rejects[reason]},
        **{name: _by_count(counts[name]) for name in (
            "languages", "wordings", "language_sets", "categories", "areas", "ratios", "sizes")},
        **({"references": _by_count(counts["references"])} if counts["references"] else {}),  # of edits
        "max_cropped": max_cropped,
        "caption_length_unit": "tokens" if counts_tokens else "characters",
        "caption_lengths": {language: _spread(lengths[language]) for language in sorted(lengths)},
        "ignored": len(ignored),
        "ignored_examples": ignored[:_MAX_IGNORED],
    }  # fmt: skip
    by_row = sorted((record for *_, record in kept), key=lambda record: record["row"])
    return Report(content, by_row, {reason: examples[reason] for reason in REASONS if reason in examples})


def _judged(output: Output, shards: Sequence[Piece]) -> Iterator[dict]:
    """Yield every row's record in order; one that repeats another has become a reject with its `earlier` row."""
    for number, piece in enumerate(shards):
        repeated = load_repeated(output, piece)
        for record in read_records(output, number):
            if record["row"] in repeated:
                earlier, same_file = repeated[record["row"]]
                yield {
                    "row": record["row"],
                    "origin": record["origin"],
                    "reason": "same_file" if same_file else "same_picture",
                    "detail": f"as row {earlier}",
                    "earlier": earlier,
                }
            else:
                yield record


def _by_count(counts: Counter) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _spread(lengths: Counter) -> dict:
    """Return mean, median and maximum of counted lengths, and {length: count}."""
    total, seen, median = lengths.total(), 0, 0
    for length in sorted(lengths):
        seen += lengths[length]
        median = length
        if 2 * seen >= total:
            break
    mean = sum(length * count for length, count in lengths.items()) / total
    return {
        "mean": round(mean, 2),
        "median": median,
        "max": max(lengths),
        "counts": {str(length): lengths[length] for length in sorted(lengths)},
    }


def _row_at(shards: Sequence[Piece], number: int) -> Row:
    """Read one row of the input again."""
    piece = shards[bisect_right(shards, number, key=lambda piece: piece.first) - 1]
    at = piece.start + number - piece.first
    return next(iter(piece.source.rows(at, at + 1)))


def _kept_example(record: dict, shards: Sequence[Piece], recipe: Recipe) -> Example:
    sample = make_sample(record["row"], _row_at(shards, record["row"]), recipe)
    if not isinstance(sample, Sample):  # a URL that is gone by now
        return Example(record["origin"], [], [])
    size = "{1} x {0}".format(*sample.size)
    captions = {wording.language: wording.text for wording in reversed(sample.wordings)}  # the first of each language
    stored = ", ".join("{1} x {0}".format(*p.placement.size) for p in sample.pictures)
    references = [] if sample.edit is None else [image for _, image in sample.edit.references]
    shown = [thumbnail(image) for image in (*references, sample.pictures[0].image)]
    return Example(record["origin"], shown, sorted(captions.items()), f"{size} → {stored}")


def _reject_example(line: dict, shards: Sequence[Piece]) -> Example:
    rows = [line["row"], *([line["earlier"]] if "earlier" in line else [])]
    shown = [picture for row in rows if (picture := _picture(_row_at(shards, row)))]
    return Example(line["origin"], shown, [], line["detail"])


def _picture(row: Row) -> str | None:
    """Return a row's thumbnail if its picture can be read from where it lies at once."""
    if row.picture is None or isinstance(row.picture, str) and not Path(row.picture).is_file():
        return None
    try:
        content = row.picture if isinstance(row.picture, bytes) else read_picture_bytes(row.picture)
        return thumbnail(decode_image(content))
    except (OSError, ValueError):
        return None
