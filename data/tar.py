"""The samples of a webdataset shard: a walk over the members of a tar that finds every cut and every damaged header.

The shard lies on a disk, on a web server or in an S3 store; it is read once, from front to back, in large pieces.
"""

import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from data.versions import Version
from utils.byte_source import ByteSource, RemoteFile, open_source

_NUM_AHEAD = 4  # pieces of a remote shard that are under way at once
_BLOCK = 512  # bytes; everything in a tar starts at a multiple of it
_END_MARK = bytes(2 * _BLOCK)


def tar_samples(shard: str, version: Version | None = None) -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """Yield (stem, {extension: (offset, content)}): by webdataset's rule, neighbours with one stem are one sample.

    version: what the shard must still be.
    Raises: ValueError if the shard cannot be read, is damaged or cut.
    """
    current, members = None, {}
    for stem, extension, offset, content in _tar_members(shard, version):
        if stem != current and members:
            yield current, members
            members = {}
        current = stem
        members[extension] = (offset, content)
    if members:
        yield current, members


def _tar_members(shard: str, version: Version | None) -> Iterator[tuple[str, str, int, bytes]]:
    """Yield (stem, extension, offset, content) of each file in a tar, in order.

    Raises: ValueError if the tar is damaged or cut, also where the cut falls between two members: a whole tar ends in
    two blocks of zeros, and nothing but zeros follows them.
    """
    try:
        with _Stream(open_source(shard, pinned=version)) as stream:
            end = 0
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    end = member.offset_data + (-(-member.size // _BLOCK) * _BLOCK if member.isfile() else 0)
                    if not member.isfile():
                        continue
                    stream.seek(member.offset_data)
                    content = stream.read(member.size)
                    if len(content) != member.size:
                        raise ValueError(f"shard {shard} is cut short inside {member.name}; copy it again")
                    # A name that is not UTF-8 becomes one that is, and stays different from every other.
                    name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                    folder, slash, base = name.rpartition("/")
                    stem, _, extension = base.partition(".")
                    yield folder + slash + stem, extension.lower(), member.offset_data, content
            stream.seek(end)
            mark, after = stream.read(len(_END_MARK)), 0
            while not after and (piece := stream.read(stream.piece_bytes)):
                after = len(piece) - piece.count(0)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"shard {shard} cannot be read as a tar file: {error}") from error
    except OSError as error:
        raise ValueError(f"shard {shard} cannot be read: {error}") from error
    if mark != _END_MARK:
        raise ValueError(
            f"shard {shard} has no end mark (two blocks of zeros) at byte {end}: it is cut short between two members, "
            "or damaged there; copy it again"
        )
    if after:
        raise ValueError(f"shard {shard} goes on after its end mark at byte {end}: give joined tar files one by one")


class _Stream:
    """A file for `tarfile` to read, forwards.  Of a remote one the next pieces are fetched meanwhile."""

    def __init__(self, source: ByteSource):
        self._source, self._position = source, 0
        self.piece_bytes = source.request_bytes
        self._num_pieces = -(-source.size // self.piece_bytes)
        is_remote = isinstance(source, RemoteFile)
        self._pool = ThreadPoolExecutor(_NUM_AHEAD, "shard") if is_remote else None
        self._under_way: dict[int, Future] = {}
        self._pieces: dict[int, bytearray] = {}  # the present one, and the one before: tarfile looks a byte back

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end."""
        parts, end = [], min(self._position + size, self._source.size)
        while self._position < end:
            number, start = divmod(self._position, self.piece_bytes)
            part = self._piece(number)[start : start + end - self._position]
            parts.append(part)
            self._position += len(part)
        return b"".join(parts)

    def _piece(self, number: int) -> memoryview:
        if number not in self._pieces:
            self._pieces = {n: piece for n, piece in self._pieces.items() if n == number - 1}
            if self._pool is None:
                self._pieces[number] = self._fetch(number)
            else:
                for n in range(number, min(number + _NUM_AHEAD, self._num_pieces)):
                    if n not in self._under_way:
                        self._under_way[n] = self._pool.submit(self._fetch, n)
                self._pieces[number] = self._under_way.pop(number).result()
        return memoryview(self._pieces[number])

    def _fetch(self, number: int) -> bytearray:
        offset = number * self.piece_bytes
        piece = bytearray(min(self.piece_bytes, self._source.size - offset))
        self._source.read_into(offset, memoryview(piece))
        return piece
