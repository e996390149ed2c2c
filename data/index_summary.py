"""What a run knows of all parts of its index from the start: how many samples of what kind each shard has."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.column_file import map_columns, narrow, write_columns
from data.index_part import Kind, PartNotes

_COLUMNS = ("num_samples", "num_rejects", "digests", "pair_shard", "pair_kind", "pair_count")


@dataclass(frozen=True, eq=False)
class IndexSummary:
    """Numbers of S shards, and of the kinds of sample each of them has, E pairs (shard, kind) in all."""

    num_samples: np.ndarray  # (S,); this and what follows of the narrowest unsigned type
    num_rejects: np.ndarray  # (S,)
    digests: np.ndarray  # (S, 32) uint8
    kinds: list[Kind]
    encoded_by: list[tuple[str, int]]  # what made encoded samples, and the first shard that has such
    pair_shard: np.ndarray  # (E,), rising
    pair_kind: np.ndarray  # (E,), index into kinds
    pair_count: np.ndarray  # (E,), samples

    @classmethod
    def of(cls, parts: Sequence[PartNotes]) -> "IndexSummary":
        """Sum up parts, in the order of their shards."""
        number_of = {kind: n for n, kind in enumerate(sorted({kind for part in parts for kind in part.kinds}))}
        in_order = list(enumerate(parts))
        return cls(
            num_samples=narrow([part.num_samples for part in parts]),
            num_rejects=narrow([part.num_rejects for part in parts]),
            digests=np.frombuffer(b"".join(bytes.fromhex(p.digest) for p in parts), np.uint8).reshape(len(parts), -1),
            kinds=list(number_of),
            encoded_by=list({other: shard for shard, part in reversed(in_order) for other in part.encoded_by}.items()),
            pair_shard=narrow([shard for shard, part in enumerate(parts) for _ in part.kinds]),
            pair_kind=narrow([number_of[kind] for part in parts for kind in part.kinds]),
            pair_count=narrow([count for part in parts for count in part.kind_counts]),
        )

    def save(self, path: Path) -> None:
        """Keep it in a file.  Raises: OSError."""
        notes = {"kinds": self.kinds, "encoded_by": self.encoded_by}
        write_columns(path, {name: getattr(self, name) for name in _COLUMNS}, notes)

    @classmethod
    def load(cls, path: Path) -> "IndexSummary | None":
        """Return what was kept, or None if there is none or it is damaged."""
        file = map_columns(path)
        if file is None:
            return None
        columns = {name: file[name].copy() for name in _COLUMNS}
        columns["digests"] = columns["digests"].reshape(len(columns["num_samples"]), -1)
        kinds = list(map(Kind.from_json, file.notes["kinds"]))
        return cls(**columns, kinds=kinds, encoded_by=[tuple(pair) for pair in file.notes["encoded_by"]])

    def count(self, kinds: Collection[Kind]) -> np.ndarray:
        """Return how many samples of these kinds each shard has, (S,) int64."""
        wanted = np.array([kind in kinds for kind in self.kinds], bool)[self.pair_kind]
        counts = np.bincount(self.pair_shard[wanted], self.pair_count[wanted], minlength=len(self.num_samples))
        return counts.astype(np.int64)

    def fingerprint(self, names: Sequence[str]) -> str:
        """Return a hash of every shard's name and content, in order."""
        digest = hashlib.sha256()
        for name, part in zip(names, self.digests, strict=True):
            digest.update(name.encode() + b"\0" + part.tobytes())
        return digest.hexdigest()
