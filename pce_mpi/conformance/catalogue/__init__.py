"""The cases, family by family; what each one catches stands beside it."""

from collections.abc import Iterator

from pce_mpi.conformance.cases import Case
from pce_mpi.conformance.catalogue import calls, layouts, numbers, options, special_values, targets

__all__ = ["families"]


def families(main: str) -> Iterator[Case]:
    """Every case; those that come in one dtype only come in `main`."""
    for module in (numbers, special_values, layouts, targets, options, calls):
        yield from module.families(main)
