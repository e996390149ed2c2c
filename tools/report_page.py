"""The page of tools.report: several runs side by side, in one HTML file that needs nothing else."""

import base64
import io
import re
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from PIL import Image

from tools.report_charts import Line, legend, line_chart, number, smoothed, strip
from tools.report_faults import faults
from tools.report_run import Run, config_differences
from tools.report_words import card, duration, milliseconds, short, shown
from utils.json_lines import is_step
from utils.plain_file import open_plain

_STYLE = "".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("prepare_page.css", "report_page.css")
)
# What is drawn first, and how: name, title, note, whether the y axis is logarithmic.  All else is under "More curves".
_MAIN = (
    ("loss", "Training loss", "each logged step faint, its running mean strong", False),
    ("val_loss", "Validation loss", "", False),
    ("plan_loss", "Training loss of the planner", "", True),
    ("val_plan_loss", "Validation loss of the planner", "", True),
    ("val_plan_exact", "Right plans", "share of validation samples", False),
    ("grad_norm", "Gradient norm", "before clipping", True),
    ("renderer_grad_norm", "Gradient norm of the renderer", "before clipping", True),
    ("planner_grad_norm", "Gradient norm of the planner", "before clipping", True),
    ("lr", "Learning rate", "", False),
    ("samples_per_s", "Samples a second", "over all ranks", False),
    ("step_s", "Step time", "seconds", False),
    ("mfu", "Model FLOP utilisation", "", False),
)
_SMOOTH = ("loss", "plan_loss", "grad_norm", "renderer_grad_norm", "planner_grad_norm", "samples_per_s", "step_s")
_LABEL = re.compile(r"(val_)?(plan_)?(loss|exact)_.+")
_TIME = re.compile(r"val_loss_t([0-9]{1,4})")
_MOST_PICTURES, _PICTURE_WIDTH = 6, 1100
_MOST_PIXELS = 80_000_000  # of a picture to decode: 300 MB; Pillow warns from 89 million on
_MOST_CURVES, _MOST_LABELS, _MOST_FIELDS = 100, 500, 1000  # what a broken or a foreign file may add to the page
# What no HTML may hold: control characters, halves of a pair (a name that is not UTF-8 has some), non-characters.
_NOT_HTML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def page(runs: Sequence[Run]) -> str:
    """Return the page.  Names of runs, curves and fields are shortened where they are no names."""
    runs = [_with_short_names(run) for run in runs]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<h1>{escape(title)}</h1><p>as of {time.strftime('%Y-%m-%d %H:%M')}</p>", _overview(runs),
        "<h2>Curves</h2>", _curves(runs), _by_label(runs), _pictures(runs), _time(runs), faults(runs), _config(runs),
    ]  # fmt: skip
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    return _NOT_HTML.sub("\ufffd", text)


def _with_short_names(run: Run) -> Run:
    curves, non_finite, config = (
        {short(k): v for k, v in of.items()} for of in (run.curves, run.non_finite, run.config)
    )
    return replace(run, name=short(run.name), curves=curves, non_finite=non_finite, config=config)


def _overview(runs: Sequence[Run]) -> str:
    rows = []
    for i, run in enumerate(runs):
        best = min(zip(*reversed(run.curves["val_loss"]), strict=True)) if "val_loss" in run.curves else None
        seconds = run.goodput()
        total = sum(seconds.values())
        rate = run.curves.get("samples_per_s", ([], []))[1]
        planned = run.config.get("num_steps")
        cells = [
            f"{run.last_step:,}" + (f" of {planned:,}" if is_step(planned) else ""),
            _last(run, "loss"), _last(run, "val_loss"), f"{number(best[0])} at {best[1]:,}" if best else "",
            number(statistics.median(rate[len(rate) // 2 :])) if rate else "",
            duration(total) if total else "", f"{100 * seconds['training'] / total:.1f} %" if total else "",
            str(len(run.starts())) if run.events else "",
        ]  # fmt: skip
        name = f'<span class="key"><i class="c{i % 8}"></i>{escape(run.name)}</span>'
        rows.append(f"<tr><td>{name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("run", "steps", "loss", "validation loss", "best", "samples/s", "time", "goodput", "restarts")
    head = "".join(f"<th>{name}</th>" for name in heads)
    table = f'<div class=scroll><table class="runs"><tr>{head}</tr>{"".join(rows)}</table></div>'
    note = "<p class=note>Goodput: the share of all time, down time included, that went into steps done once.</p>"
    return f'<h2>Overview</h2><div class="card">{table}</div>{note}'


def _curves(runs: Sequence[Run]) -> str:
    names = {name for run in runs for name in run.curves}
    main = [_curve(runs, *entry) for entry in _MAIN if entry[0] in names]
    placed = {entry[0] for entry in _MAIN}
    rest = sorted(name for name in names if name not in placed and not _LABEL.fullmatch(name))
    more = [_curve(runs, name, name, "", False) for name in rest[:_MOST_CURVES]]
    count = f"{len(more)}" + f" of {len(rest):,}" * (len(rest) > len(more))
    folded = f"<details><summary>More curves: {count}</summary><div class=cards>{''.join(more)}</div></details>"
    return f"<div class=cards>{''.join(main)}</div>" + (folded if more else "")


def _curve(runs: Sequence[Run], name: str, title: str, note: str, log: bool) -> str:
    lines, keys = [], []
    for i, run in enumerate(runs):
        steps, values = run.curves.get(name, ([], []))
        if not steps:
            continue
        if name in _SMOOTH and len(steps) >= 20:
            lines.append(Line(run.name, steps, values, i, faint=True))
            values = smoothed(values, max(2, len(steps) // 40))
        lines.append(Line(run.name, steps, values, i))
        keys.append((run.name, i, number(values[-1])))
    marks = [event["step"] for event in runs[0].starts()] if len(runs) == 1 else []
    if marks:
        note = f"{note}; dashed: restarts" if note else "dashed: restarts"
    return card(title, line_chart(lines, marks, log) + legend(keys), note)


def _by_label(runs: Sequence[Run]) -> str:
    """Return the validation loss over time of the diffusion, and the last losses by language and category."""
    lines, keys = [], []
    for i, run in enumerate(runs):
        strata = sorted((int(match[1]), name) for name in run.curves if (match := _TIME.fullmatch(name)))
        if not strata:
            continue
        by_step = {name: dict(zip(*run.curves[name], strict=True)) for _, name in strata}
        steps = sorted(set.intersection(*(set(of_name) for of_name in by_step.values())))
        if not steps:  # at which every part of the time axis has a loss
            continue
        chosen = [len(steps) - 1] if len(runs) > 1 else sorted({0, len(steps) // 2, len(steps) - 1})
        for place, at in enumerate(chosen):
            values = [by_step[name][steps[at]] for _, name in strata]
            colour = i if len(runs) > 1 else place
            named = run.name if len(runs) > 1 else f"step {steps[at]:,}"
            lines.append(Line(named, [stratum for stratum, _ in strata], values, colour))
            keys.append((named, colour, ""))
    cards = []
    if lines:
        note = "from nearly clean (0) to nearly noise; equally likely parts of the time axis"
        cards.append(card("Validation loss by diffusion time", line_chart(lines, x_unit="part") + legend(keys), note))
    labels = dict.fromkeys(n for run in runs for n in run.curves if _LABEL.fullmatch(n) and not _TIME.fullmatch(n))
    if labels:
        head = "<th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs)
        rows = "".join(
            f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{_last(run, name)}</td>" for run in runs) + "</tr>"
            for name in [*labels][:_MOST_LABELS]
        )
        more = _more(len(labels) - _MOST_LABELS, "metrics.jsonl")
        table = f'<div class=scroll><table class="table"><tr>{head}</tr>{rows}</table></div>{more}'
        cards.append(card("Last losses by language and category", table))
    return f"<h2>By time, language and category</h2><div class=cards>{''.join(cards)}</div>" if cards else ""


def _pictures(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        steps = sorted(run.pictures)
        count = min(len(steps), _MOST_PICTURES)
        chosen = sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)})
        if not chosen:
            continue
        figures = "".join(
            f'<figure><img src="{picture}" alt="samples of step {step}"><figcaption>step {step:,}</figcaption></figure>'
            if (picture := _picture(run.pictures[step]))
            else f"<figure><figcaption>step {step:,}: the picture cannot be read</figcaption></figure>"
            for step in chosen
        )
        left = f"{len(chosen)} of {len(steps)}" if len(steps) > len(chosen) else ""
        head = f"<h3>{escape(run.name)} <span class=soft>{left}</span></h3>" if len(runs) > 1 or left else ""
        parts.append(f"{head}<div class=shots>{figures}</div>")
    return f"<h2>Samples</h2>{''.join(parts)}" if parts else ""


def _picture(path: Path) -> str:
    """Return a picture as a data URL, scaled down if it is large; "" if it is damaged, half written or no picture."""
    try:
        with open_plain(path) as opened, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(opened, formats=["PNG"])  # others decode with other programs
            if image.width * image.height > _MOST_PIXELS:
                return ""
            image = image.convert("RGB")
    except Exception:  # a decoder of damaged bytes raises what it likes
        return ""
    image.thumbnail((_PICTURE_WIDTH, 4 * _PICTURE_WIDTH), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _time(runs: Sequence[Run]) -> str:
    cards = []
    phases = [(run, run.phases()) for run in runs]
    names = dict.fromkeys(name for _, of_run in phases for name in of_run if name != "other")
    if any(of_run for _, of_run in phases):
        ordered = [*[*names][:_MOST_CURVES], "other"]
        drawn = [(run, {n: of_run.get(n, 0.0) for n in ordered}) for run, of_run in phases if of_run]
        for (_, parts), (_, of_run) in zip(drawn, (found for found in phases if found[1]), strict=True):
            parts["other"] += sum(seconds for name, seconds in of_run.items() if name not in parts)
        longest = max(sum(parts.values()) for _, parts in drawn)
        body = "".join(_labelled_strip(run.name, parts, longest, milliseconds) for run, parts in drawn)
        keys = legend([(name, i, "") for i, name in enumerate(ordered)])
        table = _phase_table(drawn, ordered)
        cards.append(card("A step by phase", body + keys + table, "mean of the logged steps; rank 0"))
    seconds = [(run, run.goodput()) for run in runs]
    if any(sum(of_run.values()) for _, of_run in seconds):
        body = "".join(
            _labelled_strip(run.name, of_run, None, duration) for run, of_run in seconds if sum(of_run.values())
        )
        keys = legend([(state.replace("_", " "), i, "") for i, state in enumerate(seconds[0][1])])
        note = "all starts, down time included; up to a minute before a kill is not counted"
        table = _phase_table([s for s in seconds if sum(s[1].values())], list(seconds[0][1]), duration)
        cards.append(card("All of the time", body + keys + table, note))
    return f"<h2>Time</h2><div class=cards>{''.join(cards)}</div>" if cards else ""


def _labelled_strip(name: str, parts: dict[str, float], whole: float | None, say) -> str:
    return f"<div>{escape(name)} <span class=soft>{say(sum(parts.values()))}</span></div>{strip(parts, whole)}"


def _phase_table(drawn: Sequence[tuple[Run, dict[str, float]]], names: Sequence[str], say=None) -> str:
    say = say or milliseconds
    head = "<th></th>" + "".join(f"<th colspan=2>{escape(run.name)}</th>" for run, _ in drawn)
    rows = ""
    for name in names:
        cells = "".join(
            f"<td>{say(parts[name])}</td><td>{100 * parts[name] / max(1e-12, sum(parts.values())):.1f} %</td>"
            for _, parts in drawn
        )
        rows += f"<tr><td>{escape(name.replace('_', ' '))}</td>{cells}</tr>"
    head = f"<tr>{head}</tr>" if len(drawn) > 1 else ""
    return f'<div class=scroll><table class="table">{head}{rows}</table></div>'


def _config(runs: Sequence[Run]) -> str:
    parts = ["<h2>Configuration</h2>"]
    if len(runs) > 1:
        differences = config_differences(list(runs))
        if len({run.commit for run in runs}) > 1:
            differences["commit"] = [run.commit for run in runs]
        head = "<th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs)
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td>"
            + "".join(f"<td><code>{escape(shown(value))}</code></td>" for value in values) + "</tr>"
            for name, values in [*differences.items()][:_MOST_FIELDS]
        )  # fmt: skip
        more = _more(len(differences) - _MOST_FIELDS, "config.json")
        table = f'<div class=scroll><table class="table text"><tr>{head}</tr>{rows}</table></div>{more}'
        parts.append(card("What differs", table if rows else "<p>Nothing but the folder.</p>"))
    for run in runs:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(shown(value))}</code></td></tr>"
            for name, value in [*run.config.items()][:_MOST_FIELDS]
        )
        commit = f"<p class=note>Code: <code>{escape(run.commit)}</code></p>" if run.commit else ""
        more = _more(len(run.config) - _MOST_FIELDS, "config.json")
        table = f'<div class=card>{commit}<table class="table text">{rows}</table>{more}</div>'
        parts.append(f"<details><summary>All of {escape(run.name)}</summary>{table}</details>")
    return "".join(parts)


def _more(number_left: int, file: str) -> str:
    return f"<p class=note>and {number_left:,} more in {file}</p>" if number_left > 0 else ""


def _last(run: Run, name: str) -> str:
    values = run.curves.get(name, ([], []))[1]
    return number(values[-1]) if values else ""
