"""Shardings of an array, and the steps from one sharding to another with their costs: no data, no MPI."""

from itertools import product
from math import prod
import re

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from pce_mpi.distributed.placements import Partial, Placement, Replicate, Shard
from pce_mpi.distributed.sharding import Sharding, steps, wire_bytes
from ranks.grids import nested, placements_of, ranks_of, spread

SQUARE = (("data", 2), ("model", 2))
LINE = (("data", 3),)
SUM, AVG, MAX, MIN = (Partial(operator) for operator in ("sum", "avg", "max", "min"))
REPLICATE = Replicate()


def blocks_of(sharding):
    """Return each rank's part, in rank order, of an array whose elements are their own numbers."""
    whole = np.arange(prod(sharding.shape)).reshape(sharding.shape)
    return [whole[sharding.slices(where)] for where in ranks_of(sharding.dims)]


# ------------------------------------------------------------------------------------------------------------ shardings


def test_dims_that_are_not_named_replicate():
    sharding = Sharding.of(SQUARE, (5, 4), {"model": Shard(1)})
    assert sharding.by_dim == {"data": Replicate(), "model": Shard(1)}
    assert sharding.placements == (Replicate(), Shard(1))
    assert sharding.splits == (None, (0, 2, 4))
    assert sharding == Sharding.of(SQUARE, (5, 4), {"model": Shard(1), "data": Replicate()})
    assert Sharding.of(SQUARE, (5, 4), {}) == sharding.replicated


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 3), (3, 2), (2, 2, 2), (1, 3, 2)], ids=str)
def test_blocks_are_those_of_nested_array_split(sizes):
    dims = tuple(zip("abc", sizes, strict=False))
    for shape in [(0,), (1,), (7,), (25,), (3, 10), (10, 0)]:
        for axis in range(len(shape)):
            sharding = Sharding.of(dims, shape, dict.fromkeys((name for name, _ in dims), Shard(axis)))
            whole = np.arange(prod(shape)).reshape(shape)
            for where, block in zip(ranks_of(dims), blocks_of(sharding), strict=True):
                expected = nested(whole, sizes, tuple(where.values()), axis)
                assert block.shape == expected.shape == sharding.local_shape(where)
                assert block.tolist() == expected.tolist()


def test_axes_are_counted_from_end_when_negative():
    assert Sharding.of(LINE, (6, 4), {"data": Shard(-1)}) == Sharding.of(LINE, (6, 4), {"data": Shard(1)})
    assert Sharding.of(LINE, (6, 4), {"data": Shard(-2)}).by_dim == {"data": Shard(0)}
    assert spread(LINE, (6, 4), Replicate()).with_placements({"data": Shard(-1)}).by_dim == {"data": Shard(1)}


@pytest.mark.parametrize(
    ("shape", "placements", "kind", "text"),
    [
        ((4,), {"rows": Shard(0)}, ValueError, "the mesh has no dim 'rows'; its dims are data, model"),
        ((4,), {"data": Shard(1)}, ValueError, "data=Shard(1) is out of bounds for an array of 1 dimensions"),
        ((4,), {"model": Shard(-2)}, ValueError, "model=Shard(-2) is out of bounds for an array of 1 dimensions"),
        ((), {"data": Shard(0)}, ValueError, "data=Shard(0) is out of bounds for an array of 0 dimensions"),
        ((4,), {"data": 0}, TypeError, "data must be Shard(axis), Replicate() or Partial(operator), got 0"),
        ((4,), {"data": "sum"}, TypeError, "data must be Shard(axis), Replicate() or Partial(operator), got 'sum'"),
        ((4,), {"data": [Shard(0)]}, TypeError, "data must be Shard(axis), Replicate() or Partial(operator), got [S"),
        ((4,), {"data": Shard}, TypeError, "data must be Shard(axis), Replicate() or Partial(operator), got <class"),
        ((4,), {"data": SUM, "model": MAX}, ValueError, "only sum and avg mix over different dims, got ['max', 'sum']"),
        ((4,), {"data": MIN, "model": MAX}, ValueError, "only sum and avg mix over different dims, got ['max', 'min']"),
        ((4,), {"data": AVG, "model": MIN}, ValueError, "only sum and avg mix over different dims, got ['avg', 'min']"),
    ],
)
def test_sharding_that_cannot_be_says_why(shape, placements, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        Sharding.of(SQUARE, shape, placements)
    if kind is ValueError or "data" in placements:
        with pytest.raises(kind, match=re.escape(text)):
            Sharding.of(SQUARE, shape, {}).with_placements(placements)


def test_shardings_are_compared_by_value():
    different = [
        spread(SQUARE, (4, 6), Shard(0), Shard(1)),
        spread(SQUARE, (4, 6), Shard(1), Shard(0)),
        spread(SQUARE, (4, 6), Shard(0), Shard(0)),
        spread(SQUARE, (4, 7), Shard(0), Shard(1)),
        spread(SQUARE, (4, 6), Shard(0), SUM),
        spread(SQUARE, (4, 6), Shard(0), AVG),
        spread((("data", 2), ("classes", 2)), (4, 6), Shard(0), Shard(1)),
        spread((("data", 2), ("model", 3)), (4, 6), Shard(0), Shard(1)),
        Sharding.of(SQUARE, (4, 6), {"data": Shard(0), "model": Shard(1)}, {0: (0, 1, 4)}),
    ]
    again = [
        Sharding(each.dims, each.shape, each.placements, each.splits)  # not the one that `of` has kept
        for each in different
    ]
    for (i, a), (j, b) in product(enumerate(different), enumerate(again)):
        assert (a == b) == (i == j)
        assert (hash(a) == hash(b)) or i != j
    assert len({*different, *again}) == len(different)
    assert different[0] != "data: Shard(0), model: Shard(1)"


def test_sharding_prints_placements_and_uneven_splits():
    assert str(spread(SQUARE, (10, 4), Shard(0), SUM)) == "data: Shard(0), model: Partial('sum')"
    assert str(spread(SQUARE, (10, 4), Shard(0), Shard(0))) == "data: Shard(0), model: Shard(0)"
    uneven = Sharding.of(SQUARE, (10, 4), {"data": Shard(1), "model": Shard(0)}, {0: (0, 9, 10), 1: (0, 2, 4)})
    assert str(uneven) == "data: Shard(1), model: Shard(0); axis 0 split at [9]"


def test_changed_dim_balances_its_own_axes_only():
    dims = (("a", 2), ("b", 2), ("c", 2))
    splits = {0: (0, 1, 9), 1: (0, 7, 8), 2: (0, 1, 7)}
    before = Sharding.of(dims, (9, 8, 7), {"a": Shard(0), "b": Shard(1), "c": Shard(2)}, splits)
    # b leaves axis 1 and joins a on axis 0; axis 2 stays as it was.
    after = before.with_placements({"b": Shard(0)})
    assert after.placements == (Shard(0), Shard(0), Shard(2))
    assert after.splits == ((0, 3, 5, 7, 9), None, (0, 1, 7))
    assert before.with_placements({"b": SUM}).splits == ((0, 1, 9), None, (0, 1, 7))
    # A dim that is named is balanced even where its placement stays.
    assert before.with_placements({"a": Shard(0)}).splits == ((0, 5, 9), (0, 7, 8), (0, 1, 7))
    assert before.with_placements({}) == before


def test_natural_sharding_keeps_shards_and_replicates_partials():
    dims = (("a", 2), ("b", 2), ("c", 2))
    sharding = Sharding.of(dims, (9, 8), {"a": SUM, "b": Shard(1), "c": AVG}, {1: (0, 0, 8)})
    assert sharding.natural == Sharding.of(dims, (9, 8), {"b": Shard(1)}, {1: (0, 0, 8)})
    assert sharding.natural.natural == sharding.natural
    assert sharding.replicated == Sharding.of(dims, (9, 8), {})


@st.composite
def shardings(draw, dims=None, shape=None):
    """Any sharding, of any array over any mesh of up to three dims, balanced or not."""
    if dims is None:
        dims = tuple(zip("abc", draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), strict=False))
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    kinds = draw(st.sampled_from([("sum", "avg"), ("max",), ("min",)]))
    placements = [draw(st.sampled_from(placements_of(len(shape), *kinds))) for _ in dims]
    seed = draw(st.sampled_from([None, *range(5)]))
    return spread(dims, shape, *placements, seed=None if seed is None else [seed])


@st.composite
def pairs_of_shardings(draw):
    source = draw(shardings())
    return source, draw(shardings(source.dims, source.shape))


# ------------------------------------------------------------------------------------------------------ redistributions

# The steps that one dim of the mesh takes from one placement to another: the table of redistributions.
GATHER, EXCHANGE, REDUCE, SCATTER = "all_gather", "all_to_all", "all_reduce", "reduce_scatter"
PARTIALS = (SUM, AVG, MAX, MIN)
TABLE: dict[tuple[Placement, Placement], tuple[str, ...]] = {
    (Replicate(), Replicate()): (),
    (Replicate(), Shard(0)): ("slice",),
    (Replicate(), Shard(1)): ("slice",),
    **{(Replicate(), partial): ("keep",) for partial in PARTIALS},
    **{(partial, Replicate()): (REDUCE,) for partial in PARTIALS},
    **{(one, other): (REDUCE, "keep") if one != other else () for one in PARTIALS for other in PARTIALS},
    **{(partial, Shard(axis)): (SCATTER,) for partial in PARTIALS for axis in (0, 1)},
    **{(Shard(axis), SUM): ("pad",) for axis in (0, 1)},
    **{(Shard(axis), partial): (GATHER, "keep") for partial in (AVG, MAX, MIN) for axis in (0, 1)},
    (Shard(0), Replicate()): (GATHER,),
    (Shard(1), Replicate()): (GATHER,),
    (Shard(0), Shard(0)): (),
    (Shard(1), Shard(1)): (),
    (Shard(0), Shard(1)): (EXCHANGE,),
    (Shard(1), Shard(0)): (EXCHANGE,),
}


def verbs(source: Sharding, target: Sharding) -> tuple[str, ...]:
    return tuple(step.verb for step in steps(source, target))


def test_table_has_every_pair_of_placements():
    assert set(TABLE) == set(product(placements_of(2, "sum", "avg", "max", "min"), repeat=2))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(6, 6), (7, 5), (1, 2), (0, 3)], ids=str)
def test_steps_on_one_dim_follow_the_table(shape, size):
    dims = (("data", size),)
    taken = {pair: verbs(spread(dims, shape, pair[0]), spread(dims, shape, pair[1])) for pair in TABLE}
    assert taken == TABLE


def test_other_split_points_take_all_to_all():
    source = Sharding.of(LINE, (6, 4), {"data": Shard(0)}, {0: (0, 0, 5, 6)})
    target = Sharding.of(LINE, (6, 4), {"data": Shard(0)})
    assert verbs(source, target) == verbs(target, source) == (EXCHANGE,)
    other_axis = Sharding.of(LINE, (6, 4), {"data": Shard(1)}, {1: (0, 4, 4, 4)})
    assert verbs(source, other_axis) == verbs(other_axis, source) == (EXCHANGE,)
    # Two dims on one axis move together.
    nested = Sharding.of(SQUARE, (6, 4), {"data": Shard(0), "model": Shard(0)}, {0: (0, 1, 1, 1, 6)})
    (step,) = steps(nested, spread(SQUARE, (6, 4), Shard(0), Shard(0)))
    assert (step.verb, step.dims) == (EXCHANGE, ("data", "model"))


def sharing(source: Sharding, target: Sharding) -> bool:
    """Return whether dims get in each other's way: two of them shard one axis, at once or one after the other."""
    return any(len({*source.dims_of(axis), *target.dims_of(axis)}) > 1 for axis in range(len(source.shape)))


def legal_pairs(*kinds: str) -> list[tuple[Sharding, Sharding]]:
    every = list(product(placements_of(2, *kinds), repeat=2))
    return [(spread(SQUARE, (6, 7), *one), spread(SQUARE, (6, 7), *other)) for one, other in product(every, repeat=2)]


@pytest.mark.parametrize("kinds", [("sum", "avg"), ("max",), ("min",)], ids=" ".join)
def test_steps_on_two_dims_follow_the_table(kinds):
    apart = [pair for pair in legal_pairs(*kinds) if not sharing(*pair)]
    assert len(apart) > 100
    for source, target in apart:
        taken = [(dim, step.verb) for step in steps(source, target) for dim in step.dims]
        for dim in ("data", "model"):
            mine = tuple(verb for name, verb in taken if name == dim)
            assert mine == TABLE[source.by_dim[dim], target.by_dim[dim]], f"{dim}: {source} -> {target}"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Both dims on axis 0, all at once.
        ((Replicate(), Replicate()), (Shard(0), Shard(0)), ["slice data, model"]),
        ((Shard(0), Shard(0)), (Replicate(), Replicate()), ["all_gather data, model"]),
        ((SUM, SUM), (Shard(0), Shard(0)), ["reduce_scatter data, model"]),
        ((Shard(0), Shard(0)), (SUM, SUM), ["pad model", "pad data"]),
        # The inner dim comes and goes within the blocks of the outer one.
        ((Shard(0), Replicate()), (Shard(0), Shard(0)), ["slice model"]),
        ((Shard(0), SUM), (Shard(0), Shard(0)), ["reduce_scatter model"]),
        ((Shard(0), Shard(1)), (Shard(0), Shard(0)), ["all_to_all model"]),
        ((Shard(0), Shard(0)), (Shard(0), Replicate()), ["all_gather model"]),
        ((Shard(0), Shard(0)), (Shard(0), SUM), ["pad model"]),
        ((Shard(0), Shard(0)), (Shard(0), Shard(1)), ["all_to_all model"]),
        # The outer one cannot: the blocks of the inner dim are within its own, so both are gathered.
        ((Shard(0), Shard(0)), (Replicate(), Shard(0)), ["all_gather data, model", "slice model"]),
        ((Shard(0), Shard(0)), (SUM, Shard(0)), ["all_gather data, model", "slice model", "keep data"]),
        ((Replicate(), Shard(0)), (Shard(0), Shard(0)), ["all_gather model", "slice data, model"]),
        ((SUM, Shard(0)), (Shard(0), Shard(0)), ["all_reduce data", "all_gather model", "slice data, model"]),
        # One axis passes from one dim to the other.
        ((Shard(0), Replicate()), (Replicate(), Shard(0)), ["all_gather data", "slice model"]),
        ((Shard(0), Shard(1)), (Shard(1), Shard(0)), ["all_gather data", "all_to_all model", "slice data"]),
        # Sums of both dims are one step, whatever they are of.
        ((SUM, AVG), (Replicate(), Replicate()), ["all_reduce data, model"]),
        ((Replicate(), Replicate()), (SUM, AVG), ["keep data, model"]),
        # The slice comes first, so that the sum is of half as much, and the gathering last.
        ((Replicate(), SUM), (Shard(0), Replicate()), ["slice data", "all_reduce model"]),
        ((Shard(0), SUM), (Replicate(), Replicate()), ["all_reduce model", "all_gather data"]),
    ],
)
def test_steps_of_two_dims_together(before, after, expected):
    taken = steps(spread(SQUARE, (6, 7), *before), spread(SQUARE, (6, 7), *after))
    assert [f"{step.verb} {', '.join(step.dims)}" for step in taken] == expected


@pytest.mark.parametrize(
    "target",
    [spread(SQUARE, (5, 3), SUM, SUM), spread(SQUARE, (5,), SUM, SUM), spread((("data", 4),), (5, 4), SUM)],
    ids=str,
)
def test_steps_to_another_shape_or_mesh_are_refused(target):
    source = spread(SQUARE, (5, 4), SUM, SUM)
    text = f"cannot redistribute shape (5, 4) over {dict(SQUARE)} to {target.shape} over {dict(target.dims)}"
    with pytest.raises(ValueError, match=re.escape(text)):
        steps(source, target)


@settings(max_examples=60)
@given(pair=pairs_of_shardings())
def test_steps_lead_legally_to_the_destination(pair):
    source, target = pair
    at = source
    for step in steps(source, target):
        assert step.before == at
        assert step.before != step.after
        Sharding.of(step.after.dims, step.after.shape, step.after.by_dim)  # no operators that do not mix
        at = step.after
    assert at == target
    assert (steps(source, target) == ()) == (source == target)


@settings(max_examples=60)
@given(pair=pairs_of_shardings())
def test_steps_send_no_more_than_by_replicating(pair):
    source, target = pair
    directly = sum(wire_bytes(step, 8) for step in steps(source, target))
    by_way = sum(wire_bytes(step, 8) for step in steps(source, source.replicated))
    assert directly <= by_way + 1e-9


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_bytes_on_wire_follow_well_known_algorithms(parts):
    dims = (("data", parts), ("model", 2))
    shape = (12, 24)
    n = 12 * 24 * 8  # of the whole array; along data, with model replicated
    share = (parts - 1) / parts

    def wire(before, after, model=REPLICATE):
        (step,) = steps(spread(dims, shape, before, model), spread(dims, shape, after, model))
        return wire_bytes(step, 8)

    for model, held in ((Replicate(), n), (Shard(1), n / 2), (SUM, n)):
        assert wire(Shard(0), Replicate(), model) == pytest.approx(share * held)
        assert wire(SUM, Shard(0), model) == pytest.approx(share * held)
        assert wire(SUM, Replicate(), model) == pytest.approx(2 * share * held)
        assert wire(Replicate(), Shard(0), model) == wire(Replicate(), SUM, model) == wire(Shard(0), SUM, model) == 0
    assert wire(Shard(0), Shard(1)) == pytest.approx(share * n / parts)
    # Over both dims together, as over one of as many ranks.
    (step,) = steps(spread(dims, shape, SUM, SUM), spread(dims, shape, Replicate(), Replicate()))
    assert wire_bytes(step, 8) == pytest.approx(2 * (2 * parts - 1) / (2 * parts) * n)


def test_step_says_what_it_changes():
    (step,) = steps(spread(SQUARE, (6, 7), SUM, AVG), spread(SQUARE, (6, 7), Replicate(), Replicate()))
    assert (step.placement_before, step.placement_after) == ("Partial('sum'), Partial('avg')", "Replicate()")
    (step,) = steps(spread(SQUARE, (6, 7), Shard(0), SUM), spread(SQUARE, (6, 7), Shard(1), SUM))
    assert (step.placement_before, step.placement_after) == ("Shard(0)", "Shard(1)")
    assert step.sends
