"""What a shard holds of an edit besides target and instruction: references, the region's mask, the plan.

A sample is an edit if its .json has "references": how many pictures it starts from, 0 to 3, which lie beside the
target as KEY.ref0.png and so on, in order.  KEY.mask.png, as large as the target, is white where the edit may change
something.  "actions" in the .json is the plan (`data.edit_plan`).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.captions import decode_text
from data.edit_plan import EditPlan
from data.images import MULTIPLE, decode_image, fit, has_transparency, kept_box
from data.reference_size import Size, area_size, clipped_area_size

CATEGORIES = ("recolor", "replace", "transform", "add", "remove", "background", "move", "text", "other")
MAX_REFERENCES = 3
MAX_RATIO = 16  # of a reference's longer side to its shorter: so every area from MIN_AREA on gives both sides pixels
MIN_AREA = 8192  # pixels, at which an encoder may see a reference
_MAX_PLAN = 4000  # characters of a plan's text: the planner learns it token by token
_MARK = "<|"  # how the chat template's own tokens begin
MASK = "mask"
_WHITE = 128  # of 255, from which on a mask's pixel counts as white


@dataclass(frozen=True)
class EditMeta:
    """What the .json of an edit says."""

    num_references: int
    plan_text: str | None


@dataclass(frozen=True, eq=False)
class ReferencePicture:
    """A reference as the two encoders see it, uint8 (3, H, W) each."""

    vae: Tensor
    condition: Tensor


def parse_edit(extension: str, data: bytes) -> EditMeta | None:
    """Return what a sample's .json says of an edit, None if it is none.

    Raises: ValueError for a number of references that cannot be, or an action list that breaks the schema.
    """
    if extension != "json" or '"references"' not in (text := decode_text(data)):  # most are none: no second parse
        return None
    content = json.loads(text)
    if not isinstance(content, dict) or "references" not in content:
        return None
    count = content["references"]
    if type(count) is not int or not 0 <= count <= MAX_REFERENCES:
        raise ValueError(f"its .json says {count!r} references; an edit has 0 to {MAX_REFERENCES}")
    actions = content.get("actions")
    return EditMeta(count, None if actions is None else checked_plan(actions))


def checked_plan(actions: object) -> str:
    """Return the text of an action list as JSON gives it.

    Raises: ValueError if it breaks the schema, is too long to be learned, or holds a mark of the chat template.
    """
    plan_text = EditPlan.from_json(actions).to_text()
    if _MARK in plan_text or len(plan_text) > _MAX_PLAN:
        raise ValueError(
            f"its action list has {len(plan_text)} characters of at most {_MAX_PLAN}, and must not hold {_MARK!r}: "
            f"{plan_text[:80]}"
        )
    return plan_text


def reference_members(members: Mapping[str, object], extensions: Iterable[str], count: int) -> list[str]:
    """Return the extensions under which an edit's references lie, in order.

    Raises: ValueError if there are not exactly `count`, or one lies there twice.
    """
    extensions = list(extensions)
    found = []
    for number in range(count):
        here = [name for e in extensions if (name := f"ref{number}.{e}") in members]
        if len(here) != 1:
            there = " and ".join(here) if here else f"no ref{number}"
            raise ValueError(f"its .json says {count} references, but there is {there}")
        found += here
    if extra := [name for name in members if name.startswith("ref") and name not in found]:
        raise ValueError(f"its .json says {count} references, but there is {extra[0]} as well")
    return found


def mask_member(members: Mapping[str, object], extensions: Iterable[str]) -> str | None:
    """Return the extension under which an edit's mask lies, or None.

    Raises: ValueError if it is no picture's, or there are two.
    """
    found = [name for name in members if name.partition(".")[0] == MASK]
    if len(found) > 1 or found and found[0] not in [f"{MASK}.{e}" for e in extensions]:
        raise ValueError(f"its mask must be one picture, there is {' and '.join(found)}")
    return found[0] if found else None


def num_reference_tokens(sizes: Iterable[Size]) -> int:
    """Return how many image tokens references of these sizes in pixels become."""
    return sum((height // MULTIPLE) * (width // MULTIPLE) for height, width in sizes)


def decode_reference(
    data: bytes, vae_area: int, condition_area: int, target: Size | None = None, trained: Size | None = None
) -> ReferencePicture:
    """Decode a reference and scale it for both encoders.

    target, trained: size of the edit's target, and the size that it is cut to.  Of a reference of the target's own size
    the VAE sees what is left of the target, so that both still lie on each other.  The planner sees it whole: that is
    what the boxes of a plan are about.
    Raises: ValueError if it is no picture, or too thin.
    """
    image = decode_image(data)
    size = image.height, image.width
    box = kept_box(*target, trained) if size == target else None
    vae, condition = (area_size(*size, area) for area in (vae_area, condition_area))
    return ReferencePicture(_resized(image, vae, box), _resized(image, condition))


def scaled_reference(pixels: Tensor, vae_area: int, condition_area: int) -> ReferencePicture:
    """Scale a picture, uint8 (3, H, W), for both encoders, as a reference to itself; too thin a one is squashed."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    sizes = [clipped_area_size(image.height, image.width, area) for area in (vae_area, condition_area)]
    return ReferencePicture(*(_resized(image, size) for size in sizes))


def _resized(image: Image.Image, size: Size, box: tuple[float, float, float, float] | None = None) -> Tensor:
    """Return a picture, or what `box` = (left, top, right, bottom) holds of it, at a size, uint8 (3, H, W)."""
    height, width = size
    if image.size != (width, height) or box not in (None, (0, 0, *image.size)):
        image = image.resize((width, height), Image.Resampling.LANCZOS, box)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def decode_mask(data: bytes, target: Size, trained: Size) -> Tensor:
    """Decode a mask of a target's size and cut it as the target is: bool (H, W), True inside the region.

    Raises: ValueError as `read_mask` does.
    """
    return torch.from_numpy(is_white(fit(read_mask(data, target), trained)))


def read_mask(data: bytes, target: Size, what: str = "target") -> Image.Image:
    """Decode a mask of a target's size; what: the target's name in errors.

    Raises: ValueError if it is no picture, of another size, partly transparent, or nowhere white.
    """
    image = decode_image(data)
    if (image.height, image.width) != target:
        raise ValueError(
            f"its mask is {image.width} pixels wide and {image.height} high, its {what} {target[1]} and {target[0]}"
        )
    if has_transparency(data) and decode_image(data, background=(0, 0, 0)) != image:
        raise ValueError("its mask is transparent in part; save it opaque, white where the edit may change something")
    if not is_white(image).any():
        lightest = np.asarray(image.convert("L")).max()
        raise ValueError(
            f"its mask is nowhere white: its lightest pixel is {lightest} of 255; leave out a mask that says nothing"
        )
    return image


def is_white(mask: Image.Image) -> np.ndarray:
    """Return where a mask counts as white, bool (H, W)."""
    return np.array(mask.convert("L")) >= _WHITE


def category_row(category: str) -> int:
    """Return the place of a category in CATEGORIES; an unknown one is "other"."""
    return CATEGORIES.index(category if category in CATEGORIES else "other")


def token_weights(mask: Tensor | None, grid: tuple[int, int, int], inside: float) -> Tensor:
    """Return the weight of each of a target's tokens in its loss, (tokens,) float32: `inside` where a mask has pixels.

    mask: bool (H, W), or None for 1 everywhere; grid: the target's (frames, rows, columns) of tokens.
    """
    _, rows, columns = grid
    if mask is None:
        return torch.ones(rows * columns)
    touched = mask.view(rows, MULTIPLE, columns, MULTIPLE).any(dim=3).any(dim=1).flatten()
    return torch.where(touched, inside, 1.0)


def check_edit_values(config) -> None:
    """Raise ValueError for what a run's configuration says of edits and no later check would explain."""
    for name in ("normalize", "instruction_dropout", "caption_dropout", "zh_share"):
        if not 0.0 <= getattr(config, name, 0.0) <= 1.0:
            raise ValueError(f"--{name} is a probability, got {getattr(config, name)}")
    for name in ("reference_pixels", "condition_pixels"):
        if getattr(config, name) < MIN_AREA:
            raise ValueError(f"--{name} is an area in pixels, at least {MIN_AREA}, got {getattr(config, name)}")
    if not 0.0 < config.region_weight < math.inf:
        raise ValueError(f"--region_weight must be above 0, got {config.region_weight}")
    if getattr(config, "zero", False) and config.optimizer != "adamw":
        raise ValueError("--zero shares out AdamW's state: add --optimizer adamw")
    if config.lora_base != "auto" and not config.lora_rank:
        raise ValueError(f"--lora_base {config.lora_base} is of what lies under adapters; add --lora_rank")
    if getattr(config, "train", "") == "planner" and (config.instruction_dropout == 1.0 or not config.plan_weight):
        raise ValueError(
            "--train planner learns nothing with --plan_weight 0 or --instruction_dropout 1, which drops every answer"
        )
    if config.lora_rank and "renderer" not in getattr(config, "train", "renderer"):
        raise ValueError("--lora_rank is for the renderer, and --train leaves it out")


def parse_shares(shares: Iterable[str], flag: str = "--shares", example: str = "remove=2") -> dict[str, float] | None:
    """Return {name: share} of texts like "remove=2"; None without any.

    flag, example: for the message.  Raises: ValueError for anything else.
    """
    found = {}
    for text in shares:
        category, separator, number = (part.strip() for part in text.partition("="))
        try:
            share = float(number)
        except ValueError:
            separator = ""
        if not separator or not 0 <= share < math.inf:
            raise ValueError(f"{flag} takes name=number with numbers from 0 on, such as {example}, got {text!r}")
        if category in found:
            raise ValueError(f"{flag} names {category!r} twice, with {found[category]:g} and {share:g}; name it once")
        found[category] = share
    return found or None
