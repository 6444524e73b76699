"""Plain arrays that ranks hold alike, and arguments that one rank alone leaves out: the ranks notice if they differ."""

from typing import Any

from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Partial, Replicate, Shard
from pce_mpi.arrays import checksum_of
from ranks.grids import mesh_of

NUMBERS = np.arange(12.0).reshape(4, 3)
PROBABILITIES = np.full((4, 3), 1 / 3)
FACTORS = np.array([1.0, 2.0, 4.0])
REMEDY = "Draw them from one seed on every rank, or let distribute take those of rank 0, by src_rank=0"


@pytest.fixture
def mesh(comm, impatient):
    return without_past(mesh_of(comm, comm.size))


@pytest.fixture
def grid(comm, impatient):
    return without_past(mesh_of(comm, 2, 2))


def without_past(mesh):
    """`mesh` after an agreement, in which ranks put errors and differences of earlier tests behind them."""
    text_of(lambda: agree(mesh))
    return mesh


def text_of(call):
    """The text of the `CollectiveError` of `call`, or of the next agreement; "" if all is alike."""
    try:
        call()
    except pce.CollectiveError as error:
        return str(error)
    return ""


def agree(mesh):
    mesh.agree(tuple(mesh.dims), "end of a test", {})


def differing(mesh, call):
    """The error of the ranks, which must be one, after `call` and an agreement."""

    def both():
        call()
        agree(mesh)

    text = text_of(both)
    assert set(mesh.comm(*mesh.dims).allgather(text)) == {text}
    return text


def of_rank(comm, array, ranks=(0,)):
    """`array`, with another last element on `ranks`."""
    array = np.array(array)
    if comm.rank in ranks:
        array.reshape(-1)[-1] += 1
    return array


def test_unseeded_models_are_refused_at_the_step(comm, mesh):
    w = np.random.default_rng(comm.rank).standard_normal((5, 4))
    x = pce.distribute(np.arange(40.0).reshape(8, 5) % 7, mesh, data=Shard(0))
    parameter = pce.distribute(w, mesh, requires_grad=True)
    for _ in range(100):  # more operations than are remembered by name
        pce.exp(x)
    pce.cross_entropy(x @ parameter, np.arange(8) % 4).backward()
    text = text_of(pce.SGD([parameter], lr=0.1).step)
    values = [
        f"values with checksum {checksum_of(np.random.default_rng(rank).standard_normal((5, 4))):08x} "
        f"(rank {rank} along data)"
        for rank in range(comm.size)
    ]
    expected = f"ranks have passed different arrays of shape (5, 4) to distribute: {', '.join(values)}. {REMEDY}"
    assert text == (expected if comm.size > 1 else "")


def test_arrays_that_differ_are_told_apart_by_rank(comm, mesh):
    text = differing(mesh, lambda: pce.distribute(of_rank(comm, NUMBERS), mesh))
    if comm.size > 1:
        others = f"rank{'s' * (comm.size > 2)} {', '.join(map(str, range(1, comm.size)))} along data"
        first, second = (f"{checksum_of(array):08x}" for array in (NUMBERS + 1 * (NUMBERS == 11), NUMBERS))
        assert f"values with checksum {first} (rank 0 along data), values with checksum {second} ({others})" in text
    assert differing(mesh, lambda: pce.distribute(NUMBERS, mesh)) == ""  # it is told once


@pytest.mark.parametrize("shape", [(0, 3), (), (2, 3)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "float32", "float64"])
def test_equal_arrays_of_any_dtype_are_alike(comm, mesh, dtype, shape):
    array = np.ones(shape, pce.arrays.dtype_named(dtype))
    assert differing(mesh, lambda: pce.distribute(array, mesh) + 1) == ""


def test_bits_are_compared_whatever_their_order_in_memory(comm, mesh):
    large = np.random.default_rng(0).standard_normal((40, 30))[::2, ::3]
    orders = [np.ascontiguousarray, np.asfortranarray, np.asarray, lambda array: array.T.copy().T]
    assert differing(mesh, lambda: pce.distribute(orders[comm.rank % 4](large), mesh)) == ""
    nan = np.array([1.0, np.nan])
    assert differing(mesh, lambda: pce.distribute(nan, mesh)) == ""
    zeros = np.array([0.0 if comm.rank else -0.0])
    assert (differing(mesh, lambda: pce.distribute(zeros, mesh)) != "") == (comm.size > 1)
    rows = NUMBERS[::-1] if comm.rank == 0 else NUMBERS
    assert (differing(mesh, lambda: pce.distribute(rows, mesh)) != "") == (comm.size > 1)


@pytest.mark.parametrize(
    ("placement", "compared"), [(Replicate(), True), (Partial("avg"), True), (Shard(0), False), (Shard(1), False)]
)
def test_array_is_compared_unless_every_dim_shards_it(comm, mesh, placement, compared):
    array = of_rank(comm, NUMBERS)
    text = differing(mesh, lambda: pce.distribute(array, mesh, data=placement))
    assert (text != "") == (compared and comm.size > 1)


@pytest.mark.ranks(4)  # dims of two ranks each
@pytest.mark.parametrize(
    ("placements", "compared"),
    [({"data": Shard(0), "model": Shard(1)}, False), ({"data": Shard(0)}, True), ({"model": Shard(1)}, True)],
)
def test_sharded_replicas_are_compared_as_global_arrays(comm, grid, placements, compared):
    assert differing(grid, lambda: pce.distribute(NUMBERS, grid, **placements)) == ""
    text = differing(grid, lambda: pce.distribute(of_rank(comm, NUMBERS), grid, **placements))
    assert (text != "") == compared


@pytest.mark.ranks(4)
def test_dim_of_one_rank_holds_no_replicas(comm, impatient):
    mesh = Mesh(comm, data=4, model=1)
    assert differing(mesh, lambda: pce.distribute(of_rank(comm, NUMBERS), mesh, data=Shard(0))) == ""


def test_array_of_src_rank_is_not_compared(comm, mesh):
    array = of_rank(comm, NUMBERS, range(1, comm.size))
    assert differing(mesh, lambda: pce.distribute(array, mesh, src_rank=0)) == ""


def test_array_on_gpu_is_compared_by_distribute_alone(comm, mesh, cupy):
    array = cupy.asarray(of_rank(comm, NUMBERS))
    text = differing(mesh, lambda: pce.distribute(array, mesh))
    assert ("different arrays of shape (4, 3) to distribute" in text) == (comm.size > 1)
    x = pce.distribute(cupy.asarray(NUMBERS), mesh)
    assert differing(mesh, lambda: x + array) == ""


attention: Any = pce.scaled_dot_product_attention  # takes plain arrays too
OPERANDS = [  # an operation beside a plain array, and its operand
    ("operand 1 of add", FACTORS, lambda x, array: x + array),
    ("operand 0 of multiply", FACTORS, lambda x, array: array * x),
    ("operand 1 of matmul", np.eye(3), lambda x, array: x @ array),
    ("operand 1 of matmul", FACTORS[:, None], lambda x, array: pce.matmul(x, array[:, 0])),
    ("operand 1 of einsum", FACTORS, lambda x, array: pce.einsum("ij,j->i", x, array)),
    ("operand 1 of clip", FACTORS, lambda x, array: pce.clip(x, array, None)),
    ("operand 0 of where", np.array([0, 1, 0]), lambda x, array: pce.where(array == 1, x, 0.0)),
    ("operand 1 of layer_norm", FACTORS, lambda x, array: pce.layer_norm(x, array)),
    ("operand 1 of add", FACTORS, lambda x, array: pce.layer_norm(x, FACTORS, array)),
    ("operand 1 of slice", np.array([0, 0]), lambda x, array: x[:, array]),
    ("operand 1 of slice", np.array([0, 0]), lambda x, array: x[:, array.tolist()]),
    ("operand 0 of embedding", NUMBERS, lambda x, array: pce.embedding(pce.distribute(np.arange(4), x.mesh), array)),
    ("operand 1 of embedding", np.array([0, 0]), lambda x, array: pce.embedding(array, x)),
    ("operand 1 of subtract", FACTORS, lambda x, array: pce.mse(x, array)),
    ("operand 0 of subtract", FACTORS.astype(np.float16), lambda x, array: pce.mse(array, x)),
    (
        "operand 2 of scaled_dot_product_attention",
        NUMBERS,
        lambda x, array: attention(x, NUMBERS, array),
    ),
    (
        "operand 1 of scaled_dot_product_attention",
        NUMBERS.astype(np.float16),
        lambda x, array: attention(x, array, NUMBERS),
    ),
    ("operand 1 of times", FACTORS, lambda x, array: pce.op(lambda x, y: x * y, name="times")(x, array)),
    ("operand 2 of cross_entropy", FACTORS, lambda x, array: pce.cross_entropy(x, [0, 1, 1, 0], weight=array)),
]


@pytest.mark.parametrize(("operand", "array", "call"), OPERANDS, ids=[f"{number}" for number, _ in enumerate(OPERANDS)])
def test_plain_operands_that_differ_are_named(comm, mesh, operand, array, call):
    x = pce.distribute(NUMBERS, mesh, data=Shard(0))
    assert differing(mesh, lambda: call(x, array)) == ""
    text = differing(mesh, lambda: call(x, of_rank(comm, array)))
    assert (f" as {operand}: values with checksum " in text) == (comm.size > 1)


def test_operand_that_is_sliced_is_not_compared(comm, mesh):
    x = pce.distribute(NUMBERS, mesh, data=Shard(0))
    rows = of_rank(comm, NUMBERS)
    assert differing(mesh, lambda: pce.mse(x * rows, rows)) == ""


def test_targets_are_compared_where_the_loss_does_not(comm, mesh):
    targets = of_rank(comm, [0, 1, 2, 0])
    rows = pce.distribute(NUMBERS, mesh, data=Shard(0))
    assert differing(mesh, lambda: pce.cross_entropy(rows, targets)) == ""  # of each target one rank has a copy
    alike = pce.distribute(NUMBERS, mesh)
    text = differing(mesh, lambda: pce.cross_entropy(alike, targets))
    assert ("as operand 1 of cross_entropy:" in text) == (comm.size > 1)
    text = differing(mesh, lambda: pce.cross_entropy(rows, of_rank(comm, PROBABILITIES)))
    assert text == ""


def test_targets_of_sharded_classes_are_read_once(comm, mesh, monkeypatch):
    read = []
    monkeypatch.setattr("pce_mpi.autograd.apply.checksum_of", lambda array: read.append(array.shape) or 1)
    classes = pce.distribute(NUMBERS, mesh, data=Shard(1))
    pce.cross_entropy(classes, [0, 1, 2, 0])
    pce.kl_divergence(classes, PROBABILITIES, rows=np.ones(4, bool))
    pce.class_statistics(classes, [0, 1, 2, 0])
    pce.take_classes(classes, [[0], [1], [2], [0]])
    w = pce.distribute(np.ones((3, 6)), mesh, data=Shard(1))
    pce.linear_cross_entropy(pce.distribute(NUMBERS, mesh), w, [0, 1, 2, 0])
    assert read == []
    text = text_of(lambda: pce.cross_entropy(classes, of_rank(comm, [0, 1, 1, 0])))
    assert ("ranks disagree on the values of targets" in text) == (comm.size > 1)
    agree(mesh)


@pytest.mark.ranks(4)
def test_targets_of_replicated_rows_are_compared_too(comm, grid):
    classes = pce.distribute(NUMBERS, grid, model=Shard(1))
    assert differing(grid, lambda: pce.cross_entropy(classes, [0, 1, 2, 0])) == ""
    targets = of_rank(comm, [0, 1, 1, 0], ranks=(0, 1))  # the ranks that share rows along "model" agree
    assert "as operand 1 of cross_entropy:" in differing(grid, lambda: pce.cross_entropy(classes, targets))
    both = pce.distribute(NUMBERS, grid, data=Shard(0), model=Shard(1))
    assert differing(grid, lambda: pce.cross_entropy(both, targets)) == ""


def test_arrays_alone_are_read_by_nobody(comm, mesh, monkeypatch):
    x, y = (pce.distribute(NUMBERS, mesh, requires_grad=True) for _ in range(2))
    monkeypatch.setattr("pce_mpi.autograd.apply.checksum_of", None)
    (pce.layer_norm(x * y, pce.distribute(FACTORS, mesh)) @ y.T).sum().backward()
    alone = Mesh(MPI.COMM_SELF, data=1)
    monkeypatch.setattr("pce_mpi.distributed.creation.checksum_of", None)
    pce.distribute(NUMBERS, alone) + NUMBERS
    hollow = Mesh.without_ranks(data=8)
    pce.distribute(NUMBERS, hollow) + NUMBERS


def test_arrays_of_functions_without_a_rule_are_compared(comm, mesh):
    x = pce.distribute(NUMBERS, mesh)
    scaled = pce.op(lambda x, by: x * by, name="scaled")
    text = differing(mesh, lambda: scaled(x, by=of_rank(comm, FACTORS)))
    assert ("scaled of" in text and "with checksum" in text) == (comm.size > 1)
    text = differing(mesh, lambda: np.interp(x, of_rank(comm, FACTORS), FACTORS))
    assert ("numpy.interp of" in text) == (comm.size > 1)
    text = differing(mesh, lambda: np.percentile(x, 50 if comm.rank else 40))
    assert ("numpy.percentile of" in text) == (comm.size > 1)
    text = differing(mesh, lambda: np.hypot.reduce(x, axis=1, keepdims=comm.rank == 0))
    assert (text != "") == (comm.size > 1)


LEFT_OUT = {  # functions of an array, and of an argument that is None on one rank alone
    "clip min": (lambda x, low: pce.clip(x, low, 1.0), 0.0),
    "clip max": (lambda x, high: pce.clip(x, 0.0, high), 1.0),
    "clip min, max": (lambda x, low: pce.clip(x, low, 1.0 if low is None else None), 1.0),
    "sum axis": (lambda x, axis: pce.sum(x, axis), 1),
    "mean axis": (lambda x, axis: pce.mean(x, axis), 1),
    "max axis": (lambda x, axis: pce.max(x, axis), 1),
    "min axis": (lambda x, axis: pce.min(x, axis), 1),
    "logsumexp axis": (lambda x, axis: pce.logsumexp(x, axis), 1),
    "var axis": (lambda x, axis: pce.var(x, axis), 1),
    "std axis": (lambda x, axis: pce.std(x, axis), 1),
    "cumsum axis": (lambda x, axis: pce.cumsum(x, axis), 1),
    "squeeze axis": (lambda x, axis: pce.squeeze(x[:1, :1], axis), 1),
    "transpose axes": (lambda x, axes: pce.transpose(x, axes), (0, 1)),
    "layer_norm scale": (lambda x, scale: pce.layer_norm(x, scale), FACTORS),
    "layer_norm bias": (lambda x, bias: pce.layer_norm(x, FACTORS, bias), FACTORS),
    "layer_norm scale, bias": (lambda x, a: pce.layer_norm(x, a, FACTORS if a is None else None), FACTORS),
    "rms_norm scale": (lambda x, scale: pce.rms_norm(x, scale), FACTORS),
    "attention scale": (lambda x, scale: pce.scaled_dot_product_attention(x, x, x, scale=scale), 1.0),
    "cross_entropy weight": (lambda x, weight: pce.cross_entropy(x, [0, 1, 2, 0], weight=weight), FACTORS),
    "cross_entropy softcap": (lambda x, softcap: pce.cross_entropy(x, [0, 1, 2, 0], softcap=softcap), 5.0),
    "cross_entropy margin": (lambda x, margin: pce.cross_entropy(x, [0, 1, 2, 0], margin=margin), (1.0, 0.0, 0.1)),
    "linear weight": (lambda x, weight: pce.linear_cross_entropy(x, x.T, [0, 1, 2, 0], weight=weight), np.ones(4)),
    "linear bias": (lambda x, bias: pce.linear_cross_entropy(x, x.T, [0, 1, 2, 0], bias=bias), np.ones(4)),
    "linear weight, bias": (
        lambda x, a: pce.linear_cross_entropy(x, x.T, [0, 1, 2, 0], weight=a, bias=np.ones(4) if a is None else None),
        np.ones(4),
    ),
    "kl_divergence rows": (lambda x, rows: pce.kl_divergence(x, PROBABILITIES, rows=rows), np.ones(4, bool)),
    "class_statistics targets": (lambda x, targets: pce.class_statistics(x, targets), np.zeros(4, int)),
    "class_statistics support": (
        lambda x, support: pce.class_statistics(x, support=support),
        (np.array([0, 1, 1, 2]), np.arange(5)),
    ),
    "nucleus top_k": (lambda x, k: pce.nucleus(x, top_k=k, top_p=0.5), 2),
    "nucleus top_p": (lambda x, p: pce.nucleus(x, top_p=p), 0.5),
    "nucleus min_p": (lambda x, p: pce.nucleus(x, min_p=p), 0.5),
    "split": (lambda x, sections: pce.split(x.T, 3 if sections is None else [1, 2], 0), 3),
    "split sections": (lambda x, sections: pce.split(x, 4 if sections is None else 2, 0), 2),
    "numpy.median axis": (lambda x, axis: np.median(x, axis), 1),
    "numpy.diff prepend": (lambda x, n: np.diff(x, n=n or 2), 1),
    "distribute requires_grad": (lambda x, grad: pce.distribute(NUMBERS, x.mesh, requires_grad=grad is None), True),
    "distribute src_rank": (lambda x, rank: pce.distribute(NUMBERS, x.mesh, src_rank=rank), 0),
    "from_local shape": (lambda x, shape: pce.from_local(x.local, x.mesh, shape=shape, **x.placements), (4, 3)),
    "getitem": (lambda x, index: x[index], slice(0, 2)),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.filterwarnings("ignore:numpy")
def test_argument_left_out_on_one_rank_is_noticed(comm, mesh, name, placement):
    call, value = LEFT_OUT[name]
    x = pce.distribute(NUMBERS, mesh, data=placement)
    for usual in (None, value):
        assert differing(mesh, lambda: call(x, usual)) == ""  # noqa: B023
    text = differing(mesh, lambda: call(x, None if comm.rank == 0 else value))
    assert (text != "") == (comm.size > 1)


def test_difference_after_a_refused_one_is_noticed(comm, mesh):
    x = pce.distribute(NUMBERS, mesh, data=Shard(0))
    for _ in range(3):
        text = text_of(lambda: pce.clip(x, None if comm.rank == 0 else 0.0, 1.0).sum().item())
        assert ("clip of" in text) == (comm.size > 1)
