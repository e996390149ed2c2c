"""The plan of an edit: a list of actions on the first reference, as data and as the text that the planner learns."""

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

ACTIONS = ("remove", "insert", "replace", "recolor", "transform", "add_text", "move", "background")
BOX_SIDE = 1000  # boxes are in thousandths of the first reference's sides


def _check_box(box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    x1, y1, x2, y2 = box
    if not (0 <= x1 < x2 <= BOX_SIDE and 0 <= y1 < y2 <= BOX_SIDE):
        raise ValueError(f"needs 0 <= x1 < x2 <= {BOX_SIDE} and 0 <= y1 < y2 <= {BOX_SIDE}, got {list(box)}")
    return box


Box = Annotated[tuple[int, int, int, int], AfterValidator(_check_box)]  # x1, y1, x2, y2
Text = Annotated[str, Field(min_length=1)]


class Action(BaseModel):
    """One thing to do."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    action: Literal[ACTIONS]
    target: Text | None = None  # what is in the picture
    bbox: Annotated[Box | None, Field(strict=False)] = None  # where it is, or is to be
    object: Text | None = None  # what comes instead, or in addition
    content: Text | None = None  # a text to be written
    style: Text | None = None  # a colour, a look
    position: Text | None = None  # where something goes, in words


class EditPlan(BaseModel):
    """What is to be done, in order; at least one action."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    actions: Annotated[tuple[Action, ...], Field(min_length=1)]

    @classmethod
    def from_json(cls, value: object) -> "EditPlan":
        """Take a list of actions as JSON gives it.  Raises: ValueError that names action, field and fault."""
        if not isinstance(value, list):
            raise ValueError(f"an action list must be a list, got {type(value).__name__}")
        try:
            return cls.model_validate({"actions": value})
        except ValidationError as error:
            raise ValueError(_explain(error)) from error

    def changed_boxes(self) -> list[Box] | None:
        """Return the boxes outside of which nothing changes; None if an action may change more than a box says.

        Such actions have no box, or are about the background, or move something to where no box lies.
        """
        ways = {"background", "move"}
        boxes = [None if action.action in ways else action.bbox for action in self.actions]
        return None if None in boxes else boxes

    def to_text(self) -> str:
        """Return the one text of this plan: fields in order, no spaces, nothing that is not set."""
        actions = [action.model_dump(mode="json", exclude_none=True) for action in self.actions]
        return json.dumps(actions, ensure_ascii=False, separators=(",", ":"))


def parse_plan(text: str) -> EditPlan:
    """Read what a planner wrote.  Raises: ValueError if it is no JSON or no action list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the plan is no JSON: {error}: {text[:80]!r}") from error
    return EditPlan.from_json(value)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    _, *place = first["loc"]
    where = f"action {place[0] + 1}, {'.'.join(map(str, place[1:])) or 'the whole'}" if place else "the list"
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}, got {str(first['input'])[:60]!r}{others}"
