"""Edit pictures: `python -m tools.edit --image dog.png --instruction "Remove the dog."`.

Takes the newest checkpoint of a run of `train_edit_ddp.py`, or a folder in the released layout with weights in
`transformer/`.  Repeat --image for up to three references, --instruction for several edits of the same ones.  Writes
one PNG and one plan an instruction, and a grid of references and results.

--keep plan: outside of the plan's boxes every pixel stays; --mask: outside of your own mask every one does.
"""

import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from PIL import Image
from torch import Tensor

from data.captions import clean, language_of, language_row
from data.colour import to_srgb
from data.edit import MIN_AREA, is_white, read_mask
from data.edit_plan import EditPlan, parse_plan
from data.images import MULTIPLE, decode_image, upright
from data.reference_size import area_size
from data.tasks import EDIT, MIXED, check_task
from data.word_filter import WordFilter
from model.edit_planner import generate_plan
from model.sampling import SamplerSettings
from tools.draw_edits import KEEP, Drawing, draw_edits, kept_by_plan
from tools.edit_weights import load_edit_model
from tools.sample import sampler_settings
from utils.config import check_values, parse, run_main
from utils.picture_grid import labelled_grid
from utils.random_streams import torch_generator

log = logging.getLogger("edit")
MAX_REFERENCES = 3
RELEASED_REFERENCE_PIXELS, RELEASED_CONDITION_PIXELS = 1024 * 1024, 384 * 384
ImageLike = str | Path | Image.Image


@dataclass(frozen=True)
class Config:
    model: str = "runs/edit"  # a run folder, or a folder in the released layout with weights in transformer/
    step: int = -1  # which checkpoint of a run; -1 = the newest valid one
    weights: str = "ema"  # of a run's renderer: ema or raw
    image: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()  # repeat the flag for up to three references
    instruction: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()  # repeat the flag for more edits of them
    negative_prompt: str = " "
    width: int = 0  # pixels, a multiple of 16; 0 for both = the last reference's shape, at the area of references
    height: int = 0
    reference_pixels: int = 0  # area at which the renderer sees references; 0 = a run's own, of a folder 1048576
    condition_pixels: int = 0  # area at which the planner sees them; 0 = a run's own, of a folder 147456
    num_steps: int = 50  # sampler steps
    cfg_scale: float = 4.0  # 1 = no guidance; both as in the released pipelines
    plan: bool = True  # let the planner say what it would do
    keep: str = "nothing"  # plan: the first reference stays, pixel for pixel, outside of the boxes of the plan
    mask: str = ""  # picture as large as the first reference, white where it may change; every other pixel stays
    max_plan_tokens: int = 512
    refused_words: str = ""  # file, one word or phrase a line: instructions with them are refused
    seed: int = 0
    max_tokens_per_pack: int = 8192  # image and text tokens in the network at once, both guidance halves counted
    output: str = "edits"  # folder
    dtype: str = "auto"  # float32, bfloat16; auto = bfloat16 on GPUs


@dataclass(frozen=True)
class EditRequest:
    """One edit: what is to be done to which references, first to last, and the size of the result in pixels."""

    instruction: str
    images: Sequence[ImageLike] = ()
    width: int = 0  # 0 for both = from the last reference
    height: int = 0
    seed: int = 0
    mask: ImageLike | None = None  # as large as the first, white where that may change; the rest of it stays


@dataclass(frozen=True)
class EditResult:
    """The new picture, and the planner's plan: None if none was asked for or the planner's text is no valid plan."""

    image: Image.Image
    plan: EditPlan | None
    kept: float = 0.0  # share of the picture that was made to stay as it is


class QwenImageEditor:
    """Edits pictures with a run's or a released folder's model."""

    def __init__(
        self,
        model: str | Path,
        step: int = -1,
        weights: str = "ema",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        num_steps: int = 50,
        cfg_scale: float = 4.0,
        negative_prompt: str = " ",
        reference_pixels: int = 0,
        condition_pixels: int = 0,
        plan: bool = True,
        keep: str = "nothing",
        max_plan_tokens: int = 512,
        refused_words: WordFilter | str | Path | None = None,
        max_tokens_per_pack: int = 8192,
    ):
        """Load the model; what the arguments mean: see `Config`.

        device: None = the GPU if there is one; dtype: None = bfloat16 on a GPU.
        Raises: ValueError if the folder is neither a run nor in the released layout, or nothing valid is there, or if
        a plan is to say what is kept and there is to be none.
        """
        if keep not in KEEP or keep == "plan" and not plan:
            raise ValueError(f"what is kept is one of {', '.join(KEEP)}, the latter only with a plan; got {keep!r}")
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        loaded = load_edit_model(Path(model), step, weights, device, dtype)
        check_task(loaded.trained, model, (EDIT, MIXED), "tools.sample")
        self.network, self.encoders, self.source = loaded.network, loaded.encoders, loaded.source
        self.settings: SamplerSettings = sampler_settings(loaded.folder, num_steps, cfg_scale)
        self.negative_prompt, self.max_tokens_per_pack = negative_prompt, max_tokens_per_pack
        self.reference_pixels = reference_pixels or loaded.trained.get("reference_pixels", RELEASED_REFERENCE_PIXELS)
        # The first edit model's text encoder sees the picture as the VAE does.
        is_first = not self.encoders.text.labels_pictures
        released = self.reference_pixels if is_first else RELEASED_CONDITION_PIXELS
        self.condition_pixels = condition_pixels or loaded.trained.get("condition_pixels", released)
        self.max_plan_tokens, self.keep = max_plan_tokens if plan else 0, keep
        if isinstance(refused_words, (str, Path)):
            refused_words = WordFilter.from_file(refused_words)
        self.words = refused_words

    def edit(
        self,
        images: ImageLike | Sequence[ImageLike],
        instruction: str,
        width: int = 0,
        height: int = 0,
        seed: int = 0,
    ) -> EditResult:
        """Edit one picture, or one after up to three references (paths or pictures).

        Raises: as `edit_many`.
        """
        several = isinstance(images, Sequence) and not isinstance(images, str)
        images = list(images) if several else [images]
        return self.edit_many([EditRequest(instruction, images, width, height, seed)])[0]

    def edit_many(self, requests: Sequence[EditRequest]) -> list[EditResult]:
        """Edit, several edits of any sizes and numbers of references in a pack; each is what it would be alone.

        Raises: RefusedInstructionError for an instruction with a refused word; ValueError for an empty one, a picture
        that cannot be read, four references, a mask of another size than the first, or a size that the model cannot
        draw.  Nothing is drawn then.
        """
        for request in requests:
            if not isinstance(request.instruction, str):
                raise ValueError(f"an instruction is a text, got {type(request.instruction).__name__}")
            if self.words is not None:
                self.words.check(request.instruction)
        drawings = [self._drawing(request) for request in requests]
        plans = [self._plan(drawing) for drawing in drawings]
        if self.keep == "plan":
            factor = self.encoders.vae.scale_factor
            drawings = [kept_by_plan(d, plan, factor) for d, plan in zip(drawings, plans, strict=True)]
        pictures = draw_edits(
            self.network, self.encoders, drawings, self.settings, self.negative_prompt, self.max_tokens_per_pack
        )
        results = zip(pictures, plans, drawings, strict=True)
        return [EditResult(Image.fromarray(p), plan, drawing.kept_share) for p, plan, drawing in results]

    def _drawing(self, request: EditRequest) -> Drawing:
        instruction = clean(request.instruction)
        if not instruction:
            raise ValueError("the instruction is empty; say what is to be changed")
        if len(request.images) > MAX_REFERENCES:
            raise ValueError(f"an edit has at most {MAX_REFERENCES} references, got {len(request.images)}")
        if not self.encoders.text.labels_pictures and len(request.images) != 1:
            raise ValueError(f"this model edits exactly one picture, got {len(request.images)} references")
        images = [read_image(image) for image in request.images]
        condition = [pixels_at(image, self.condition_pixels) for image in images]
        references = [pixels_at(image, self.reference_pixels) for image in images]
        width, height = self._output_size(request, references)
        vae = self.encoders.vae
        shape = vae.num_channels, height // vae.scale_factor, width // vae.scale_factor
        has_language = self.network.config.num_languages
        return Drawing(
            instruction,
            torch.randn(shape, generator=torch_generator(request.seed, 0, 0, "edit")),
            condition=condition,
            vae=references,
            language=language_row(language_of(request.instruction)) if has_language else None,
            kept=None
            if request.mask is None
            else self._kept_by_mask(request.mask, images, references, (height, width)),
        )

    def _kept_by_mask(
        self, mask: ImageLike, images: Sequence[Image.Image], references: Sequence[Tensor], size: tuple[int, int]
    ) -> Tensor:
        """Return where the picture of `size` stays its first reference, bool (H, W)."""
        if not images or references[0].shape[1:] != size:
            own = f"{references[0].shape[2]} x {references[0].shape[1]}" if images else "none"
            raise ValueError(f"a mask needs a first reference of the result's size {size[1]} x {size[0]}, got {own}")
        try:
            opened = read_mask(_file_bytes(mask), (images[0].height, images[0].width), "first reference")
        except (OSError, ValueError) as error:
            raise ValueError(f"mask {'' if isinstance(mask, Image.Image) else mask}: {error}") from error
        # A pixel may change if any of those it is made of may, and be it one of thousands: float, which drops none.
        scaled = Image.fromarray(is_white(opened).astype(np.float32)).resize(size[::-1], Image.Resampling.BOX)
        return torch.from_numpy(np.array(scaled)) == 0

    def _output_size(self, request: EditRequest, references: Sequence[Tensor]) -> tuple[int, int]:
        width, height = request.width, request.height
        if not width and not height and references:
            height, width = references[-1].shape[1:]
        elif not width or not height:
            raise ValueError(f"give both width and height, needed without a reference; got {width} x {height}")
        if width % MULTIPLE or height % MULTIPLE or min(width, height) < 1:
            raise ValueError(f"a picture's sides must be positive multiples of {MULTIPLE} pixels: {width} x {height}")
        return width, height

    def _plan(self, drawing: Drawing) -> EditPlan | None:
        if not self.max_plan_tokens:
            return None
        text = generate_plan(self.encoders.text, drawing.instruction, drawing.condition, self.max_plan_tokens)
        try:
            return parse_plan(text)
        except ValueError as error:
            log.warning("no plan: %s", error)
            return None


def _file_bytes(image: ImageLike) -> bytes:
    if not isinstance(image, Image.Image):
        return Path(image).read_bytes()
    image.save(stream := io.BytesIO(), "PNG")
    return stream.getvalue()


def read_image(image: ImageLike) -> Image.Image:
    """Return a picture in sRGB, upright.  Raises: ValueError with the path and the reason if it cannot be read."""
    if not isinstance(image, ImageLike):
        raise ValueError(f"a reference is a path or a PIL picture, got {type(image).__name__}; see Image.fromarray")
    if isinstance(image, Image.Image):
        return to_srgb(upright(image))
    try:
        return decode_image(Path(image).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"reference {image}: {error}") from error


def pixels_at(image: Image.Image, area: int) -> Tensor:
    """Return a reference as uint8 (3, H, W) at an area, as the pipelines resize it.

    Source: `diffusers` VaeImageProcessor.resize.
    Raises: ValueError if it is too thin for this area.
    """
    height, width = area_size(image.height, image.width, area)
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def main(cfg: Config) -> None:
    if not cfg.instruction:
        raise ValueError("no instruction: give --instruction (repeatable)")
    counts = ("num_steps", "max_plan_tokens", "max_tokens_per_pack")
    check_values(cfg, counts, {"dtype": ("auto", "float32", "bfloat16"), "weights": ("ema", "raw"), "keep": KEEP})
    for name in ("reference_pixels", "condition_pixels"):
        if getattr(cfg, name) and getattr(cfg, name) < MIN_AREA:
            raise ValueError(f"--{name} is an area in pixels, at least {MIN_AREA}, got {getattr(cfg, name)}")
    if Path(cfg.output).is_file():
        raise ValueError(f"--output {cfg.output} is a file; name a folder")
    editor = QwenImageEditor(
        cfg.model, cfg.step, cfg.weights, None, None if cfg.dtype == "auto" else getattr(torch, cfg.dtype),
        cfg.num_steps, cfg.cfg_scale, cfg.negative_prompt, cfg.reference_pixels, cfg.condition_pixels, cfg.plan,
        cfg.keep, cfg.max_plan_tokens, cfg.refused_words or None, cfg.max_tokens_per_pack,
    )  # fmt: skip
    print(f"weights: {editor.source}")
    images = [read_image(image) for image in cfg.image]
    asked = images, cfg.width, cfg.height, cfg.seed, cfg.mask or None
    results = editor.edit_many([EditRequest(instruction, *asked) for instruction in cfg.instruction])
    output = Path(cfg.output)
    output.mkdir(parents=True, exist_ok=True)
    for i, (instruction, result) in enumerate(zip(cfg.instruction, results, strict=True)):
        result.image.save(output / f"{i:03d}.png")
        plan = result.plan and json.loads(result.plan.to_text())
        content = {"instruction": instruction, "plan": plan}
        (output / f"{i:03d}.json").write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", "utf-8")
        if cfg.plan:
            print(f"{i:03d}  {instruction}  →  {result.plan.to_text() if result.plan else 'no plan'}")
        if cfg.mask or cfg.keep == "plan":
            why = "" if result.kept else ": the plan does not say where everything stays"
            print(f"{i:03d}  {result.kept:.0%} of the picture kept{why}")
    shown = [pixels_at(image, editor.reference_pixels).permute(1, 2, 0).numpy() for image in images]
    shown += [np.asarray(result.image) for result in results]
    names = [f"reference {i + 1}" for i in range(len(images))] + list(cfg.instruction)
    scale = max(1, 128 // max(p.shape[0] for p in shown))
    Image.fromarray(labelled_grid(shown, names, min(8, len(shown)), scale)).save(output / "grid.png")
    count = f"{len(results)} picture{'s' * (len(results) > 1)}"
    print(f"{count}{' with plans' * cfg.plan} and grid.png in {output}/")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
