"""One row of an input to tools.prepare: a picture or where it lies, its caption, and what else is known of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from data.captions import decode_text, language_of
from data.edit_row import EDIT_COLUMNS, REFERENCES, TARGET, EditCells

# Tried in this order if no column is named.
PICTURE_COLUMNS = ("image", "picture", "file_name", "filename", "image_path", "path", "image_url", "url", "jpg", "png")
CAPTION_COLUMNS = ("captions", "caption", "text", "prompt")
INSTRUCTION_COLUMNS = ("instructions", "instruction")  # of edits, before the others


@dataclass(frozen=True)
class Columns:
    """Where a table has what; empty = by name.  Of a sample's .json the same, without picture and captions."""

    picture: str = ""
    captions: tuple[str, ...] = ()  # each COLUMN or LANGUAGE:COLUMN
    category: str = "category"
    source: str = "source"
    license: str = "license"
    keep: tuple[str, ...] = ()  # taken over under their own names


@dataclass(frozen=True)
class Row:
    """A row as it was found; nothing of it is checked."""

    origin: str  # file and place in it, for people
    picture: bytes | str | None = None  # content, or a path or URL
    caption: tuple[str, bytes] | None = None  # (extension, content) as `parse_captions` takes them
    fields: dict[str, object] = field(default_factory=dict)  # category, source, license and the kept columns
    problem: str = ""  # why the row itself cannot be read
    edit: EditCells | None = None  # None = text-to-image


@dataclass(frozen=True)
class ColumnChoice:
    """The columns of one table."""

    picture: str
    captions: tuple[tuple[str | None, str], ...]  # (language or None, column)
    has_edits: bool = False
    has_lone_references: bool = False  # a column of that name, and none of targets

    @property
    def names(self) -> list[str]:
        """Every column that is read for picture, captions and edit."""
        edit = EDIT_COLUMNS if self.has_edits else (REFERENCES,) if self.has_lone_references else ()
        return [self.picture, *(column for _, column in self.captions), *edit]


def choose_columns(available: Sequence[str], columns: Columns, location: str) -> ColumnChoice:
    """Find a table's columns for picture and captions.

    Raises: ValueError that lists the columns there are if one is missing.
    """

    def refuse(what: str, flag: str) -> ValueError:
        return ValueError(f"{location} has no column {what}; it has {', '.join(available)}; name one with {flag}")

    if columns.picture and columns.picture not in available:
        raise refuse(repr(columns.picture), "--picture_column")
    has_edits = REFERENCES in available and TARGET in available
    picture_names = (TARGET, *PICTURE_COLUMNS) if has_edits else PICTURE_COLUMNS
    caption_names = (*INSTRUCTION_COLUMNS, *CAPTION_COLUMNS) if has_edits else CAPTION_COLUMNS
    picture = columns.picture or next((name for name in picture_names if name in available), None)
    if picture is None:
        raise refuse("for pictures", "--picture_column")
    captions: list[tuple[str | None, str]] = []
    for name in columns.captions:
        language, separator, column = name.rpartition(":")
        if name in available:
            language, separator, column = "", "", name
        if column not in available:
            raise refuse(repr(column), "--caption_columns")
        captions.append((language if separator else None, column))
    if not columns.captions:
        captions += [(None, name) for name in caption_names if name in available][:1]
        labelled = ((label, f"{name}_{label}") for label in ("zh", "en") for name in caption_names)
        captions += [(label, name) for label, name in labelled if name in available]
    if not captions:
        raise refuse("for captions", "--caption_columns")
    return ColumnChoice(picture, tuple(captions), has_edits, REFERENCES in available and not has_edits)


def lone_references(record: dict) -> str:
    """Return what is wrong with a row that lists references and has no target; "" if its references are no list."""
    cell = record.get(REFERENCES)
    if not isinstance(cell, list) and not (isinstance(cell, str) and cell.lstrip().startswith("[")):
        return ""
    return f"it lists {REFERENCES} but has no {TARGET!r}, and an edit needs both; rename the column of its result"


def caption_member(cells: Sequence[tuple[str | None, object]]) -> tuple[str, bytes]:
    """Return cells, each with its language or None, as a sample's .json member.

    One cell without a language goes in as it is, be it text, a list or an object by language.
    """
    if len(cells) == 1 and cells[0][0] is None:
        captions = cells[0][1]
    else:
        captions = {}
        for label, cell in cells:
            for wording in cell if isinstance(cell, list) else [cell]:
                text, own = wording, None
                if isinstance(wording, dict):
                    text, own = wording.get("text"), wording.get("language")
                if isinstance(text, str):
                    captions.setdefault(label or own or language_of(text), []).append(wording)
    # Escaped: half a surrogate pair, which a cut escape leaves, has no UTF-8, and would make all of it unreadable.
    return "json", json.dumps({"captions": captions}, default=str).encode()


def fields_of(record: dict, columns: Columns) -> dict[str, object]:
    """Return category, source, license and the kept columns of a record, where it has them."""
    named = {"category": columns.category, "source": columns.source, "license": columns.license}
    named |= {name: name for name in columns.keep}
    return {
        name: value
        for name, column in named.items()
        if (value := record.get(column)) not in (None, "") and not isinstance(value, bytes)
    }


def fields_of_json(content: bytes, columns: Columns) -> dict[str, object]:
    """Return the same of a .json member; nothing if it is not an object."""
    return fields_of(_object(content), columns)


def edit_of_json(content: bytes) -> tuple[object, object] | None:
    """Return "references" and "actions" of a .json member; None if it says nothing of references."""
    record = _object(content)
    return (record[REFERENCES], record.get("actions")) if REFERENCES in record else None


def _object(content: bytes) -> dict:
    try:
        record = json.loads(decode_text(content))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
