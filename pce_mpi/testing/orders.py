"""What the session that the user has started tells the ranks, and the name by which theirs is found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
import json
from pathlib import Path
from typing import Any

# The name of the plugin that is a rank's part of a session.
NAME = "pce_mpi-ranks"

# Seconds of `Patience` until the ranks have found their tests, in which they may import a framework.
STARTUP = 120.0


@dataclass(frozen=True)
class Orders:
    """The session that the ranks of a job run.

    arguments   of the command line
    sizes       that were asked for, of which this session is one
    missing     those of them that cannot be run, and why
    remaining   tests that sessions before this one, which a test has ended, have not begun; None for all
    limit       seconds of `Patience` that a phase of a test may take
    terminal    the terminal for --pdb
    workerinput what plugins tell workers of pytest-xdist, for which they take the ranks
    """

    arguments: list[str]
    sizes: list[int]
    missing: str = ""
    remaining: list[str] | None = None
    limit: float = 300.0
    terminal: str = ""
    workerinput: dict[str, Any] = field(default_factory=dict)

    _NAME = "session.json"

    def write(self, folder: Path) -> None:
        """Write it for the ranks of a job."""
        (folder / self._NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Orders:
        return cls(**json.loads((folder / cls._NAME).read_text(encoding="utf-8")))
