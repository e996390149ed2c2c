"""Kill a process at its n-th change of the file system, or at its n-th request to S3: what lies there then is what a
crash leaves.

Processes are forked, so a point costs milliseconds.  A write that is killed has written half.  In a power cut what was
not synced is lost as well: files are emptied, and names go back to what they were.
"""

import builtins
import io
import os
import pickle
import signal
import stat
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.checkpoint_storage import S3Storage
from tests.spawn import fork_server

_CHANGES = ("unlink", "remove", "mkdir", "rmdir", "truncate", "ftruncate", "link", "sendfile", "copy_file_range")
_FOR_WRITING = os.O_WRONLY | os.O_RDWR
_PATIENCE_S = 20.0


class Crash:
    """Counts this process's changes of the file system and ends it with SIGKILL at the chosen one.

    num: how many there were so far.
    """

    def __init__(self, kill_at: int, power_cut: bool):
        """kill_at: which change, from 1 on; 0 = none."""
        self.num, self._kill_at, self._power_cut = 0, kill_at, power_cut
        self._unsynced: dict[int, int] = {}  # inode → a descriptor of our own
        self._renames: list[tuple[str, str]] = []
        self._real = {name: getattr(os, name) for name in (*_CHANGES, "open", "write", "fsync", "rename", "replace")}

    def point(self, half: Callable[[], object] = lambda: None) -> None:
        """Count one change, and die if it is the one.  half: what of the change has happened by then."""
        self.num += 1
        if self.num == self._kill_at:
            half()
            if self._power_cut:
                self._lose_unsynced()
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Count what this process does from now on, through `os` and `open`, and so through `pathlib` and `shutil`."""
        real, real_open = self._real, builtins.open

        def counted(name: str):
            def change(*args, **kwargs):
                self.point()
                return real[name](*args, **kwargs)

            return change

        for name in _CHANGES:
            setattr(os, name, counted(name))

        def open_descriptor(path, flags, *args, **kwargs):
            if flags & _FOR_WRITING:
                self.point()
            return real["open"](path, flags, *args, **kwargs)

        def write(descriptor, data):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                self.point(lambda: real["write"](descriptor, bytes(data)[: len(data) // 2]))
                self.note_write(descriptor)
            return real["write"](descriptor, data)

        def sync(descriptor):
            self.point()
            self._note_sync(descriptor)  # the kernel outlives the process: nothing to wait for

        def rename(source, target, **kwargs):
            self.point()
            real["replace"](source, target, **kwargs)
            self._renames.append((os.path.abspath(source), os.path.abspath(target)))

        def open_file(file, mode="r", *args, **kwargs):
            if not set(mode) & set("wax+"):
                return real_open(file, mode, *args, **kwargs)
            self.point()
            return _CountedFile(real_open(file, mode, *args, **kwargs), self)

        os.open, os.write, os.fsync, os.rename, os.replace = open_descriptor, write, sync, rename, rename
        builtins.open = io.open = open_file

    def install_requests(self) -> None:
        """Count this process's requests to S3 from now on."""
        real = S3Storage._try

        def request(storage, function, *args, **kwargs):
            self.point()
            return real(storage, function, *args, **kwargs)

        S3Storage._try = request

    def note_write(self, descriptor: int) -> None:
        """Remember that a file has content that is not synced."""
        inode = os.fstat(descriptor).st_ino
        if self._power_cut and inode not in self._unsynced:
            self._unsynced[inode] = os.dup(descriptor)

    def _note_sync(self, descriptor: int) -> None:
        synced = os.fstat(descriptor)
        if (own := self._unsynced.pop(synced.st_ino, None)) is not None:
            os.close(own)
        self._renames = [
            (source, target)
            for source, target in self._renames
            if not os.path.samestat(synced, os.stat(os.path.dirname(target)))
        ]

    def _lose_unsynced(self) -> None:
        for descriptor in self._unsynced.values():
            self._real["ftruncate"](descriptor, 0)
        for source, target in reversed(self._renames):
            if os.path.exists(target) and not os.path.exists(source):
                self._real["rename"](target, source)


class _CountedFile:
    """A file of `open` whose writes are counted."""

    def __init__(self, file, crash: Crash):
        self._file, self._crash = file, crash

    def write(self, data) -> int:
        self._crash.point(lambda: (self._file.write(data[: len(data) // 2]), self._file.flush()))
        written = self._file.write(data)
        self._file.flush()
        self._crash.note_write(self._file.fileno())
        return written

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def __getattr__(self, name: str):
        return getattr(self._file, name)


@dataclass(frozen=True)
class Ended:
    """How a forked process ended: killed at its point, or with a result, or with an error's traceback.

    num: how many points it came by, if it was not killed.
    """

    was_killed: bool
    num: int = 0
    result: object = None
    error: str = ""


def fork(action: Callable[[Crash], object], kill_at: int = 0, power_cut: bool = False) -> Ended:
    """Run `action` in a forked process; it installs the counting itself.  What it returns must pickle."""
    return fork_all([action], 0, kill_at, power_cut)[0]


def fork_all(
    actions: list[Callable[[Crash], object]], victim: int = 0, kill_at: int = 0, power_cut: bool = False
) -> list[Ended]:
    """Run each action in a forked process of its own; kill_at: the point at which that of number `victim` dies.

    The others get some seconds to end by themselves.
    """
    children = []
    for number, action in enumerate(actions):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            _run(action, Crash(kill_at if number == victim else 0, power_cut), writer)
        os.close(writer)
        children.append((pid, reader))
    reports, deadline = [b""] * len(children), time.monotonic() + _PATIENCE_S
    for number, (_, reader) in enumerate(children):
        os.set_blocking(reader, False)
        while True:
            try:
                block = os.read(reader, 2**20)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
                continue
            if not block:
                break
            reports[number] += block
    ended = []
    for (pid, reader), report in zip(children, reports, strict=True):
        os.close(reader)
        if not report:  # it died, or it hangs: then what it lacks shows in the report
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended.append(Ended(**pickle.loads(report)) if report else Ended(was_killed=True))
    return ended


def _run(action: Callable[[Crash], object], crash: Crash, writer: int) -> None:
    real_write = os.write
    try:
        report = {"result": action(crash)}
    except BaseException:
        report = {"error": traceback.format_exc()}
    real_write(writer, pickle.dumps({"was_killed": False, "num": crash.num} | report))
    os._exit(0)


def as_rank(action: Callable[[], object], rank: int, num_ranks: int, store: Path) -> Callable[[Crash], object]:
    """Return what runs `action` as one of several gloo ranks, counted from the moment that all are connected."""

    def run(crash: Crash) -> object:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=_PATIENCE_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=limit)
        dist.barrier()
        crash.install()
        crash.install_requests()
        return action()

    return run


def fork_ranks(
    action: Callable[[], object], num_ranks: int, victim: int = 0, kill_at: int = 0, power_cut: bool = False
) -> list[Ended]:
    """Run `action` on forked gloo ranks, of which `victim` dies at its point `kill_at`."""
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        actions = [as_rank(action, rank, num_ranks, Path(folder) / "store") for rank in range(num_ranks)]
        return fork_all(actions, victim, kill_at, power_cut)


def counted(action: Callable[[], object]) -> Callable[[Crash], object]:
    """Return what runs `action` alone, counted from the start."""

    def run(crash: Crash) -> object:
        torch.set_num_threads(1)
        crash.install()
        crash.install_requests()
        return action()

    return run


def in_clean_process(function: Callable, *args):
    """Return what a top-level function gives in a process that has no threads yet: one from which others can be forked.

    obstore's runtime, for one, does not survive a fork.
    """
    with ProcessPoolExecutor(1, fork_server()) as pool:
        return pool.submit(function, *args).result(timeout=3000)
