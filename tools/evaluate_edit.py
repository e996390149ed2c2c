"""Measure an edit run on held-out edits: `python -m tools.evaluate_edit --run runs/edit`.

Every held-out edit with a known region is drawn in each of its languages.  Its mean absolute error, in steps of 255, is
taken inside the region and outside, and stands beside that of (i) the first reference as it is, (ii) the untrained
network, whose velocity is zero, so that it leaves the noise, and (iii) the target through the VAE and back, which
nothing that is drawn can pass.  The planner's answer is right if greedy decoding gives exactly the known plan.  With
--keep plan all outside of the boxes of the planner's own answer is the reference's pixels, as in `tools.edit`.  Writes
evaluation.json and evaluation.png, the first edits as reference | result | target, to the run folder.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from data.edit_plan import EditPlan, parse_plan
from data.index import build_index
from data.mixture import load_mixture
from data.plan import every_language
from data.reader import Reader, Sample
from data.tasks import EDIT, MIXED, check_task
from model.edit_planner import Planner, PlannerInput, generate_plan
from tools.draw_edits import KEEP, draw_edits, kept_by_plan
from tools.edit_errors import edit_errors, mean_errors
from tools.edit_grid import drawing_of, side_by_side
from tools.edit_weights import EditModel, load_edit_model
from tools.sample import sampler_settings
from utils.config import check_values, parse, run_main
from utils.picture_grid import labelled_grid

_METHODS = ("renderer", "copy", "untrained", "vae")
_PLANNED_AT_A_TIME = 16


@dataclass(frozen=True)
class Config:
    run: str = "runs/edit"  # a run folder of train_edit_ddp.py
    step: int = -1  # which checkpoint; -1 = the newest valid one
    weights: str = "ema"  # of the renderer: ema or raw
    num_edits: int = 1000  # held-out edits, spread over the set, each in every language it has; at most all
    num_shown: int = 32  # of them in the picture
    num_steps: int = 20  # sampler steps
    cfg_scale: float = 2.0
    keep: str = "nothing"  # plan: the first reference stays as it is outside of the boxes of the planner's answer
    seed: int = 0


def main(cfg: Config) -> None:
    check_values(cfg, ("num_edits", "num_shown", "num_steps"), {"weights": ("ema", "raw"), "keep": KEEP})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_edit_model(Path(cfg.run), cfg.step, cfg.weights, device, torch.float32)
    check_task(model.trained, cfg.run, (EDIT, MIXED), "tools.evaluate")
    samples = _held_out(model, cfg)
    if not samples:
        raise ValueError("no held-out edit has a mask, so nothing is known to be inside or outside of it")
    drawings = [drawing_of(sample, model.encoders, cfg.seed) for sample in samples]
    is_exact = _exact_plans(model, samples)
    if cfg.keep == "plan":
        factor, plans = model.encoders.vae.scale_factor, _plans(model, samples, is_exact)
        drawings = [kept_by_plan(drawing, plan, factor) for drawing, plan in zip(drawings, plans, strict=True)]
    settings = sampler_settings(model.folder, cfg.num_steps, cfg.cfg_scale)
    pictures = {"renderer": draw_edits(model.network, model.encoders, drawings, settings)}
    pictures["copy"] = [_copied(sample) for sample in samples]
    pictures["untrained"] = [model.encoders.picture(drawing.noise) for drawing in drawings]
    pictures["vae"] = [model.encoders.picture(model.encoders.encode_picture(s.read_pixels())[0]) for s in samples]
    targets = [_array(sample.read_pixels()) for sample in samples]
    errors = {
        method: [edit_errors(p, t, s.mask.numpy()) for p, t, s in zip(pictures[method], targets, samples, strict=True)]
        for method in _METHODS
    }
    groups = defaultdict(list)
    for i, sample in enumerate(samples):
        for group in ("all", sample.plan.language, sample.category):
            groups[group].append(i)
    told = {name: getattr(cfg, name) for name in ("num_steps", "cfg_scale", "keep")}
    report = {"weights": model.source} | told | {"groups": {}}
    for group, members in sorted(groups.items(), key=lambda pair: (pair[0] != "all", pair[0])):
        row = {method: asdict(mean_errors([errors[method][i] for i in members])) for method in _METHODS}
        known = [is_exact[i] for i in members if is_exact[i] is not None]
        report["groups"][group] = {
            "edits": len(members),
            "plan_exact": sum(known) / len(known) if known else None,
            "kept": sum(drawings[i].kept_share for i in members) / len(members),  # share of the picture
        } | row
    folder = Path(cfg.run)
    (folder / "evaluation.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shown = samples[:: max(1, len(samples) // cfg.num_shown)][: cfg.num_shown]
    rows = [side_by_side(sample, pictures["renderer"][samples.index(sample)]) for sample in shown]
    Image.fromarray(labelled_grid(rows, [s.caption for s in shown], columns=4)).save(folder / "evaluation.png")
    print(table(report))
    print(f"reference | result | target: {folder / 'evaluation.png'}")


def _held_out(model: EditModel, cfg: Config) -> list[Sample]:
    trained, text = model.trained, model.encoders.text
    if "condition_pixels" not in trained:
        raise ValueError(f"{cfg.run} is no run of train_edit_ddp.py")
    cache, mixture = Path(trained["cache_folder"]), load_mixture(trained["data"])
    shards = mixture.held_out(trained["validation_data"], mixture.shards("train", cache), cache)
    index = build_index(
        list(shards), text.count_tokens, f"{text.tokenizer_id} {text.edit_tokenizer_id}", cache,
        condition_pixels=trained["condition_pixels"],
    )  # fmt: skip
    sizes = {name: trained[name] for name in ("max_pixels", "reference_pixels")}
    reader = Reader(index, condition_pixels=trained["condition_pixels"], **sizes)
    planned = [p for i in index.spread(cfg.num_edits) for p in every_language(index, i, **sizes)]
    samples = [reader.read(p) for p in planned if index[p.index].mask is not None and index[p.index].references]
    # What takes a bad sample's place may have no mask.
    return [sample for sample in samples if sample.mask is not None]


def _copied(sample: Sample) -> np.ndarray:
    """Return the first reference at the target's size."""
    height, width = sample.plan.height, sample.plan.width
    reference = Image.fromarray(_array(sample.references[0].vae))
    return np.asarray(reference if reference.size == (width, height) else reference.resize((width, height)))


@torch.no_grad()
def _exact_plans(model: EditModel, samples: list[Sample]) -> list[bool | None]:
    """Return of each sample whether the planner's most likely answer is its plan; None where that is not known."""
    planner, found = Planner(model.encoders.text), []
    for start in tqdm(range(0, len(samples), _PLANNED_AT_A_TIME), unit="batch", disable=None):
        part = samples[start : start + _PLANNED_AT_A_TIME]
        pictures = [[reference.condition for reference in sample.references] for sample in part]
        output = planner([PlannerInput(s.caption, p, s.plan_text) for s, p in zip(part, pictures, strict=True)])
        pairs = zip(output.has_answer.tolist(), output.is_exact.tolist(), strict=True)
        found += [is_exact if has_answer else None for has_answer, is_exact in pairs]
    return found


def _plans(model: EditModel, samples: list[Sample], is_exact: list[bool | None]) -> list[EditPlan | None]:
    """Return the planner's answers; None for one that is no plan."""
    found: list[EditPlan | None] = []
    for sample, exact in zip(tqdm(samples, unit="plan", disable=None), is_exact, strict=True):
        pictures = [reference.condition for reference in sample.references]
        # What greedy decoding gives where the known plan is the most likely answer is known.
        text = sample.plan_text if exact else generate_plan(model.encoders.text, sample.caption, pictures)
        try:
            found.append(parse_plan(text))
        except ValueError:
            found.append(None)
    return found


def _array(picture: Tensor) -> np.ndarray:
    return picture.permute(1, 2, 0).cpu().numpy()


def table(report: dict) -> str:
    """Return a report as a Markdown table."""
    lines = ["| edits | number | plan right | inside: ours | copy | untrained | VAE | outside: ours | copy | VAE |"]
    lines.append("|---" * 10 + "|")

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    for group, row in report["groups"].items():
        inside, outside = ({m: number(row[m][part]) for m in _METHODS} for part in ("inside", "outside"))
        right = "" if row["plan_exact"] is None else f"{row['plan_exact']:.1%}"
        lines.append(
            f"| {group} | {row['edits']} | {right} | {inside['renderer']} | {inside['copy']} | {inside['untrained']} "
            f"| {inside['vae']} | {outside['renderer']} | {outside['copy']} | {outside['vae']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
