"""The validation loss: at fixed times, the same for every model and on every cluster."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from data.captions import LANGUAGE_ROWS
from data.plan import PlannedSample
from parallel.distributed import all_reduce_sum

# (samples of a micro-batch, stratum of the time) → losses, weights, rows of LANGUAGE_ROWS; (B,) each
StratumLosses = Callable[[list[PlannedSample], int], tuple[Tensor, Tensor, Tensor]]


@torch.no_grad()
def validation_losses(
    losses_of: StratumLosses, micro_batches: Iterable[list[PlannedSample]], num_strata: int, device: torch.device
) -> dict[str, float]:
    """Return the mean loss at `num_strata` equally likely times: in all, by language, by time.  All ranks call it."""
    sums, counts = torch.zeros(2, len(LANGUAGE_ROWS), num_strata, dtype=torch.float64)
    for stratum in range(num_strata):
        for planned in micro_batches:
            losses, weight, language = losses_of(planned, stratum)
            sums[:, stratum].index_add_(0, language.cpu(), (losses * weight).double().cpu())
            counts[:, stratum].index_add_(0, language.cpu(), weight.double().cpu())
    # Peers along cp and tp count everything again, above and below the line alike.
    totals = torch.tensor(all_reduce_sum(torch.stack((sums, counts)).flatten().tolist(), device))
    sums, counts = totals.view(2, len(LANGUAGE_ROWS), num_strata)
    by_language = zip(LANGUAGE_ROWS, sums, counts, strict=True)
    result = {"val_loss": sums.sum() / counts.sum()}
    result |= {f"val_loss_{name}": s.sum() / n.sum() for name, s, n in by_language if n.sum()}
    result |= {f"val_loss_t{k}": sums[:, k].sum() / counts[:, k].sum() for k in range(num_strata)}
    return {name: value.item() for name, value in result.items()}
