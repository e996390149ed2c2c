"""Faults of a disk, on purpose: for real in a file system that is there for it, else where this process writes.

A file system of its own is a tmpfs that `python -m tools.chaos` mounts and names in INJECT_FAULTS_DISK: it really gets
full, runs out of inodes, or is mounted read-only, for every process and library.  Without one, the faults hit what
Python code of this process writes: `open`, `os.open`, `os.write`, not a library in C and not another process.
"""

import builtins
import contextlib
import errno
import io
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

DISK_VARIABLE = "INJECT_FAULTS_DISK"
_FILLER, _FILLERS = ".filler", ".fillers"  # what takes the disk's last blocks, and its last inodes


class FaultyDisk:
    """Breaks the disk, one fault after the other, and heals it.

    folder: the root of a file system that may be broken, None to break this process's writes instead.
    """

    def __init__(self, folder: Path | None):
        """Heal what an earlier process that died with its fault has left."""
        self._folder = folder
        self._restore: list[Callable[[], None]] = []
        self._until = 0.0
        if folder is not None:
            _heal(folder)

    def full(self, seconds: float) -> None:
        """Leave no block free.  seconds: `heal_if_over` leaves it so for at least as long; 0 = not at all."""
        if self._folder is None:
            self._patch_writes(_failing(errno.ENOSPC))
        else:
            _fill(self._folder / _FILLER)
        self._until = max(self._until, time.monotonic() + seconds)

    def without_inodes(self, seconds: float) -> None:
        """Let no file be made."""
        if self._folder is None:
            self._patch_creation(errno.ENOSPC)
        else:
            _use_inodes(self._folder / _FILLERS)
        self._until = max(self._until, time.monotonic() + seconds)

    def read_only(self, seconds: float) -> None:
        """Let nothing be opened for writing, made, renamed or deleted.  What is open can still be written."""
        if self._folder is None:
            self._patch_creation(errno.EROFS)
            for name in ("rename", "replace", "unlink", "remove", "rmdir"):
                self._replace(os, name, _failing(errno.EROFS)(getattr(os, name)))
        else:
            _mount("--bind", self._folder, self._folder)
            _mount("-o", "remount,bind,ro", self._folder)
        self._until = max(self._until, time.monotonic() + seconds)

    def slow(self, delay_s: float) -> None:
        """Let every write of this process take so much longer, wherever it goes."""
        self._patch_writes(_late(delay_s))

    def heal_if_over(self) -> None:
        """Undo the faults, unless they are to last longer."""
        if time.monotonic() < self._until:
            return
        while self._restore:
            self._restore.pop()()
        if self._until and self._folder is not None:
            _heal(self._folder)
        self._until = 0.0

    def _patch_writes(self, change: Callable[[Callable], Callable]) -> None:
        """Change os.write, and open for writing in place of the writes of what it opens."""
        self._replace(os, "write", change(os.write))
        self._patch_open(change)

    def _patch_creation(self, number: int) -> None:
        fail, real = _failing(number), os.open

        def opened(path, flags, *args, **kwargs):
            return (fail(real) if flags & os.O_CREAT else real)(path, flags, *args, **kwargs)

        self._replace(os, "open", opened)
        self._replace(os, "mkdir", fail(os.mkdir))
        self._patch_open(fail)

    def _patch_open(self, change: Callable[[Callable], Callable]) -> None:
        real = io.open

        def opened(file, mode="r", *args, **kwargs):
            return (change(real) if set(mode) & set("wax+") else real)(file, mode, *args, **kwargs)

        self._replace(io, "open", opened)
        self._replace(builtins, "open", opened)

    def _replace(self, owner, name: str, new) -> None:
        old = getattr(owner, name)
        setattr(owner, name, new)
        self._restore.append(lambda: setattr(owner, name, old))


def _failing(number: int) -> Callable[[Callable], Callable]:
    def change(real):
        def fail(first, *args, **kwargs):
            raise OSError(number, os.strerror(number), str(first) if isinstance(first, str | Path) else None)

        return fail

    return change


def _late(seconds: float) -> Callable[[Callable], Callable]:
    def change(real):
        def late(*args, **kwargs):
            time.sleep(seconds)
            return real(*args, **kwargs)

        return late

    return change


# ---- A file system of its own ----------------------------------------------------------------------------------------


def _fill(path: Path) -> None:
    file, block = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), b"\0" * 2**20
    try:
        while block:
            try:
                os.write(file, block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block = block[: len(block) // 2]
    finally:
        os.close(file)


def _use_inodes(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
        for number in range(10**6):
            os.close(os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o644))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _heal(folder: Path) -> None:
    while _num_mounts(folder) > 1:  # the read-only one lies over the other
        subprocess.run(["umount", "-l", str(folder)], check=False)  # another rank may be faster
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / _FILLER)
    shutil.rmtree(folder / _FILLERS, ignore_errors=True)


def _num_mounts(folder: Path) -> int:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return sum(line.split()[4] == str(folder) for line in file)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)
