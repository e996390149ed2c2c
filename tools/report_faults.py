"""The part of the page of tools.report that says what went wrong, and what of a run could not be read."""

import time
from collections.abc import Sequence
from html import escape

from tools.report_run import Run, seconds_of
from tools.report_words import MOST_TEXT, card, duration, short, shown

_MOST_EVENTS, _MOST_WARNINGS = 60, 20


def faults(runs: Sequence[Run]) -> str:
    """Return what went wrong, a card a run: restarts, failed saves, numbers that were not finite, warnings."""
    parts = []
    for run in runs:
        events = [event for event in run.events if not _is_ordinary(event)]
        rows = [_event_row(event) for event in events[:_MOST_EVENTS]]
        rows += [
            f"<tr><td></td><td>{steps[0]:,}</td><td>not finite</td><td><code>{escape(name)}</code> at {len(steps):,} "
            f"logged steps</td></tr>"
            for name, steps in [*run.non_finite.items()][:_MOST_EVENTS]
        ]
        num_left = len(events) + len(run.non_finite) - _MOST_EVENTS
        left = f"<p class=note>and {num_left:,} more in events.jsonl and metrics.jsonl</p>" * (num_left > 0)
        body = ""
        if rows:
            head = "<tr><th>when</th><th>step</th><th>what</th><th></th></tr>"
            body += f'<table class="table text">{head}{"".join(rows[:_MOST_EVENTS])}</table>{left}'
        if run.warnings:
            head = "<tr><th>times</th><th>first</th><th>last</th><th>warning</th></tr>"
            lines = "".join(
                f"<tr><td>{w.count:,}</td><td>{w.first}</td><td>{w.last}</td><td><code>{escape(w.example[:300])}"
                "</code></td></tr>"
                for w in run.warnings[:_MOST_WARNINGS]
            )
            num_left = len(run.warnings) - _MOST_WARNINGS
            left = f"<p class=note>and {num_left:,} more kinds in train.log</p>" * (num_left > 0)
            body += f'<table class="table text">{head}{lines}</table>{left}'
        if not run.events and not body:
            body = "<p>Nothing is known: the folder has no events.jsonl.</p>"
        if run.left_out:
            files = "; ".join(f"{name}: {what}" for name, what in run.left_out.items())
            body = f"<p>Left out of this page: {escape(short(files, MOST_TEXT))}.</p>{body}"
        parts.append(card(run.name, body or "<p>None: one start, no failed save, no warning.</p>"))
    return f"<h2>Restarts, faults and warnings</h2>{''.join(parts)}"


def _is_ordinary(event: dict) -> bool:
    return event["event"] in ("goodput", "checkpoint") or event.get("reason") in ("first", "finished")


def _event_row(event: dict) -> str:
    rest = {k: v for k, v in event.items() if k not in ("time", "event", "step", "reason") and v not in (0, "")}
    if event["event"] == "start":
        what, reason = "started again", f"after: {shown(event.get('reason', 'unknown')).replace('_', ' ')}"
    else:
        what, reason = event["event"].replace("_", " "), shown(event.get("reason", "")).replace("_", " ")
    if down_s := seconds_of(rest.get("down_s")):  # else as it stands there
        del rest["down_s"]
        rest["down"] = duration(down_s)
    details = ", ".join([reason] * bool(reason) + [f"{k.replace('_', ' ')} {shown(v)}" for k, v in rest.items()])
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    what, details = escape(short(what)), escape(short(details, MOST_TEXT))
    return f"<tr><td>{when}</td><td>{event['step']:,}</td><td>{what}</td><td>{details}</td></tr>"
