"""The order in which a run visits its samples, by its task."""

from collections.abc import Sequence

from data.balanced_sampler import CategoryBalancedSampler
from data.edit import parse_shares
from data.index import Index
from data.mixture import Mixture
from data.mixture_order import MixtureOrder


def build_order(
    task: str,
    index: Index,
    mixture: Mixture,
    sources: Sequence[str],
    shares: Sequence[str],
    global_batch_size: int,
    seed: int,
    shuffle_shards: int,
) -> MixtureOrder | CategoryBalancedSampler:
    """Return the global order of a run.

    Edits that are no mixture of several groups are balanced by category, as train_edit_ddp.py does; all else is
    interleaved by the mixture's shares.
    mixture: as `Mixture.for_task` gives it; sources: of each shard its source's name; shares: of categories, as
    texts like "remove=2".
    Raises: ValueError for shares where no categories are balanced, and for what the orders refuse.
    """
    if mixture.by_category:
        return CategoryBalancedSampler(index, parse_shares(shares), 1, 0, seed, global_batch_size, edits_only=True)
    if shares:
        raise ValueError("--shares is for --task edit with --data that is no mixture file; there a group can name one")
    return MixtureOrder(index, mixture, sources, global_batch_size, seed, shuffle_shards)
