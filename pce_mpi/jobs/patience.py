"""Limits on time that mean the same on a busy machine: they count the seconds of one that has nothing else to do."""

from collections.abc import Callable
from os import getloadavg
import time

from pce_mpi.jobs.mpiexec import number_of_cores


def slowdown(more: int = 0) -> float:
    """Return how many times longer everything takes now, as more processes want a core than there are: 1 or more.

    So many `more` processes are about to start, which no load shows yet. It is at most 50: the load of a host with many
    more cores than this process may use says too much.
    """
    return min(max(1.0, (getloadavg()[0] + more) / number_of_cores()), 50.0)


class Patience:
    """So many seconds; on a busy machine they pass as slowly as everything else."""

    # As it is at import: what is timed may patch the clock, in every module that has it.
    _now = staticmethod(time.monotonic)

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.looked = self._now()

    def is_over(self) -> bool:
        """Return whether they have passed; the caller asks again and again."""
        now = self._now()
        self.left -= (now - self.looked) / slowdown()
        self.looked = now
        return self.left < 0


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once `condition()` is true; `TimeoutError` if it is not for so many seconds."""
    patience = Patience(seconds)
    while not condition():
        if patience.is_over():
            raise TimeoutError(f"{condition} is not true after {seconds:g} s")
        time.sleep(0.02)
