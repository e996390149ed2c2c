"""Ends a run that hangs: says where every rank is and which one the others wait for, and exits to be started again.

One thread a rank, which needs no collective and no answer of the training thread, however deep that sits in one.  Every
second it writes the rank's position to the store of the process group; who finds its phase past the deadline raises an
alarm there, and every rank then writes the stacks of its threads and its last collectives to <run>/hangs/ and exits.
The thread also ends a rank that can go nowhere: whose launcher is gone, or that has to stop while another is dead.
"""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from parallel.distributed import num_ranks, on_main, rank
from parallel.hang_report import explain
from utils.exit_codes import HANG, PEER_LOST
from utils.phase_timer import PhaseTimer, Position
from utils.run_events import RunEvents
from utils.stop_signals import StopSignals

LONG = 10  # the deadline of a long phase over that of the others
LONG_PHASES = ("start", "checkpoint", "validation", "sampling")
_TICK_S = 1.0
_GATHER_S = 2.0  # for the other ranks' reports after an alarm
_LAST_S = 4.0  # after an alarm the process ends, whatever a disk or a log does
_FALLBACK_S = 4.0  # after its deadline a rank whose threads do not run at all ends, with exit code 1
_STORE_TRIES = 3  # failures in a row until the store, and the host that has it, is given up
_DUMPS = {"": "_dump_fr_trace_json", "nccl.": "_dump_nccl_trace_json"}  # of the flight recorder; NCCL's on GPUs only
log = logging.getLogger("train")


class Watchdog:
    """Watches this rank's training thread from now until `close`.

    hang_s: after so long in one phase of a step the run hangs; of `LONG_PHASES`, and of every phase of the first step
    (which compiles, allocates and connects), LONG times that.  0 = no deadline.  stop: who knows of SIGTERM.

    Outside that time no hang has a deadline: the model, the index of the data and the checkpoint are read before, for
    as long as the disk or the store takes, and what a script does after `close` is its own.  A rank that waits there
    for another in a collective fails after the process group's timeout (--timeout_s) and so ends all; only where no
    rank is in one, as with a dead NFS under all of them, does the job stand until its scheduler's limit.
    """

    def __init__(self, folder: Path, timer: PhaseTimer, hang_s: float, stop: StopSignals | None = None):
        """Every rank takes part.  Raises: ValueError for a negative time."""
        if hang_s < 0:
            raise ValueError(f"--hang_s must not be negative, got {hang_s}")
        self.folder, self.timer, self.hang_s, self.stop = Path(folder), timer, hang_s, stop
        self._rank, self._num_ranks = rank(), num_ranks()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._prefix = on_main(lambda: f"watchdog/{uuid.uuid4().hex}")  # an earlier start may have used this store
        self._store = None
        if dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own never waits
            self._store.set_timeout(timedelta(seconds=5))
        self._tick_s = min(_TICK_S, hang_s / 5) if hang_s else _TICK_S
        self._beats, self._store_failures, self._first_step, self._enqueued = 0, 0, None, {}
        self._has_complained = False
        self._seen: dict[int, tuple[int, float]] = {}  # of ranks of other hosts: last beat, and when it came
        self._who = {"host": _host(), "pid": os.getpid(), "started": _start_time(os.getpid())}
        self._closed = threading.Event()
        self._report("running")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the others then do not miss this rank."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(RuntimeError):  # the store's host has left before
            self._report("done")

    def deadline(self, position: Position) -> float:
        """Return after how many seconds at a position the run hangs."""
        if self._first_step is None and position.step >= 0:
            self._first_step = position.step
        is_long = position.phase in LONG_PHASES or position.step == self._first_step
        return self.hang_s * (LONG if is_long else 1) or float("inf")

    # ---- The thread -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._closed.wait(self._tick_s):
            try:
                self._look()
            except Exception as error:  # a thread that ended here would leave armed what ends a run that is well
                if not self._has_complained:
                    self._has_complained = True
                    self._say(f"the watchdog fails and goes on: {error!r}")

    def _look(self) -> None:
        if self._launcher and os.getppid() != self._launcher:
            self._exit(PEER_LOST, "the launcher is gone: this rank would be left over")
        position = self.timer.position
        waited, limit = time.monotonic() - position.since, self.deadline(position)
        # Should even this thread be kept from running: C code, which no lock can stop.
        if waited <= limit < float("inf"):
            faulthandler.dump_traceback_later(limit - waited + _FALLBACK_S, exit=True)
        try:
            self._report("running")
            alarm = self._read("alarm")
            lost = self._lost_peers() if self._is_signalled else []
            self._store_failures = 0
        except RuntimeError as error:
            self._store_failures += 1
            if self._is_signalled or self._store_failures >= _STORE_TRIES:
                self._exit(PEER_LOST, f"the process group's store is gone ({error}): its host or rank 0 is dead")
            return
        if alarm:
            self._end_hang(self._follow, alarm)
        if waited > limit:
            self._end_hang(self._raise_alarm, position, waited)
        if lost:
            lost = ", ".join(map(str, lost))
            self._exit(PEER_LOST, f"rank {lost} died; this one was told to stop and cannot complete its step")

    @property
    def _is_signalled(self) -> bool:
        return self.stop is not None and self.stop.signalled_at > 0

    def _end_hang(self, report: Callable[..., None], *arguments) -> NoReturn:
        """Report and exit, whatever goes wrong with the report."""
        try:
            faulthandler.dump_traceback_later(_LAST_S + 1, exit=True)
            self._exit_later(HANG)
            report(*arguments)
        except Exception as error:
            self._say(f"the report of a hang is not complete: {error!r}")
        finally:
            os._exit(HANG)

    def _raise_alarm(self, position: Position, waited: float) -> None:
        """Have all ranks report; the first to get here says what they were doing and exits last."""
        folder = f"step-{position.step:08d}-{int(time.time())}"
        alarm = json.dumps({"rank": self._rank, "folder": folder})
        before, after = {}, {}
        with contextlib.suppress(RuntimeError):  # a store that has just gone: this rank's stacks are left to tell
            if self._store is not None:
                raised = self._store.compare_set(f"{self._prefix}/alarm", "", alarm).decode()
                if raised != alarm:
                    return self._follow(json.loads(raised))
            before = self._statuses()
        self._dump(folder)
        time.sleep(_GATHER_S)  # long enough for every living rank's next report
        with contextlib.suppress(RuntimeError):
            after = self._statuses()
        silent = [
            r
            for r, status in after.items()
            if r != self._rank and status["state"] == "running" and status["beat"] == before.get(r, {}).get("beat")
        ]
        for r in silent:
            if after[r]["host"] == self._who["host"] and _start_time(after[r]["pid"]) == after[r]["started"]:
                with contextlib.suppress(OSError):
                    os.kill(after[r]["pid"], signal.SIGKILL)  # it would outlive SIGTERM, and hold its memory and ports
        text = (
            f"step {position.step}: {waited:.1f} s in phase {position.phase!r}, over the deadline of "
            f"{self.deadline(position):g} s (--hang_s)\n{explain(after, silent)}\nstacks and collectives: "
            f"{self.folder / 'hangs' / folder}\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, f"hang: {text}".encode())
        with contextlib.suppress(OSError):  # it has been said
            (self.folder / "hangs" / folder / "report.txt").write_text(text, encoding="utf-8")
        RunEvents(self.folder).add("stop", max(0, position.step), reason="hang")

    def _follow(self, alarm: dict) -> None:
        """Report, and stay until the one who raised the alarm is done: a rank that leaves ends the others' waiting."""
        self._dump(alarm["folder"])
        with contextlib.suppress(RuntimeError):
            self._report("dumped")
        time.sleep(_GATHER_S + 0.5)

    def _dump(self, folder: str) -> None:
        """Write the stacks of all threads, and what the flight recorder remembers."""
        try:
            path = self.folder / "hangs" / folder
            path.mkdir(parents=True, exist_ok=True)
            with (path / f"rank-{self._rank}.stacks.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            for backend, name in _DUMPS.items():
                if hasattr(c10d, name):
                    try:
                        collectives = getattr(c10d, name)()
                    except RuntimeError as error:  # the recorder's: another backend's may answer
                        self._say(f"no {backend or 'gloo '}collectives: {error}")
                        continue
                    (path / f"rank-{self._rank}.{backend}collectives.json").write_bytes(collectives)
        except OSError as error:
            self._say(f"cannot write stacks: {error}")
            faulthandler.dump_traceback(sys.__stderr__)

    def _exit_later(self, code: int) -> None:
        thread = threading.Timer(_LAST_S, os._exit, (code,))
        thread.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads here: faulthandler's is armed
            thread.start()

    def _exit(self, code: int, why: str) -> NoReturn:
        self._say(why)
        os._exit(code)

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, f"rank {self._rank}: {what}\n".encode())  # no lock that the training thread could hold

    # ---- The store --------------------------------------------------------------------------------------------------
    def _report(self, state: str) -> None:
        self._beats += 1
        p = self.timer.position
        status = {"state": state, "beat": self._beats, "step": p.step, "number": p.number, "phase": p.phase}
        with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):  # the recorder's; the last count stays
            self._enqueued = _enqueued()
        status |= {"waited_s": round(time.monotonic() - p.since, 1), "enqueued": self._enqueued, **self._who}
        if self._store is not None:
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(status))

    def _read(self, key: str) -> dict | None:
        name = f"{self._prefix}/{key}"
        if self._store is None or not self._store.check([name]):
            return None
        return json.loads(self._store.get(name))

    def _statuses(self) -> dict[int, dict]:
        if self._store is None:
            return {}
        names = [f"{self._prefix}/{r}" for r in range(self._num_ranks)]
        if self._store.has_extended_api() and self._store.check(names):  # at once, for many ranks
            return {r: json.loads(value) for r, value in enumerate(self._store.multi_get(names))}
        return {r: status for r in range(self._num_ranks) if (status := self._read(str(r))) is not None}

    def _lost_peers(self) -> list[int]:
        """Return the ranks of this host whose process is gone, and those of others that have stopped reporting."""
        now, lost = time.monotonic(), []
        for r, status in self._statuses().items():
            if status["state"] == "done" or r == self._rank:
                continue
            if status["host"] == self._who["host"]:
                if _start_time(status["pid"]) != status["started"]:
                    lost.append(r)
            elif self._seen.setdefault(r, (status["beat"], now))[0] != status["beat"]:
                self._seen[r] = status["beat"], now
            elif now - self._seen[r][1] > 3 * _TICK_S:
                lost.append(r)
        return lost


def _enqueued() -> dict[str, int]:
    """Return how many collectives each process group has begun, as the flight recorder counts them."""
    counts: dict[str, int] = {}
    for name in _DUMPS.values():
        if hasattr(c10d, name):
            status = json.loads(getattr(c10d, name)(includeCollectives=False)).get("pg_status", {})
            counts |= {f"{name} {group}": int(of["last_enqueued_collective"]) for group, of in status.items()}
    return counts


def _host() -> str:
    """Return what tells hosts, and containers with a process table of their own, apart."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def _start_time(pid: int) -> int:
    """Return when a process of this host was started, in the kernel's ticks; 0 if it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(fields[18])
