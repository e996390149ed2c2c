"""`torchrun` for long runs: `python -m utils.torchrun` takes the same arguments.

- It does not start ranks again that ended with a code of `utils.exit_codes.FINAL`, or with an error before any start
  has completed a step: that would only happen again.
- --max_restarts counts restarts in a row.  A start that finds a newer checkpoint than the last one
  (`parallel.restarts`) sets the count back, so that a run of many weeks is not ended by its fourth fault.  Without
  progress it ends with NO_PROGRESS.
- SIGUSR1 goes to the ranks, which save and stop; torchrun itself would die of it.  They get it every second, and those
  of a new start too, since who is still starting up ignores it.
- A repeated SIGTERM changes nothing: the ranks have the time that the first one gave them.
- It ends with TO_BE_CONTINUED when the ranks of this machine left a note that they stopped early (`utils.stop_note`).
- What the failing rank has printed stays the last thing on the screen: no traceback and no table of torchrun's own.
  Below it, except for a configuration error (`utils.config.run_main`), one line a rank says how it ended, since a
  killed rank prints nothing.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.run import main

from utils.exit_codes import ERROR, FINAL, NO_PROGRESS, PEER_LOST, USER_ERROR, ending
from utils.restart_notes import FIRST_STEP, PROGRESS
from utils.stop_note import TO_BE_CONTINUED
from utils.stop_note import VARIABLE as STOP
from utils.stop_signals import LAUNCHED_AT

_WARN_EVERY_S = 1.0


class Agent(LocalElasticAgent):
    """torchrun's agent, with the rules above for restarts."""

    gave_up = False  # after max_restarts in a row
    is_warned = False  # this process, by SIGUSR1
    _warned_at = 0.0  # the ranks, last

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if Agent.is_warned and time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            self._warn()
        result = super()._monitor_workers(worker_group)
        most, progress = worker_group.spec.max_restarts, Path(os.environ[PROGRESS])
        if progress.exists():
            progress.unlink()
            self._remaining_restarts = most
        if result.state == WorkerState.FAILED:
            if _is_final(failure.exitcode for failure in result.failures.values()):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                _tell(result.failures)
                print(f"starting all ranks again, {self._remaining_restarts} restarts left", file=sys.stderr)
            else:
                self.gave_up = most > 0
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Wait for the ranks as torch does; there a repeated SIGTERM would end that, in the middle of a save."""
        repeated = []
        handler = signal.signal(signal.SIGTERM, lambda number, frame: repeated.append(number))
        try:
            super()._shutdown(death_sig, timeout)
        finally:
            signal.signal(signal.SIGTERM, handler)
            if repeated and not isinstance(sys.exc_info()[1], SignalException):  # the first: the ranks only restart
                os.kill(os.getpid(), signal.SIGTERM)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        # Ranks inherit that it is ignored; otherwise they would die of it before they have set a handler.
        handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.signal(signal.SIGUSR1, handler)

    def _warn(self) -> None:
        for process in self._pcontext.pids().values() if self._pcontext else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)


def run() -> int:
    """Run torchrun and return the exit code: one of `utils.exit_codes`, or 128 + the number of the signal."""
    for module in ("api", "errors.error_handler"):  # the same in other words
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{module}").setLevel(logging.CRITICAL)
    agents: list[Agent] = []

    def make_agent(*args, **kwargs) -> Agent:
        agents.append(Agent(*args, **kwargs))
        return agents[-1]

    launcher.LocalElasticAgent = make_agent
    signal.signal(signal.SIGUSR1, lambda number, frame: setattr(Agent, "is_warned", True))
    # Restarts that share the rendezvous' store find the addresses of ranks that are dead, now and then (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault(LAUNCHED_AT, str(time.monotonic()))
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        notes = {STOP: "stop", FIRST_STEP: "stepped", PROGRESS: "progress"}
        os.environ.update({variable: f"{folder}/{note}" for variable, note in notes.items()})
        code = _run()
        if Path(os.environ[STOP]).exists():
            return TO_BE_CONTINUED
    if any(agent.gave_up for agent in agents):
        print("started again as often as --max_restarts allows, without a newer checkpoint", file=sys.stderr)
        return NO_PROGRESS
    return code


def _run() -> int:
    try:
        main()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode != USER_ERROR:
            _tell(error.failures)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousClosedError:
        print("another machine has ended the job; its output says why", file=sys.stderr)
        return PEER_LOST
    return 0


def _is_final(codes) -> bool:
    """Return whether ranks that ended with these codes would end so again."""
    stepped = Path(os.environ[FIRST_STEP]).exists()
    return any(code in FINAL or (code == ERROR and not stepped) for code in codes)


def _tell(failures: dict) -> None:
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        print(f"rank {rank} (process {failure.pid}) ended with {ending(failure.exitcode)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run())
