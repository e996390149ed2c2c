"""Draw edits whose references are read already, several in a pack."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from data.edit_plan import BOX_SIDE, EditPlan
from model.encoders import Encoders
from model.kept_region import kept_cells, outside_boxes, put_back
from model.latents import PATCH
from model.sampling import SamplerSettings, generate

KEEP = ("nothing", "plan")  # what an edit keeps of its first reference, besides what a mask says


@dataclass(frozen=True, eq=False)
class Drawing:
    """One edit to be drawn.

    noise: standard normal latents (C, h, w) on any device, whose shape sets the size.
    condition, vae: the references as the text encoder and as the VAE see them, uint8 (3, H, W) each.
    language: a row of the language embedding, for a network that has one.
    key: names the references, so that what is encoded is kept; None = not kept.
    kept: bool (H, W), pixels that stay those of the first reference, which has the result's size; None = nowhere.
    """

    instruction: str
    noise: Tensor
    condition: Sequence[Tensor] = field(default=())
    vae: Sequence[Tensor] = field(default=())
    language: int | None = None
    key: str | None = None
    kept: Tensor | None = None

    @property
    def kept_share(self) -> float:
        """Share of the picture that stays."""
        return 0.0 if self.kept is None else self.kept.double().mean().item()


def kept_by_plan(drawing: Drawing, plan: EditPlan | None, factor: int) -> Drawing:
    """Return an edit that keeps its first reference outside of a plan's boxes; as it is if those do not say enough.

    They do not if something may change elsewhere (`EditPlan.changed_boxes`), or if the result has another size than the
    first reference.  A mask goes before a plan.  factor: pixels of the side of a latent.
    """
    boxes = None if plan is None else plan.changed_boxes()
    height, width = (factor * cells for cells in drawing.noise.shape[1:])
    if drawing.kept is not None or boxes is None or not drawing.vae or drawing.vae[0].shape[1:] != (height, width):
        return drawing
    return replace(drawing, kept=outside_boxes(boxes, height, width, BOX_SIDE))


def draw_edits(
    network: nn.Module,
    encoders: Encoders,
    drawings: Sequence[Drawing],
    settings: SamplerSettings,
    negative_prompt: str = " ",
    max_tokens: float = 8192,
) -> list[np.ndarray]:
    """Return one uint8 (H, W, 3) picture an edit; max_tokens: in the network at once, both guidance halves counted."""
    guided = settings.cfg_scale != 1.0
    pictures: list[np.ndarray] = []
    with tqdm(total=len(drawings), unit="picture", disable=None) as progress:
        start = 0
        while start < len(drawings):
            prompts, negatives, references, used = [], [], [], 0
            for drawing in drawings[start:]:
                states = [
                    encoders.prompt(text, pictures=list(drawing.condition), key=drawing.key)
                    for text in (drawing.instruction, negative_prompt)[: 1 + guided]
                ]
                latents = [
                    encoders.reference_latents(None if drawing.key is None else f"{drawing.key} {i}", pixels)
                    for i, pixels in enumerate(drawing.vae)
                ]
                grid_tokens = sum(x.shape[1] * x.shape[2] // PATCH**2 for x in (drawing.noise, *latents))
                used += (1 + guided) * grid_tokens + sum(map(len, states))
                if prompts and used > max_tokens:
                    break
                prompts.append(states[0])
                negatives.append(states[-1])
                references.append(latents)
            pack = drawings[start : start + len(prompts)]
            languages = [drawing.language for drawing in pack] if network.config.num_languages else [None]
            factor = encoders.vae.scale_factor
            drawn = generate(
                network, prompts, negatives, [drawing.noise.to(encoders.device) for drawing in pack], settings,
                None if None in languages else languages, references,
                [None if drawing.kept is None else kept_cells(drawing.kept, factor) for drawing in pack],
            )  # fmt: skip
            for drawing, latents in zip(pack, drawn, strict=True):
                picture = encoders.picture(latents)
                kept = drawing.kept
                pictures.append(picture if kept is None else put_back(picture, drawing.vae[0], kept))
            start += len(pack)
            progress.update(len(pack))
    return pictures
