"""What a row of an input to tools.prepare says of an edit, as it was found: nothing of it is checked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from data.picture_bytes import beside
from data.reference_size import Size

REFERENCES, TARGET = "references", "target"  # a table with both columns holds edits
EDIT_COLUMNS = (REFERENCES, "reference_sizes", "mask", "actions")
Cell = bytes | str  # a picture's content, or its path or URL


@dataclass(frozen=True)
class EditCells:
    """References, mask and actions of a row; the target is its picture, the instruction its caption."""

    references: tuple[Cell, ...] = ()
    sizes: tuple[Size | None, ...] = ()  # (height, width) in pixels that the row states for each reference
    mask: Cell | None = None
    actions: object = None  # as JSON gives it


def edit_cells(record: dict, location: str) -> EditCells:
    """Take an edit from a record of the table at `location`.

    references: a list, or one as JSON text, of paths, URLs, bytes, or objects with "path", "url" or "bytes" and, where
    stated, "width" and "height"; [] for none.  reference_sizes: a list of [width, height] instead.
    Raises: ValueError if references or sizes are not of this kind, or a text is no JSON.
    """
    if record.get(REFERENCES) is None:
        raise ValueError(f'it has no "{REFERENCES}", a list of pictures; [] where there is none')
    entries = _from_text(record[REFERENCES], REFERENCES)
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise ValueError(f"its references must be a list of pictures, [] for none, got {str(entries)[:60]!r}")
    pictures = [_picture(entry, location, f"reference {n}") for n, entry in enumerate(entries, 1)]
    sizes = [_size(entry.get("width"), entry.get("height")) if isinstance(entry, dict) else None for entry in entries]
    if (stated := _from_text(record.get("reference_sizes"), "reference_sizes")) is not None:
        if not isinstance(stated, Sequence) or len(stated) != len(pictures):
            raise ValueError(
                f"its reference_sizes must be {len(pictures)} of [width, height], got {str(stated)[:60]!r}"
            )
        sizes = [
            _size(*size) if isinstance(size, Sequence) and len(size) == 2 else _size(size, None) for size in stated
        ]
    mask = record.get("mask")
    mask = None if mask in (None, "", b"") else _picture(mask, location, "mask")
    return EditCells(tuple(pictures), tuple(sizes), mask, _from_text(record.get("actions"), "actions"))


def _from_text(cell: object, name: str) -> object:
    """Return a cell; if it is text, what it says as JSON, None if it is empty."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell) if cell.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {name} are text that is no list in JSON: {error}: {cell[:60]!r}") from error


def _picture(cell: object, location: str, name: str) -> Cell:
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path") or cell.get("url")
    if isinstance(cell, str) and cell.strip():
        return beside(location, cell.strip())
    if isinstance(cell, bytes) and cell:
        return cell
    raise ValueError(f"its {name} is empty or neither bytes nor text")


def _size(width: object, height: object) -> Size | None:
    """Return (height, width), None if neither is stated."""
    if width is None and height is None:
        return None
    if any(type(side) is not int or side < 1 for side in (width, height)):
        raise ValueError(f"a reference's size must be a width and a height in pixels, got {width!r} and {height!r}")
    return height, width
