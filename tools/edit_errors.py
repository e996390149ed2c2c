"""How far an edited picture is from what it should be, inside the edited region and outside."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EditErrors:
    """Mean absolute errors of a picture, in steps of 255; None where a region has no pixel."""

    inside: float | None
    outside: float | None


def edit_errors(picture: np.ndarray, target: np.ndarray, region: np.ndarray) -> EditErrors:
    """Compare a picture with its target; both uint8 (H, W, 3), region: bool (H, W), True where the edit is.

    Raises: ValueError if their sizes differ.
    """
    if picture.shape != target.shape or region.shape != target.shape[:2]:
        raise ValueError(
            f"pictures of {picture.shape} and {target.shape} cannot be compared in a {region.shape} region"
        )
    error = np.abs(picture.astype(np.float64) - target).mean(axis=2)
    return EditErrors(*(float(error[part].mean()) if part.any() else None for part in (region, ~region)))


def mean_errors(errors: list[EditErrors]) -> EditErrors:
    """Return the means over pictures, each picture counting alike; None where none has a pixel."""
    means = []
    for part in ("inside", "outside"):
        values = [value for each in errors if (value := getattr(each, part)) is not None]
        means.append(sum(values) / len(values) if values else None)
    return EditErrors(*means)
