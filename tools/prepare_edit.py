"""From an edit's cells in a row to what its sample holds besides target and instruction, or the reason against it."""

import json
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data.aspect import Placement, cut
from data.edit import MAX_RATIO, MAX_REFERENCES, checked_plan, is_white, read_mask
from data.edit_plan import BOX_SIDE
from data.edit_row import Cell, EditCells
from data.images import decode_image
from data.picture_bytes import read_picture_bytes
from data.reference_size import Size
from tools.prepare_picture import encode, original

# Why an edit is left out, and how that is said.
EDIT_REASONS = {
    "too_many_references": f"more than {MAX_REFERENCES} references",
    "bad_reference": "a reference that cannot be used",
    "reference_size": "a reference of another size than stated",
    "bad_mask": "a mask that does not fit",
    "bad_actions": "actions that break the schema",
    "encoded_edit": "edits, which are read as pictures: prepare them without --encode",
}


class EditError(ValueError):
    """An edit that cannot be used; `reason` is one of EDIT_REASONS."""

    def __init__(self, reason: str, detail: object):
        super().__init__(str(detail))
        self.reason = reason


@dataclass(frozen=True)
class Edit:
    """A checked edit, at its original sizes."""

    references: list[tuple[bytes, Image.Image]]  # file and picture, RGB
    mask: Image.Image | None  # mode L, 0 and 255, of the target's size
    actions: list[dict] | None

    @property
    def content(self) -> bytes:
        """All of it, for a checksum."""
        mask = b"" if self.mask is None else self.mask.tobytes()
        return b"\0".join([*(file for file, _ in self.references), mask, json.dumps(self.actions).encode()])

    def meta(self, placement: Placement, target: Size) -> dict:
        """Return what the .json of one size says of it.

        The boxes are of the first reference as it is stored; without one, of the target.
        Raises: EditError if an action's box or all that a mask shows is cut off.
        """
        meta: dict = {"references": len(self.references)}
        if self.mask is not None and not is_white(cut(self.mask, placement)).any():
            height, width = placement.size
            raise EditError("bad_mask", f"nothing of its white is left at {width} x {height} pixels")
        if self.actions is not None:
            is_cut = not self.references or _size(self.references[0][1]) == target
            meta["actions"] = [_moved(action, placement) if is_cut else action for action in self.actions]
        return meta

    def members(self, placement: Placement, target: Size, kind: str, quality: int) -> dict[str, bytes]:
        """Return the pictures of one size as {extension: content}.

        A reference of the target's own size is cut as the target is, so that they still lie on each other; another is
        scaled to the same area, its ratio kept, never enlarged.
        """
        members = {}
        for number, (file, image) in enumerate(self.references):
            stored = cut(image, placement) if _size(image) == target else _shrunk(image, placement.area**2)
            extension, content = original(file, stored) or (kind, encode(stored, kind, quality))
            members[f"ref{number}.{extension}"] = content
        if self.mask is not None:
            fitted = is_white(cut(self.mask, placement))
            members["mask.png"] = encode(Image.fromarray(fitted.astype(np.uint8) * 255), "png", quality)
        return members


def make_edit(cells: EditCells, target: Size) -> Edit:
    """Read and check an edit whose target has (height, width) pixels as shown.  Raises: EditError."""
    if len(cells.references) > MAX_REFERENCES:
        raise EditError("too_many_references", f"it has {len(cells.references)} references, at most {MAX_REFERENCES}")
    try:
        actions = None if cells.actions is None else json.loads(checked_plan(cells.actions))
    except ValueError as error:
        raise EditError("bad_actions", error) from error
    references = []
    for number, (cell, stated) in enumerate(zip(cells.references, cells.sizes, strict=True), 1):
        try:
            file, image = _read(cell)
            if max(image.size) > MAX_RATIO * min(image.size):
                raise ValueError(f"it has {image.width} x {image.height} pixels, and is thinner than {MAX_RATIO}:1")
        except (OSError, ValueError) as error:
            raise EditError("bad_reference", f"reference {number}: {error}") from error
        if stated is not None and _size(image) != stated:
            raise EditError(
                "reference_size",
                f"reference {number} has {image.width} x {image.height} pixels, the row says {stated[1]} x {stated[0]}",
            )
        references.append((file, image))
    return Edit(references, None if cells.mask is None else _read_mask(cells.mask, target), actions)


def _read(cell: Cell) -> tuple[bytes, Image.Image]:
    return (file := _content(cell)), decode_image(file)


def _content(cell: Cell) -> bytes:
    return cell if isinstance(cell, bytes) else read_picture_bytes(cell)


def _read_mask(cell: Cell, target: Size) -> Image.Image:
    try:
        image = read_mask(_content(cell), target)
    except (OSError, ValueError) as error:
        raise EditError("bad_mask", error) from error
    return Image.fromarray(is_white(image).astype(np.uint8) * 255)


def _size(image: Image.Image) -> Size:
    return image.height, image.width


def _shrunk(image: Image.Image, num_pixels: int) -> Image.Image:
    scale = math.sqrt(num_pixels / (image.width * image.height))
    if scale >= 1:
        return image
    size = [max(1, round(side * scale)) for side in image.size]
    return image.resize(size, Image.Resampling.LANCZOS)


def _moved(action: dict, placement: Placement) -> dict:
    """Return an action with its box as it lies in a picture that was cut."""
    if "bbox" not in action:
        return action
    (top, left), (height, width), (full_height, full_width) = placement.corner, placement.size, placement.scaled
    box = []
    for value, full, start, side in zip(
        action["bbox"], (full_width, full_height) * 2, (left, top) * 2, (width, height) * 2, strict=True
    ):
        moved = (value * full / BOX_SIDE - start) * BOX_SIDE / side
        box.append(round(min(max(moved, 0), BOX_SIDE)))
    if box[0] >= box[2] or box[1] >= box[3]:
        raise EditError("bad_actions", f"the box {action['bbox']} lies in what is cropped off the picture")
    return action | {"bbox": box}
