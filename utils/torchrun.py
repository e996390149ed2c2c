"""`torchrun` without its own traceback and table: `python -m utils.torchrun` takes the same arguments.

What the failing rank has printed stays the last thing on the screen; below it, except for a configuration error
(`utils.config.run_main`), one line a rank says how it ended, since a killed rank prints nothing.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from utils.exit_codes import USER_ERROR


def run() -> int:
    """Run torchrun and return the exit code: the first failing rank's, or 128 + the number of the signal."""
    for module in ("api", "errors.error_handler"):  # the same in other words
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{module}").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode != USER_ERROR:
            for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
                code = failure.exitcode
                end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                print(f"rank {rank} (process {failure.pid}) ended with {end}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run())
