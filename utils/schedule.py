"""The learning rate as a pure function of the step."""

import math

SCHEDULES = ("cosine", "constant", "wsd")
_WSD_DECAY = 0.3  # share of the run; "wsd" is of MiniCPM, arXiv 2404.06395, whose long runs decay over a tenth


def learning_rate(
    step: int, peak: float, num_steps: int, warmup_steps: int, schedule: str = "cosine", final_share: float = 0.0
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Linear warm-up over `warmup_steps`, then constant; or a cosine that ends at `final_share * peak`; or, as "wsd"
    (warm-up, stable, decay), constant until the last 30 % of the run, then linear to `final_share * peak`.
    Raises: ValueError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"--lr_schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        left = min(1.0, max(0.0, (num_steps - step) / (_WSD_DECAY * num_steps)))
        return peak * (final_share + (1 - final_share) * left)
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return peak * (final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * progress)))
