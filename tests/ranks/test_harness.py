"""Guarantees that a test in tests/ranks may rely on."""

import hypothesis
from hypothesis import strategies as st
import pytest

from pce_mpi.comm.launcher import launcher_env
from pce_mpi.testing import in_step


def test_comm_holds_every_rank_that_was_launched(comm):
    told = launcher_env()
    assert comm.size == (1 if told is None else told.size)
    assert sorted(comm.allgather(comm.rank)) == list(range(comm.size))


@hypothesis.given(x=st.integers())
def test_every_rank_draws_same_examples(comm, x):
    with in_step(comm):
        assert comm.allgather(x) == [x] * comm.size


def test_example_failing_on_one_rank_fails_with_text(comm):
    with pytest.raises(
        AssertionError, match=rf"{'every rank' if comm.size == 1 else f'rank {comm.size - 1}'} of {comm.size} failed"
    ):
        with in_step(comm):
            assert comm.rank != comm.size - 1, "the last rank fails"


def test_every_rank_shrinks_to_the_same_example(comm):
    drawn = []

    @hypothesis.given(x=st.integers(0, 10_000), y=st.integers(0, 10_000))
    def fails_on_the_last_rank_only(x, y):
        drawn.append((x, y))
        with in_step(comm):
            if comm.rank == comm.size - 1 and x + y >= 1234:
                raise ValueError(f"{x} + {y} is too much")

    with pytest.raises(AssertionError, match=r"ValueError: 0 \+ 1234 is too much"):
        fails_on_the_last_rank_only()
    assert comm.allgather(drawn) == [drawn] * comm.size


@hypothesis.given(x=st.integers(0, 9))
def test_example_may_be_withdrawn_on_every_rank(comm, x):
    with in_step(comm):
        hypothesis.assume(x != 3)
        assert x != 3


def test_example_withdrawn_on_one_rank_fails(comm):
    expected = hypothesis.errors.UnsatisfiedAssumption if comm.size == 1 else AssertionError
    with pytest.raises(expected):
        with in_step(comm):
            hypothesis.assume(comm.rank != 0)
