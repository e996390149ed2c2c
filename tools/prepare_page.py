"""The report of tools.prepare as one HTML page that needs nothing else: no script, no font, no picture from outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from data.captions import LANGUAGES
from tools.prepare_charts import bars, histogram
from tools.prepare_sample import REASONS

_LANGUAGE_NAMES = {"zh": "Chinese", "en": "English", "other": "other", "none": "no letters"}
_STYLE = Path(__file__).with_name("prepare_page.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Example:
    """A row to look at."""

    origin: str
    pictures: list[str]  # data URLs; of a repeated one it and the earlier; of an edit references and target
    captions: list[tuple[str, str]]  # (language, text)
    detail: str = ""


def page(
    title: str, report: Mapping, kept: Sequence[Example], rejected: Mapping[str, Sequence[Example]]
) -> str:  # fmt: skip
    """Return the page; `report` is the content of report.json."""
    parts = [_head(title, report), _charts(report)]
    if rejected:
        parts.append("<h2>Left out</h2>")
        parts.append(_card("By reason", bars({REASONS[r]: n for r, n in report["rejects"].items()}, report["rows"])))
        for reason, examples in rejected.items():
            count = report["rejects"][reason]
            parts.append(f"<h2>{REASONS[reason].capitalize()} <span class=soft>{count:,}</span></h2>")
            parts.append(_gallery(examples))
        parts.append("<p class=note>All of them, with their reasons, are in rejects.jsonl.</p>")
    if kept:
        parts.append("<h2>Examples of what is kept</h2><p class=note>As stored: after scaling and cropping.</p>")
        parts.append(_gallery(kept))
    if report["ignored"]:
        names = "".join(f"<tr><td>{escape(name)}</td></tr>" for name in report["ignored_examples"])
        parts.append(f"<h2>Ignored files <span class=soft>{report['ignored']:,}</span></h2>")
        parts.append(
            f"<p class=note>Neither a picture nor the caption of one.</p><div class=card><table>{names}</table></div>"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: report</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(title: str, report: Mapping) -> str:
    rows, kept, rejected = report["rows"], report["kept"], report["rejected"]
    tiles = [
        ("", f"{rows:,}", "rows read"), ("good", f"{kept:,}", "kept"), ("bad", f"{rejected:,}", "left out"),
        ("", f"{report['samples']:,}", f"samples in {report['shards']:,} shards"),
        ("", _size(report["bytes"]), "in all"),
        ("", f"{report['original_files']:,}", "as their original files"),
        ("", f"{100 * report['max_cropped']:.1f} %", "cropped off at most"),
    ]  # fmt: skip
    drawn = "".join(
        f'<div class="tile {kind}"><b>{value}</b><span class=soft>{name}</span></div>' for kind, value, name in tiles
    )
    inputs = "".join(
        f"<tr><td>{escape(i['location'])}</td><td>{i['rows']:,} rows</td></tr>" for i in report["inputs"][:20]
    )
    if len(report["inputs"]) > 20:
        inputs += f"<tr><td>and {len(report['inputs']) - 20:,} more</td><td></td></tr>"
    return (
        f"<h1>{escape(title)}</h1><p>{rows:,} rows = {kept:,} kept + {rejected:,} left out</p>"
        f'<div class=strip><i style="flex:{kept}"></i><u style="flex:{rejected}"></u></div>'
        f"<div class=tiles>{drawn}</div>"
        f"<h2>Input</h2><div class=card><table>{inputs}</table></div>"
    )


def _charts(report: Mapping) -> str:
    kept, samples, unit = report["kept"], report["samples"], report["caption_length_unit"]
    if not kept:
        return ""
    cards = [
        _card(
            "Languages", bars({_language(k): n for k, n in report["languages"].items()}, kept), "rows with a caption"
        ),
        _card("Categories", bars({k or "none": n for k, n in report["categories"].items()}, kept), "rows"),
        *(
            [_card("References", bars(report["references"], kept), "edits, by number of pictures")]
            if "references" in report
            else []
        ),
        _card("Aspect ratios", bars(report["ratios"], samples), "samples; own = between the table's ratios"),
        _card("Sizes", bars(report["sizes"], samples), "samples; width x height in pixels"),
    ]
    for language in (name for name in LANGUAGES if name in report["caption_lengths"]):
        spread = report["caption_lengths"][language]
        marks = [("median", spread["median"])]
        cards.append(
            _card(
                f"Caption length, {_language(language)}",
                histogram(spread["counts"], unit, marks),
                f"{unit}; mean {spread['mean']:g}, longest {spread['max']:,}",
            )  # fmt: skip
        )
    return f"<h2>What is kept</h2><div class=cards>{''.join(cards)}</div>"


def _language(code: str) -> str:
    return _LANGUAGE_NAMES.get(code, code)


def _card(title: str, chart: str, note: str = "") -> str:
    return f"<div class=card><h3>{escape(title)} <span class=soft>{escape(note)}</span></h3>{chart}</div>"


def _gallery(examples: Sequence[Example]) -> str:
    figures = []
    for example in examples:
        pictures = "".join(f'<img src="{picture}" alt="">' for picture in example.pictures) or "no picture to show"
        captions = "".join(
            f"<div><em>{escape(language)}</em> {escape(_short(text))}</div>" for language, text in example.captions
        )
        figures.append(
            f"<figure><div class=pictures>{pictures}</div><figcaption>{captions}<small>{escape(example.detail)}</small>"
            f"<small>{escape(example.origin)}</small></figcaption></figure>"
        )
    return f"<div class=gallery>{''.join(figures)}</div>"


def _short(text: str, most: int = 140) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _size(num_bytes: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
