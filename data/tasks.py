"""What a run trains its samples for: text-to-image, edits, and pictures that are to be drawn again as they are.

A reconstruction is an edit made of any picture: the picture is reference and target, the instruction a fixed one.  It
teaches that what nobody asks to change stays.
"""

T2I, EDIT, RECONSTRUCTION = TASKS = ("t2i", "edit", "reconstruction")
MIXED = "mixed"
_INSTRUCTIONS = {"zh": "请保持图片不变。", "en": "Keep the picture as it is."}
DEFAULT_SHARES = {T2I: 5.0, EDIT: 4.0, RECONSTRUCTION: 1.0}


def own_task(is_edit: bool) -> str:
    """Return the task that a sample is of by what it holds."""
    return EDIT if is_edit else T2I


def keeping_instruction(language: str) -> str:
    """Return what a reconstruction is told, in the language of the sample's caption: Chinese, else English."""
    return _INSTRUCTIONS.get(language, _INSTRUCTIONS["en"])
