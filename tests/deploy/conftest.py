"""A stopped test run still takes its namespaces and daemons away."""

import signal

import pytest


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.fixture(scope="session", autouse=True)
def sigterm_ends_fixtures():
    """Let SIGTERM, as `timeout` sends it, end the run as Ctrl-C does: pytest then tears every fixture down."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    yield
    signal.signal(signal.SIGTERM, before)
