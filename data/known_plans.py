"""Whether samples have what a planner is to learn."""

import logging

from data.edit import parse_edit
from data.reader import Reader
from utils.console import ONCE

log = logging.getLogger("train")
_NUM_LOOKED_AT = 64  # edits all over the index; the first one with a plan is enough


def check_plans(reader: Reader, trains_planner: bool, learns_otherwise: bool) -> None:
    """Look for action lists in the edits that a planner is to learn them from.

    learns_otherwise: the planner, from the renderer's loss; then none is worth a warning only.
    Raises: ValueError if none is found and the planner would learn nothing.
    """
    index, num_without = reader.index, 0
    for i in index.spread(_NUM_LOOKED_AT, edits_only=True) if trains_planner else ():
        try:
            edit = parse_edit(index[i].meta_extension, reader.read_meta(i))
        except (ValueError, OSError):  # damaged, or its shard cannot be reached: found and counted when its turn comes
            continue
        if edit is not None and edit.plan_text is not None:
            return
        num_without += 1
    if not num_without:
        return
    found = f'none of {num_without} edits looked at has a plan ("actions" in its .json)'
    if not learns_otherwise:
        raise ValueError(f"{found}, so the planner learns nothing; add plans, or give --train renderer")
    log.warning("%s: the planner learns from the renderer's loss alone", found, extra=ONCE)
