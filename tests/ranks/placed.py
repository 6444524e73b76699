"""Arrays placed on a mesh: to make them, to trace an operation on them, and to check what came of it."""

from collections.abc import Callable
from typing import Any

import numpy as np

import pce_mpi as pce
from pce_mpi import DistArray, Mesh, Partial, Replicate
from pce_mpi.distributed.placements import Placement
from ranks.grids import assembled, local_of, spread

SUM, AVG, MAX, MIN = (Partial(operator) for operator in ("sum", "avg", "max", "min"))
R = Replicate()

ROUNDING = 64 * float(np.finfo(np.float64).eps)  # of a few dozen additions; whole numbers are exact


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers from 1 to 5, of which sums and products are exact."""
    return np.random.default_rng([seed, *shape]).integers(1, 6, shape).astype(np.float64)


def at(mesh: Mesh, whole: Any, *placements: Placement, requires_grad: bool = False, seed: int = 0, splits: Any = None):
    """The distributed array that is `whole`, with random terms where it is Partial, and random `splits` if asked."""
    whole = np.asarray(whole)
    sharding = spread(mesh.dim_sizes, whole.shape, *placements, seed=splits)
    return DistArray(local_of(whole, sharding, mesh.coordinates, seed), mesh, sharding, requires_grad=requires_grad)


def whole_of(x: DistArray) -> np.ndarray:
    """The global array, put together from what the ranks hold, which must be equal bits where it should be equal."""
    return assembled(x.sharding, x.mesh.comm(*x.mesh.dims).allgather(np.asarray(x.local)))


def traced(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, pce.Trace]:
    with pce.trace() as trace:
        result = function(*arguments, **options)
    return result, trace


def collectives(trace: pce.Trace, **where: Any) -> list[str]:
    return [event.collective for event in trace.select(**where)]


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The type and the text of the error of `call`; empty if it returns."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def check(
    found: Any,
    expected: Any,
    *placements: Placement,
    sent: list[str] | None = None,
    silent: bool = False,
    name: str = "",
) -> Any:
    """Collective: an array, or one with its trace, is `expected` and placed so on every rank; gives the array.

    `sent` are the payload collectives of the trace; a `silent` one has no event at all.
    """
    x, trace = found if isinstance(found, tuple) else (found, None)
    got = whole_of(x)
    assert x.sharding.placements == placements, name
    assert got.shape == np.shape(expected), name
    np.testing.assert_allclose(got, expected, rtol=ROUNDING, atol=ROUNDING, err_msg=name)
    assert sent is None or collectives(trace) == sent, name
    assert not silent or trace.count(purpose=None) == 0, name
    return x
