"""Faults for the processes that a test starts."""

from dataclasses import dataclass
from pathlib import Path

from utils.fault_injection import FOLDER_VARIABLE, VARIABLE


@dataclass(frozen=True)
class Injected:
    """Faults that will happen; folder: where it is noted what has."""

    folder: Path

    def names(self) -> set[str]:
        """Return which faults have happened."""
        return {path.name for path in self.folder.iterdir()}

    def happened_at(self) -> float:
        """Return when the last fault happened, in time.monotonic()."""
        return max(float(path.read_text()) for path in self.folder.iterdir())


def injected(monkeypatch, folder: Path, faults: str) -> Injected:
    """Let faults happen, once each, in every process started from now on; folder: an empty or new one."""
    monkeypatch.setenv(VARIABLE, faults)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "faults"))
    return Injected(folder / "faults")
