"""Plan a training run without a GPU and without weights: memory, collectives, arithmetic and time of a step.

    python -m tools.plan --gpus 32 --tp 2 --samples '2*1024x1024:200'          one mesh, in detail
    python -m tools.plan --gpus 32 --search --picture plan.png                 all sensible meshes, ranked
    python -m tools.plan --gpus 8 --train planner,renderer --lora_rank 32 --samples 1024x1024+1024x1024:60

The last is train_edit_ddp.py's step, planner and renderer whole on every GPU: its memory alone.

The real network is built on the meta device, cut by the same functions as in training, and runs its steps with fake
tensors under a fake process group of the full size.  Bytes, collectives and FLOPs are exact; times are a roofline, and
an expectation from the shares of it that kernels usually reach.
"""

import json
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig

from data.edit import MAX_REFERENCES
from data.reference_size import area_size
from model.mmdit import MMDiTConfig
from tools.plan_depth import plan_step
from tools.plan_edit import plan_edit
from tools.plan_edit_report import EditReport, print_edit_plan
from tools.plan_edit_settings import TRAINABLE, EditSettings, released_vlm
from tools.plan_picture import draw_plans
from tools.plan_report import GIB, Report, Surroundings, mesh_name, print_details, print_table
from tools.plan_search import candidates, search
from tools.plan_step import PIXELS_PER_TOKEN, StepSettings
from utils.config import parse, run_main
from utils.devices import device_names, find_device

_SAMPLE = re.compile(r"(?:(\d+)\*)?(\d+x\d+(?:\+\d+x\d+)*)(?::(\d+))?")
# Of the released encoders in bfloat16; a test adds them up.
LANGUAGE_MODEL_BYTES, VLM_BYTES, VAE_BYTES = 14_141_238_272, 16_584_333_312, 253_785_062
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Config:
    # What is trained
    model: str = ""  # folder in the released layout, for its transformer/config.json; empty = the released 20 B
    samples: tuple[str, ...] = ("1024x1024:200",)  # a micro-batch: [count*]HxW[+reference HxW ...][:text tokens]
    global_batch_size: int = 0  # samples an optimizer step; 0 = one micro-batch a data rank (search: one a GPU)
    lora_rank: int = 0  # of adapters that are trained instead of the network; 0 = none
    lora_base: str = "auto"  # how the frozen weights under them are kept: auto (as --dtype), bfloat16, int8, nf4
    # train_edit_ddp.py instead of train_mmdit.py: copies, not shards; a sample's text tokens are those of its
    # instruction alone, and its pictures' for the planner come on top
    train: str = ""  # planner,renderer, planner or renderer; nothing = train_mmdit.py
    freeze_vision: bool = False
    condition_pixels: int = 384 * 384  # area at which the planner sees each reference
    plan_tokens: int = 100  # of a plan that the planner learns
    zero: bool = False  # share AdamW's state out over the ranks
    optimizer: str = "adamw"  # adamw or muon, which is this script's default
    # On what
    gpus: int = 32
    gpus_per_node: int = 8
    device: str = "H100"  # see utils/devices.py
    encoders_gib: float = -1.0  # frozen encoders on every GPU, 0 if elsewhere; -1 = what the released ones weigh
    reserve_gib: float = 4.0  # left for the CUDA context, NCCL and fragmentation
    # Parallelism and switches, as the training script's
    dp_replicate: int = 1
    dp_shard: int = -1  # -1 = all ranks that are left
    cp: int = 1
    tp: int = 1
    tp_sequence_parallel: bool = False  # the search takes it with every tp
    dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    reshard_after_forward: bool = True
    activation_checkpointing: str = "none"
    ema: bool = True
    # Search: every mesh that makes sense, with the least recomputation that fits, ranked by expected samples/s
    search: bool = False
    num_processes: int = 0  # plans at once; 0 = one a core
    # Results
    output: str = ""  # JSON file
    picture: str = ""  # PNG file


def parse_samples(samples: tuple[str, ...]) -> tuple[tuple, tuple]:
    """Turn "2*1024x1024+512x512:200" and the like into grids and text lengths of a micro-batch.

    Raises: ValueError for another form, for no sample at all, for sides that are no multiple of 16 pixels, and for more
    references than an edit has.
    """
    if not samples:
        raise ValueError("--samples needs a sample, such as 1024x1024:200")
    grids, txt_lens = [], []
    for text in samples:
        if (match := _SAMPLE.fullmatch(text)) is None:
            raise ValueError(f"--samples {text!r}: write [count*]HxW[+HxW ...][:text tokens], as in 2*1024x768:200")
        count, images, txt_len = match.groups()
        if count is not None and not int(count):
            raise ValueError(f"--samples {text!r}: the count must be at least 1, got {count}")
        sizes = [tuple(map(int, image.split("x"))) for image in images.split("+")]
        if any(side < 1 or side % PIXELS_PER_TOKEN for size in sizes for side in size):
            raise ValueError(f"--samples {text!r}: sides must be multiples of {PIXELS_PER_TOKEN} pixels")
        if len(sizes) - 1 > MAX_REFERENCES:
            raise ValueError(
                f"--samples {text!r}: an edit has at most {MAX_REFERENCES} references, got {len(sizes) - 1}"
            )
        grid = tuple((1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN) for height, width in sizes)
        grids += [grid] * int(count or 1)
        txt_lens += [int(txt_len or 200)] * int(count or 1)
    return tuple(grids), tuple(txt_lens)


def base_settings(cfg: Config) -> StepSettings:
    """Return the settings that no mesh changes."""
    for name in ("dtype", "reduce_dtype"):
        if getattr(cfg, name) not in _DTYPES:
            raise ValueError(f"--{name} must be one of {', '.join(_DTYPES)}, got {getattr(cfg, name)!r}")
    grids, txt_lens = parse_samples(cfg.samples)
    return StepSettings(
        model=MMDiTConfig.from_folder(f"{cfg.model}/transformer") if cfg.model else MMDiTConfig(),
        grids=grids,
        txt_lens=txt_lens,
        dtype=_DTYPES[cfg.dtype],
        reduce_dtype=_DTYPES[cfg.reduce_dtype],
        reshard_after_forward=cfg.reshard_after_forward,
        activation_checkpointing=cfg.activation_checkpointing,
        tp_sequence_parallel=cfg.tp_sequence_parallel,
        ema=cfg.ema,
        lora_rank=cfg.lora_rank,
        lora_base=cfg.lora_base,
    )


def edit_settings(cfg: Config) -> EditSettings:
    """Return the step of train_edit_ddp.py that the flags describe."""
    if cfg.train not in TRAINABLE:
        raise ValueError(f"--train must be one of {', '.join(TRAINABLE)}, got {cfg.train!r}")
    if cfg.search or cfg.tp * cfg.cp * cfg.dp_replicate != 1 or cfg.dp_shard not in (-1, 1):
        raise ValueError("--train plans copies on every GPU (train_edit_ddp.py): no mesh, no --search")
    base = base_settings(cfg)
    sizes = [[(h * PIXELS_PER_TOKEN, w * PIXELS_PER_TOKEN) for _, h, w in grid] for grid in base.grids]
    num_samples = cfg.gpus * len(base.grids)
    if cfg.global_batch_size % num_samples:
        raise ValueError(
            f"--global_batch_size {cfg.global_batch_size} is no multiple of the {num_samples} samples that all GPUs "
            "hold at once"
        )
    return EditSettings(
        renderer=base.model,
        vlm=Qwen2_5_VLConfig.from_pretrained(f"{cfg.model}/text_encoder") if cfg.model else released_vlm(),
        train=cfg.train,
        freeze_vision=cfg.freeze_vision,
        lora_rank=cfg.lora_rank,
        lora_base=cfg.lora_base,
        num_ranks=cfg.gpus,
        zero=cfg.zero,
        optimizer=cfg.optimizer,
        grids=base.grids,
        num_words=base.txt_lens,
        conditions=tuple(tuple(area_size(*size, cfg.condition_pixels) for size in own[1:]) for own in sizes),
        num_answer=cfg.plan_tokens,
        accumulate=max(1, cfg.global_batch_size // num_samples),
        dtype=base.dtype,
        activation_checkpointing=cfg.activation_checkpointing,
    )


def encoder_bytes(cfg: Config) -> int:
    """Return what the frozen encoders take: --encoders_gib, or what the released ones weigh in bfloat16.

    Text-to-image needs no vision tower; a planner that is trained is no frozen encoder.
    """
    if cfg.encoders_gib >= 0:
        return int(cfg.encoders_gib * GIB)
    sees = any("+" in text for text in cfg.samples) or bool(cfg.train)
    return VAE_BYTES + (0 if "planner" in cfg.train else VLM_BYTES if sees else LANGUAGE_MODEL_BYTES)


def one_mesh(cfg: Config, base: StepSettings) -> StepSettings:
    """Return the settings of the mesh that the flags name."""
    sizes = {axis: getattr(cfg, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp")}
    rest = -1 * sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    if sizes["dp_shard"] == -1 and rest > 0:
        sizes["dp_shard"] = max(1, cfg.gpus // rest)
    settings = replace(base, **sizes)
    if settings.num_ranks != cfg.gpus:
        raise ValueError(f"a mesh of {mesh_name(settings)} has {settings.num_ranks} ranks, --gpus says {cfg.gpus}")
    if base.model.num_attention_heads % cfg.tp:
        raise ValueError(f"--tp {cfg.tp} does not divide the model's {base.model.num_attention_heads} attention heads")
    a_micro_batch = settings.dp_replicate * settings.dp_shard * len(base.txt_lens)
    if cfg.global_batch_size % a_micro_batch:
        raise ValueError(
            f"--global_batch_size {cfg.global_batch_size} is no multiple of the {a_micro_batch} samples that all data "
            "ranks hold at once"
        )
    return replace(settings, accumulate=max(1, cfg.global_batch_size // a_micro_batch))


def main(cfg: Config) -> None:
    started = time.perf_counter()
    device = find_device(cfg.device)
    if device is None:
        raise ValueError(f"--device {cfg.device!r} is not in utils/devices.py, which has {device_names()}")
    around = Surroundings(device, cfg.gpus_per_node, encoder_bytes(cfg), int(cfg.reserve_gib * GIB))
    if cfg.train:
        report = EditReport(plan_edit(edit_settings(cfg)), around)
        print_edit_plan(report)
        if cfg.output:
            Path(cfg.output).write_text(json.dumps(report.to_json(), indent=1) + "\n")
        return
    base = base_settings(cfg)
    if cfg.search:
        batch = cfg.global_batch_size or cfg.gpus * len(base.txt_lens)
        settings = list(candidates(base, cfg.gpus, cfg.gpus_per_node, batch))
        if not settings:
            raise ValueError(f"no mesh of {cfg.gpus} GPUs divides --global_batch_size {batch} and the attention heads")
        found = search(settings, around.limit_bytes, cfg.num_processes or os.cpu_count() or 1)
        reports = [Report(candidate.step, around) for candidate in found if candidate.step]
        reports.sort(key=lambda report: (not report.fits, -report.samples_per_s))
    else:
        found, reports = [], [Report(plan_step(one_mesh(cfg, base)), around)]
    tokens = f"{sum(base.img_lens)} image + {sum(base.txt_lens)} text tokens"
    print(f"{cfg.gpus} × {device.name}, {device.memory_gib} GiB of which {cfg.reserve_gib} stay free; a micro-batch of "
          f"{len(base.txt_lens)} samples, {tokens}")  # fmt: skip
    print_table(reports)
    for candidate in found:
        if candidate.step is None:
            print(f"{mesh_name(candidate.settings):<22}left out: {candidate.reason}")
    if reports:
        print_details(reports[0])
    if cfg.output:
        Path(cfg.output).write_text(json.dumps([report.to_json() for report in reports], indent=1) + "\n")
    if cfg.picture and reports:
        draw_plans(cfg.picture, reports[:12], f"{cfg.gpus} × {device.name}, {' '.join(cfg.samples)}")
    print(f"planned in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
