"""A process that writes checkpoints from shared memory, so that the training process's interpreter has nothing to do.

`python -m parallel.writer_process FD BYTES`: reads one job a line, JSON, from standard input, and answers each with a
line.  It ends when its standard input does, that is with the process that started it, in the middle of a write as well.
"""

import contextlib
import json
import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from parallel.checked_writer import write_and_verify
from parallel.checkpoint_storage import Storage, open_storage

_ROOT = Path(__file__).resolve().parents[1]  # from where `-m parallel.…` is found
Ranges = dict[str, list[tuple[int, int]]]  # file name → (first byte, end) in memory of each of its pieces


class WriterDied(OSError):
    """The writer process ended, or gave no answer in time, before the job was done."""


class WriterProcess:
    """The writer as the training process sees it; started at the first job, and again after it died.

    num_starts: how often it was started.
    """

    def __init__(self, fd: int, num_bytes: int, timeout_s: float):
        """fd, num_bytes: the shared memory.  timeout_s: a job that takes longer counts as a death."""
        self._fd, self._num_bytes, self._timeout_s = fd, num_bytes, timeout_s
        self._process: subprocess.Popen | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """The process's id, None while there is none."""
        return self._process.pid if self._process else None

    def write(self, storage: Storage, name: str, files: Ranges) -> dict[str, dict]:
        """Do what `write_and_verify` does with these ranges of the memory.

        Raises: WriterDied; OSError if it could not write.
        """
        if self._process is not None and (exit_code := self._process.poll()) is not None:
            self.close()
            raise WriterDied(f"the writer process has died since the last save, with exit code {exit_code}")
        if self._process is None:
            self._start()
        job = json.dumps({"folder": str(storage.folder), "name": name, "files": files}) + "\n"
        try:
            self._process.stdin.write(job.encode())
            self._process.stdin.flush()
            answer = self._read_line()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            exit_code = self._process.poll()
            self.close()
            raise WriterDied(
                f"the writer process gave no answer within {self._timeout_s:g} s"
                if exit_code is None
                else f"the writer process died with exit code {exit_code}"
            )
        answer = json.loads(answer)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["written"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(BrokenPipeError):  # of a job that it did not read
                self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "parallel.writer_process", str(self._fd), str(self._num_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self._fd], start_new_session=True, cwd=_ROOT,
        )  # fmt: skip
        self.num_starts += 1

    def _read_line(self) -> bytes:
        """Return the answer; without its end if the process dies or takes too long."""
        line, descriptor, deadline = b"", self._process.stdout.fileno(), time.monotonic() + self._timeout_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(descriptor, 2**16) if ready else b""
            if not block:
                if ready:  # it closed its end: wait for its exit code
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(5)
                break
            line += block
        return line


def main() -> None:
    """Serve jobs until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training process, which may still want to save
    fd, num_bytes = int(sys.argv[1]), int(sys.argv[2])
    memory = memoryview(mmap.mmap(fd, max(1, num_bytes), access=mmap.ACCESS_READ))
    jobs: queue.SimpleQueue = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            jobs.put(json.loads(line))
        os._exit(0)  # at once: who started this is gone, and its successor may be about to write

    threading.Thread(target=listen, daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        job = jobs.get()
        try:
            files = {file: [memory[a:b] for a, b in ranges] for file, ranges in job["files"].items()}
            answer = {"written": write_and_verify(open_storage(job["folder"]), job["name"], files)}
        except Exception as error:  # whatever it is, the training process must hear of it
            answer = {"error": repr(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
