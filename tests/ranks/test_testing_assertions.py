"""Assertions for people who test their own programs: numbers, bits and values on ranks, and the words of a failure."""

from decimal import Decimal
from fractions import Fraction

import ml_dtypes
from mpi4py import MPI
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Shard
from pce_mpi.testing.assertions import assert_close, assert_same_bits, assert_same_on_ranks, assert_ulps
from pce_mpi.testing.placing import shards_of
from ranks.grids import mesh_of
from ranks.placed import SUM, at, error_of
from ulps import ulp

SELF = MPI.COMM_SELF
HALVES = [np.float16, ml_dtypes.bfloat16]


def failure_of(ranks, call, *arguments, **options):
    """The type and the text of the error of a call, which must be those of every rank."""
    found = error_of(lambda: call(*arguments, **options))
    assert set(ranks.allgather(found)) == {found}
    return found


def words_of(ranks, call, *arguments, **options):
    """The words of an assertion that fails alike on every rank."""
    kind, text = failure_of(ranks, call, *arguments, **options)
    assert kind == "AssertionError"
    return text


# ---------------------------------------------------------------------------------------------------------- one process


def test_failure_shows_the_line_of_the_test_alone():
    with pytest.raises(AssertionError) as failure:
        assert_ulps(1.0, 2.0, 1)
    assert [str(entry.path) for entry in failure.traceback.filter(failure)] == [__file__]


@pytest.mark.parametrize("dtype", [*HALVES, np.float32, np.float64])
def test_ulps_are_neighbours_of_each_dtype(dtype):
    exact = np.array([0.0, 1.0, 1.5, -3.0, 1 / 1024], dtype)
    neighbours = (exact.astype(np.float64) + 2 * ulp(exact, dtype)).astype(dtype)
    assert_ulps(neighbours, exact, 2)
    text = words_of(SELF, assert_ulps, neighbours, exact, 1.5)
    assert text.startswith(f"more than 1.5 ulp of {np.dtype(dtype)} off: 5 of 5 elements\n  at (0,): got ")
    assert text.count(", 2 ulp") == 3


@pytest.mark.parametrize("exact", [Fraction(1, 3), mpmath.mpf(1) / 3, Decimal(1) / 3, 10**400])
def test_exact_numbers_have_all_their_digits(exact):
    with mpmath.workprec(200):
        exact = mpmath.mpf(1) / 3 if isinstance(exact, mpmath.mpf) else exact
        nearest = np.array([float(exact) if exact < 1 else np.inf])
        assert_ulps(nearest, [exact], 1 / 3)
        if exact < 1:  # 1/3 is a third of an ulp from the nearest float64
            with pytest.raises(AssertionError, match=r"0\.333 ulp"):
                assert_ulps(nearest, [exact], 0.33)


def test_whole_numbers_beyond_float64_are_told_apart():
    big = 2**60
    assert_ulps(np.array([big + 1]), np.array([big]), 1)
    text = words_of(SELF, assert_ulps, np.array([big + 1]), np.array([big]), 0)
    assert text == f"more than 0 ulp of int64 off: 1 of 1 elements\n  at (0,): got {big + 1}, exact {big}"
    with pytest.raises(AssertionError):
        assert_close(np.array([1.0]), [big], 0.5)
    with pytest.raises(AssertionError):
        assert_ulps(np.array([True, False]), [True, True], 0.5)


@pytest.mark.parametrize(
    "exact",
    [2.0**53, [2.0**53], [Fraction(2**53)], np.array([np.float32(2**53)], object), np.array([2**53], np.float32)],
)
def test_whole_numbers_are_compared_exactly_with_floats(exact):
    got = np.full(np.shape(exact), 2**53 + 1)
    text = words_of(SELF, assert_ulps, got, exact, 0.5)
    assert text.startswith("more than 0.5 ulp of int64 off: 1 of 1 elements\n")
    assert_ulps(got, exact, 1)
    with pytest.raises(AssertionError):
        assert_close(got, exact, rtol=0, atol=0.5)
    with pytest.raises(AssertionError):
        assert_ulps(got, np.full_like(exact, np.inf), 1)


SPECIAL = [0.0, -0.0, 1.0, 1.0 + 1e-7, -1.0, 3e38, np.inf, -np.inf, np.nan, 5e-324]


@pytest.mark.parametrize(("rtol", "atol"), [(0, 0), (1e-7, 0), (0, 1e-7), (1e-3, 1e-3), (1, 0), (np.inf, 0)])
def test_close_numbers_are_those_of_numpy(rtol, atol):
    with np.errstate(all="ignore"):
        for got in SPECIAL:
            for expected in SPECIAL:
                numbers = got, expected, rtol, atol
                right = failure_of(SELF, np.testing.assert_allclose, *numbers)[0]
                assert failure_of(SELF, assert_close, *numbers)[0] == right, numbers


def test_numbers_that_round_to_infinity_are_infinite():
    assert_ulps(np.float32([np.inf, -np.inf, np.nan]), [1e39, -np.inf, np.nan], 0)
    for got, exact in [(np.inf, 1.0), (np.inf, -np.inf), (np.nan, 1.0), (3e38, np.inf), (3e38, 1e39)]:
        text = error_of(lambda: assert_ulps(np.float32(got), exact, 1e9))[1]  # noqa: B023  # called at once
        assert (
            text
            == f"more than 1e+09 ulp of float32 off: 1 of 1 elements\n  at (): got {np.float32(got)!s}, exact {exact}"
        )


def test_other_shapes_are_failures_with_both():
    assert error_of(lambda: assert_close(np.ones(3), [1.0])) == (
        "AssertionError",
        "got shape (3,), expected shape (1,)",
    )
    found = error_of(lambda: assert_ulps(np.ones(2), np.ones(3), 0, offset=2))
    assert found == ("AssertionError", "got shape (2,) at (2,), exact shape (3,)")


# ---------------------------------------------------------------------------------------------------------------- ranks

WHOLE = np.arange(12.0).reshape(2, 6)


def test_failure_of_last_rank_is_that_of_all(comm):
    for piece in shards_of(WHOLE, comm):
        assert_ulps(piece.local, WHOLE, 0, comm=comm, offset=piece.offset)
        assert_close(piece.local, WHOLE, comm=comm, offset=piece.offset)
    piece = next(shards_of(WHOLE, comm))
    if comm.rank == comm.size - 1:
        piece.local[0, -1] += 0.5
        piece.local[1, -1] = np.nan
    assert words_of(comm, assert_ulps, piece.local, WHOLE, 1, comm=comm, offset=piece.offset) == (
        f"rank {comm.size - 1}: more than 1 ulp of float64 off: 2 of {comm.allgather(piece.local.size)[-1]} elements\n"
        "  at (1, 5): got nan, exact 11.0\n  at (0, 5): got 5.5, exact 5.0, 5.63e+14 ulp"
    )


def test_distributed_array_knows_global_indices(comm):
    mesh, wrong = mesh_of(comm, comm.size), WHOLE.copy()
    wrong[1, 5] = 0.0
    for placement in (Shard(0), Shard(1), SUM, pce.Replicate()):
        x = at(mesh, WHOLE, placement)
        for expected in (WHOLE, x, pce.distribute(WHOLE, mesh)):
            assert_close(x, expected)
        text = words_of(comm, assert_close, x, wrong, rtol=0.0, atol=1.0)
        assert "along data: further off than rtol=0, atol=1: 1 of " in text
        assert text.endswith("  at (1, 5): got 11.0, expected 0.0")


def test_wrong_argument_of_an_assertion_raises_everywhere(comm, several):
    mesh, last = mesh_of(comm, comm.size), comm.size - 1
    x, bad = pce.distribute(WHOLE, mesh, data=Shard(1)), comm.rank == last
    for call, kind, text in [
        (lambda: assert_ulps(WHOLE, WHOLE, -1 if bad else 1, comm=comm), "ValueError", "most must not be negative"),
        (lambda: assert_close(x, [[object()]] if bad else WHOLE), "TypeError", "expected cannot be taken as an array"),
        (lambda: assert_close(WHOLE, WHOLE, comm=comm, offset=1 if bad else None), "ValueError", "offset must have a"),
        (lambda: assert_close(x, WHOLE, offset=(0, 0) if bad else None), "TypeError", "offset is for plain arrays"),
        (lambda: assert_same_bits(1j if bad else 1.0, comm=comm), "TypeError", "array 0 must be bool, integers"),
        (lambda: assert_same_on_ranks(x if bad else 1, comm), "TypeError", "the value cannot be sent to other ranks"),
    ]:
        found = failure_of(comm, call)
        assert found[0] == kind
        assert found[1].startswith(text)
        assert f"(rank {last}" in found[1]
    assert failure_of(comm, lambda: assert_ulps(1.0, 1.0, comm.rank, comm=comm))[0] == "CollectiveError"
    hollow = pce.normal(3, pce.Mesh.without_ranks(data=2), seed=0)
    for call in (lambda: assert_same_bits(1.0, comm=3), lambda: assert_close(hollow, 1.0), assert_same_bits):
        assert error_of(call)[0] == "TypeError"


# --------------------------------------------------------------------------------------------------------- bits, values


def test_bits_of_zeros_differ_but_nan_equal():
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert_same_bits(nan[:1], nan[1:])
    found = error_of(lambda: assert_same_bits(np.float32(0.0), np.float32(-0.0)))
    assert (
        found[1]
        == "array 1 has other bits than array 0: 1 of 1 elements\n  at (): -0.0 is 0x80000000, 0.0 is 0x00000000"
    )
    found = error_of(lambda: assert_same_bits(WHOLE, WHOLE, WHOLE.astype(np.float32)))
    assert found[1] == "array 2 has other bits than array 0: float32 (2, 6), not float64 (2, 6)"


def test_bits_are_compared_over_meshes_and_ranks(comm):
    alone, mesh = mesh_of(MPI.COMM_SELF, 1), mesh_of(comm, comm.size)
    one, many = (pce.distribute(WHOLE, on, data=Shard(1)) for on in (alone, mesh))
    assert_same_bits(one, many, WHOLE, at(mesh, WHOLE, SUM))
    other = np.where(WHOLE == 7, np.nextafter(7, 8), WHOLE)
    words = ": 1 of 12 elements\n  at (1, 1): 7.000000000000001 is 0x401c000000000001, 7.0 is 0x401c000000000000"
    text = words_of(comm, assert_same_bits, one, pce.distribute(other, mesh))
    who = f"rank{'s' * (comm.size > 1)} {', '.join(map(str, range(comm.size)))} along data"
    assert text == f"{who}: array 1 has other bits than array 0 of rank 0{words}"
    assert_same_bits(WHOLE, comm=comm)
    if comm.size > 1:
        mine = other if comm.rank == 1 else WHOLE
        for value in (mine, pce.from_local(mine, mesh)):
            text = words_of(comm, assert_same_bits, value, comm=comm)
            assert text == f"rank 1: array 0 has other bits than array 0 of rank 0{words}"
        text = words_of(comm, assert_same_bits, WHOLE[comm.rank == 1 :], comm=comm)
        assert text == "rank 1: array 0 has other bits than array 0 of rank 0: float64 (1, 6), not float64 (2, 6)"


@pytest.mark.ranks(1, 3)  # most ranks are two of three
def test_rank_that_differs_from_most_is_named(comm):
    def value(last, first=False):
        return {"loss": [0.5, np.float32([1, np.nan, last])], "name": "a", "none": None, "first": first}

    assert_same_on_ranks(value(2), comm)
    assert_same_on_ranks([np.nan, (1, {2})], comm)
    if comm.size == 1:
        return
    said = "rank 1 differs from ranks 0, 2"
    for other, words in [
        (value(3), " at ['loss'][1]: other elements: 1 of 3 elements\n  at (2,): 3.0, not 2.0"),
        (value(2, True), " at ['first']: True, not False"),
        (value(2) | {"name": np.zeros(1)}, " at ['name']: array([0.]), not 'a'"),
        (value(2) | {"loss": [0.5, np.zeros(3)]}, " at ['loss'][1]: float64 (3,), not float32 (3,)"),
        (value(2) | {"loss": [0.5]}, " at ['loss']: 'list of 1', not 'list of 2'"),
        ({**{key: x for key, x in value(2).items() if key != "none"}, "n": 1}, ": it has ['n'], not ['name']"),
    ]:
        mine = other if comm.rank == 1 else value(2)
        assert words_of(comm, assert_same_on_ranks, mine, comm) == said + words
    text = words_of(comm, assert_same_on_ranks, comm.rank, comm)
    assert text == "rank 1 differs from rank 0: 1, not 0\nrank 2 differs from rank 0: 2, not 0"
    big = np.int64(2**53 + 1) if comm.rank == 1 else np.float64(2**53)  # equal as float64
    assert words_of(comm, assert_same_on_ranks, big, comm).startswith(f"{said}: ")


# ----------------------------------------------------------------------------------------------------------------- cuts

CUTS = {
    1: ["balanced"],
    2: ["balanced", "uneven", "rank 0 empty", "rank 1 empty", "reversed"],
    3: ["balanced", "uneven", "rank 0 empty", "rank 2 empty", "reversed", "all on rank 0", "all on rank 2"],
}


@pytest.mark.ranks(1, 2, 3)
def test_cuts_cover_the_array_at_their_offsets(comm):
    for axis in (0, -1):
        whole = np.arange(14.0).reshape(2, 7) if axis else np.arange(14.0).reshape(7, 2)
        names = []
        for name, local, offset in shards_of(whole, comm, axis=axis):
            names.append(name)
            assert offset[axis + 1 if axis else 1] == 0
            pieces = sorted(
                (each for each in comm.allgather((offset, local)) if each[1].size), key=lambda each: each[0]
            )
            np.testing.assert_array_equal(np.concatenate([piece for _, piece in pieces], axis), whole, err_msg=name)
            assert np.shares_memory(local, whole) is False
        assert names == CUTS[comm.size]
    assert len({piece.name for piece in shards_of(np.zeros((3, 0)), comm)}) == 1
    for call in (lambda: shards_of(1.0, comm), lambda: shards_of(whole, comm, axis=2)):
        assert error_of(call)[0] == "ValueError"
    assert error_of(lambda: shards_of(whole, None))[0] == "TypeError"


def test_partial_of_averages_is_compared(comm):
    assert_close(at(mesh_of(comm, comm.size), WHOLE, Partial("avg")), WHOLE)
