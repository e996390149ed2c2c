"""The files an index is kept in: a part for each shard, and a summary of all."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.index_part import IndexedSample, IndexPart, PartNotes, write_part
from data.index_summary import IndexSummary
from data.versions import Version, identity

FORMAT = "7"
Found = tuple[list[IndexedSample], list[tuple[str, str]]]


class IndexFolder:
    """Where the parts and summaries of shards are kept.  A changed shard, or another tokenizer, has other files.

    tokenizer_id: names the tokenizer; index_shard: returns the samples of a shard and (stem, reason) of what of it
    cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[str],
        versions: Sequence[Version],
        tokenizer_id: str,
        index_shard: Callable[[str, Version], Found],
    ):
        self._shards, self._versions, self._index_shard = list(shards), list(versions), index_shard
        names = [
            hashlib.sha256(f"{FORMAT}\0{identity(shard)}\0{size}\0{changed}\0{tokenizer_id}".encode()).hexdigest()[:32]
            for shard, (size, changed) in zip(shards, versions, strict=True)
        ]
        self._paths = [folder / f"{name}.part" for name in names]
        self._summary_path = folder / f"{hashlib.sha256(' '.join(names).encode()).hexdigest()[:32]}.summary"
        self._verified: set[int] = set()

    def summary(self, rank: int, num_ranks: int) -> IndexSummary:
        """Return the summary of all shards, after indexing those that have no part yet.

        Each of `num_ranks` processes begins with another shard, and takes what another has done by then.
        """
        if (summary := IndexSummary.load(self._summary_path)) is None:
            count = len(self._shards)
            turns = [(rank * count // num_ranks + turn) % count for turn in range(count)]
            notes = {shard: PartNotes.read(self._paths[shard]) or self._build(shard) for shard in turns}
            summary = IndexSummary.of([notes[shard] for shard in range(count)])
            with _room_for(self._summary_path):
                summary.save(self._summary_path)
        return summary

    def open_part(self, shard: int, digest: str) -> IndexPart:
        """Map the part of a shard; one that is gone or damaged is built again.

        Raises: ValueError if it is not the part that the summary was made of.
        """
        path = self._paths[shard]
        part = IndexPart.open(path, verify=shard not in self._verified)
        if part is None or part.notes.digest != digest:
            self._build(shard)
            part = IndexPart.open(path, verify=True)
        if part is None or part.notes.digest != digest:
            raise ValueError(f"shard {self._shards[shard]} is not what it was when this run began; start the run again")
        self._verified.add(shard)
        return part

    def _build(self, shard: int) -> PartNotes:
        samples, rejects = self._index_shard(self._shards[shard], self._versions[shard])
        with _room_for(self._paths[shard]):
            write_part(self._paths[shard], samples, rejects)
        return PartNotes.read(self._paths[shard])


@contextmanager
def _room_for(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the index cannot be kept in {path.parent}: {error.strerror}; make room or give another --cache_folder"
        ) from error
