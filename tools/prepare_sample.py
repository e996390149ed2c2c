"""From a row of an input to a sample of a shard, or to the reason why there is none."""

import base64
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data.aspect import Placement, TooExtremeError, TooSmallError, cut, placements
from data.captions import Wording, parse_wordings
from data.images import decode_image
from data.picture_bytes import read_picture_bytes
from data.picture_hash import picture_hash
from data.row import Row
from tools.prepare_edit import EDIT_REASONS, Edit, EditError, make_edit
from tools.prepare_picture import encode, original

# Why a row is left out, and how that is said.
REASONS = {
    "bad_row": "the row cannot be read",
    "empty_caption": "no caption",
    "refused_caption": "the caption cannot be read",
    "unreachable": "the file cannot be read",
    "undecodable": "no readable picture",
    "too_small": "too small",
    "too_extreme": "too extreme an aspect ratio",
    **EDIT_REASONS,
    "same_file": "the same file again",
    "same_picture": "the same picture again",
}
_KEY_DIGITS = 10


@dataclass(frozen=True)
class Recipe:
    """What decides how a row becomes a sample."""

    areas: tuple[int, ...]
    every_area: bool  # a sample for every area that the picture fills, not only for the largest
    max_crop: float
    max_enlargement: float
    format: str  # of tools.prepare_picture.FORMATS
    quality: int
    defaults: dict[str, str]  # category, source, license of rows that have none
    encodes: bool = False  # samples are written as latents and text states, which edits are not


@dataclass(frozen=True)
class Reject:
    """A row that is left out."""

    number: int
    origin: str
    reason: str  # of REASONS
    detail: str


@dataclass(frozen=True)
class FittedPicture:
    """A picture at one size."""

    image: Image.Image  # RGB
    placement: Placement
    file: tuple[str, bytes] | None  # (extension, content) of the original, if it shows exactly these pixels


@dataclass(frozen=True)
class Sample:
    """A row that is kept, before it is written."""

    number: int
    origin: str
    size: tuple[int, int]  # of the picture as shown, (height, width) in pixels
    pictures: list[FittedPicture]  # the largest first
    wordings: list[Wording]  # sorted by language
    meta: dict  # of the sample's .json, without what is particular to a size
    hash: np.ndarray  # (3,) uint64, of the whole picture; of an edit of all its bytes: only the same one is alike
    digest: bytes  # of the file; of an edit of all its bytes
    edit: Edit | None = None  # None = text-to-image

    @property
    def captions(self) -> dict[str, list[str]]:
        """The texts by language, in the order of the .json member."""
        captions: dict[str, list[str]] = {}
        for wording in self.wordings:
            captions.setdefault(wording.language, []).append(wording.text)
        return captions

    def key(self, picture: FittedPicture) -> str:
        """Return the key of the sample that this picture becomes."""
        key = f"{self.number:0{_KEY_DIGITS}d}"
        return key if len(self.pictures) == 1 else f"{key}-{picture.placement.area}"

    def meta_of(self, picture: FittedPicture) -> bytes:
        """Return the .json member of one size; crop_box is (left, top, right, bottom) in the scaled picture."""
        top, left = picture.placement.corner
        height, width = picture.placement.size
        sizes = {
            "original_size": list(self.size),
            "scaled_size": list(picture.placement.scaled),
            "crop_box": [left, top, left + width, top + height],
        }
        edit = {} if self.edit is None else self.edit.meta(picture.placement, self.size)
        return json.dumps(self.meta | edit | sizes, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")


# What a sample is written as: [(key, {extension: content})].
Members = list[tuple[str, dict[str, bytes]]]
MemberWriter = Callable[[Sample, Recipe], Members]


def row_of_key(key: str) -> int:
    """Return the number of the row that a key was made from."""
    return int(key[:_KEY_DIGITS])


def make_sample(number: int, row: Row, recipe: Recipe) -> Sample | Reject:
    """Read, check and fit one row.  Cheap checks come first."""

    def reject(reason: str, detail: object) -> Reject:
        return Reject(number, row.origin, reason, str(detail))

    if row.problem:
        return reject("bad_row", row.problem)
    if row.edit is not None and recipe.encodes:
        return reject("encoded_edit", "its row has references")
    if row.caption is None:
        return reject("empty_caption", "there is no .json or .txt with its name")
    try:
        wordings, group = parse_wordings(*row.caption)
    except ValueError as error:
        return reject("empty_caption" if "no caption" in str(error) else "refused_caption", error)
    try:
        content = row.picture if isinstance(row.picture, bytes) else read_picture_bytes(row.picture)
    except (OSError, ValueError) as error:
        return reject("unreachable", error)
    try:
        image = decode_image(content)
    except ValueError as error:
        return reject("undecodable", error)
    size = image.height, image.width
    try:
        placed = placements(*size, recipe.areas, recipe.max_crop, recipe.max_enlargement)
    except TooSmallError as error:
        return reject("too_small", error)
    except TooExtremeError as error:
        return reject("too_extreme", error)
    pictures = [
        FittedPicture(cut(image, placement), placement, _file(content, image, placement))
        for placement in placed[: None if recipe.every_area else 1]
    ]
    named = {name: str(value) for name, value in row.fields.items() if name in recipe.defaults}
    facts = recipe.defaults | ({"category": group} if group else {}) | named
    meta = {
        "captions": _captions(wordings),
        **{name: value for name, value in facts.items() if value},
        "origin": row.origin,
    }
    meta |= {name: value for name, value in row.fields.items() if name not in meta}
    if row.edit is None:
        digest = hashlib.sha256(content).digest()[:16]
        return Sample(number, row.origin, size, pictures, wordings, meta, picture_hash(image), digest)
    try:
        edit = make_edit(row.edit, size)
        for picture in pictures:
            edit.meta(picture.placement, size)  # may find a box cut off
    except EditError as error:
        return reject(error.reason, error)
    # Of the same target there may be many edits, and a small edit of a picture looks like another of it.
    digest = hashlib.sha256(b"\0".join([content, edit.content, json.dumps(meta["captions"]).encode()])).digest()
    hash_ = np.frombuffer(digest[:24], np.uint64)
    return Sample(number, row.origin, size, pictures, wordings, meta, hash_, digest[:16], edit)


def raw_members(sample: Sample, recipe: Recipe) -> Members:
    """Write each size as a picture file and a .json; the original file where it shows the same pixels."""
    members = []
    for picture in sample.pictures:
        extension, content = picture.file or (recipe.format, encode(picture.image, recipe.format, recipe.quality))
        others = {}
        if sample.edit is not None:
            others = sample.edit.members(picture.placement, sample.size, recipe.format, recipe.quality)
        members.append((sample.key(picture), {extension: content, "json": sample.meta_of(picture)} | others))
    return members


def thumbnail(image: Image.Image, side: int = 112) -> str:
    """Return a small JPEG of a picture as a data URL."""
    scale = side / max(image.size)
    small = image.resize([max(1, round(length * scale)) for length in image.size], Image.Resampling.BOX)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _captions(wordings: list[Wording]) -> dict[str, list]:
    """Return {language: [text, or {text, weight} where the weight is not 1]}, which `parse_wordings` reads back."""
    captions: dict[str, list] = {}
    for wording in wordings:
        entry = wording.text if wording.weight == 1 else {"text": wording.text, "weight": wording.weight}
        captions.setdefault(wording.language, []).append(entry)
    return captions


def _file(content: bytes, image: Image.Image, placement: Placement) -> tuple[str, bytes] | None:
    """Return the file as (extension, content) if it can be stored as it is."""
    return original(content, image) if placement.size == placement.scaled == (image.height, image.width) else None
