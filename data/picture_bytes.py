"""A picture's bytes from wherever a row says they lie."""

import http.client
import random
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

from utils.byte_source import Patience, is_remote, open_source

MAX_BYTES = 2**28  # of one picture's file
# Of pictures from the web many are gone for good: a shard must not wait minutes for each.
WEB_PATIENCE = Patience(max_retries=3, first_wait_s=0.5, max_wait_s=5.0, stall_s=15.0, total_s=60.0)
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_CHUNK = 2**18


def read_picture_bytes(location: str, patience: Patience | None = None) -> bytes:
    """Read a whole file.

    A web address is fetched with one GET: of small files from many hosts, many of which answer neither HEAD nor ranges
    and whose addresses have queries, nothing needs to be pinned.  s3:// and local files go through `open_source`.
    Raises: OSError or ValueError with the reason.
    """
    if is_remote(location) and location.startswith("http"):
        return _fetch(location, patience or WEB_PATIENCE)
    if not is_remote(location) and not Path(location).is_file():  # of a pipe or a device nothing ends
        raise FileNotFoundError(
            f"{location} does not exist" if not Path(location).exists() else f"{location} is no file"
        )
    source = open_source(location, patience or (WEB_PATIENCE if is_remote(location) else None))
    try:
        _check_size(source.size)
        data = bytearray(source.size)
        source.read_into(0, memoryview(data))
        return bytes(data)
    finally:
        source.close()


def _fetch(url: str, patience: Patience) -> bytes:
    """GET a web address; tries again with jittered waits that grow after what may pass."""
    deadline = time.monotonic() + patience.total_s
    for attempt in range(patience.max_retries + 1):
        try:
            return _get(url, patience, deadline)
        except urllib.error.HTTPError as error:
            problem, again = f"the server answers {error.code} {error.reason}", error.code in _TRANSIENT
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            problem, again = f"{type(reason).__name__}: {reason}", not _is_final(reason)
        wait = min(patience.max_wait_s, patience.first_wait_s * 2**attempt) * random.uniform(0.5, 1)
        if not again or attempt == patience.max_retries or time.monotonic() + wait > deadline:
            break
        time.sleep(wait)
    raise OSError(f"{url} cannot be read: {problem}")


def _get(url: str, patience: Patience, deadline: float) -> bytes:
    # Addresses in tables are often not encoded; what is, stays.
    address = quote(url, safe="%/:=&?~#+!$,;'@()*[]")
    request = urllib.request.Request(address, headers={"User-Agent": "prepare/1.0"})
    with urllib.request.urlopen(request, timeout=patience.stall_s) as response:
        length = response.headers.get("Content-Length")
        _check_size(int(length or 0))
        chunks, size = [], 0
        while chunk := response.read1(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            _check_size(size)
            if time.monotonic() > deadline:
                raise TimeoutError(f"it took longer than {patience.total_s:g} s")
    if length is not None and size != int(length):
        raise http.client.IncompleteRead(b"", int(length) - size)
    return b"".join(chunks)


def _is_final(reason: object) -> bool:
    """Return whether an error will not pass: a host that does not exist, or no address at all."""
    if isinstance(reason, socket.gaierror):
        return reason.errno != socket.EAI_AGAIN
    return isinstance(reason, http.client.InvalidURL)


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"the file has more than {MAX_BYTES >> 20} MiB")


def beside(location: str, name: str) -> str:
    """Return where `name`, found in the file `location`, lies: itself if absolute, else relative to that file."""
    if "://" in name or name.startswith("/"):
        return name
    if is_remote(location):
        return f"{location.rpartition('/')[0]}/{name}"
    return str(Path(location).parent / name)
