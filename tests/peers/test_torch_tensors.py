"""CPU tensors of torch's as logits, targets and out: wrapped, not copied; those that wrap others are refused.

DTensors as logits are in test_dtensors.py.
"""

from mpi4py import MPI
import numpy as np
import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.arrays import as_array

ROWS, CLASSES = 5, 12


@pytest.fixture
def problem(comm):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, CLASSES, generator=generator)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    start, stop = pce.shard_range(CLASSES, comm.size, comm.rank)
    return logits, targets, slice(start, stop)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_torch_tensor_is_wrapped_without_copy(dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    array = as_array(tensor, "logits")
    tensor[1, 2] = 1.5
    assert array.shape == (3, 4)
    assert float(array[1, 2]) == 1.5
    assert array.dtype.name == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tensors_give_numbers_of_arrays_they_hold(comm, problem, dtype):
    logits, targets, mine = problem
    logits = logits.to(dtype)
    found = pce.softmax_cross_entropy_value_and_grad(logits[:, mine], targets, comm=comm)
    loss, dlogits = (as_array(each, "a result") for each in found)
    expected, gradient = dense.softmax_cross_entropy_value_and_grad(logits.double().numpy(), targets.numpy())
    assert abs(loss - expected) <= 4 * np.finfo(loss.dtype).eps * abs(expected)
    # Entries are at most 1/ROWS. Arithmetic in the logits' own dtype may cost 4 ulp of that, wider arithmetic 1.
    ulps = 1 if dtype.itemsize == 2 else 4
    error = np.abs(dlogits.astype(np.float64) - gradient[:, mine]).max(initial=0.0)
    assert error <= ulps * torch.finfo(dtype).eps * 2.0 ** np.floor(np.log2(1 / ROWS))


def test_gradient_is_written_into_the_given_tensor(comm, problem):
    logits, targets, mine = problem
    shard = logits[:, mine].clone()
    out = torch.full_like(shard, 7.0)
    _, returned = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm, out=out)
    _, expected = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm)
    _, in_place = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm, out=shard)
    assert returned is out and in_place is shard
    assert torch.equal(out, expected)
    assert torch.equal(shard, expected)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_is_written_where_dlpack_reads_alone(monkeypatch, dtype):
    def read_only(value, from_dlpack=np.from_dlpack):  # as NumPy 2.0 does
        array = from_dlpack(value)
        array.flags.writeable = False
        return array

    logits, targets = torch.ones(3, 4, dtype=dtype), torch.tensor([1, 0, 3])
    _, expected = pce.softmax_cross_entropy_value_and_grad(logits, targets)
    monkeypatch.setattr(np, "from_dlpack", read_only)
    out = torch.full_like(logits, 7.0)
    assert pce.softmax_cross_entropy_value_and_grad(logits, targets, out=out)[1] is out
    assert torch.equal(out, expected)


def test_tensor_that_requires_grad_is_refused_everywhere(comm, problem):
    logits, targets, mine = problem
    shard = logits[:, mine].clone().requires_grad_(comm.rank == comm.size - 1)
    with pytest.raises(TypeError, match=r"logits .* array: it requires a gradient, .* take \.detach\(\) here and"):
        pce.softmax_cross_entropy(shard, targets, comm=comm)
    loss = pce.softmax_cross_entropy(shard.detach(), targets, comm=comm)
    with torch.no_grad():
        assert torch.equal(pce.softmax_cross_entropy(shard, targets, comm=comm), loss)


# ---------------------------------------------------------------------------------- tensors that are not what they hold


@pytest.fixture(scope="module")
def alone():
    """A process group of torch that this rank has for itself."""
    if distributed.is_initialized():  # by tests of another file
        yield distributed.group.WORLD
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


class OfTheUsers(torch.Tensor):
    """A kind of tensor that a program has made."""


def negated(x):
    """The numbers of x, as the negative of those in memory."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag if x.is_floating_point() else torch._neg_view(-x)


def waiting(x):
    return functional.all_reduce(x, "sum", distributed.group.WORLD)


def over_a_mesh(x):
    return distribute_tensor(x, DeviceMesh("cpu", [0]), [Shard(0)])


def fake(x):
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def ragged(x):
    return torch.nested.nested_tensor(list(x.reshape(1, -1)), layout=torch.jagged)


RIGHT = {
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "buffer": torch.nn.Buffer,
    "negative": negated,
    "waiting": waiting,
}
REFUSED = {
    "over a mesh": (over_a_mesh, r"a DTensor of torch may have its elements elsewhere: take \.to_local\(\) or"),
    "fake": (fake, "a FakeTensor of torch may have its elements elsewhere: take the plain tensor"),
    "subclass": (lambda x: x.as_subclass(OfTheUsers), "a OfTheUsers of torch may have its elements elsewhere"),
    "masked": (lambda x: masked_tensor(x, x > 0), "a MaskedTensor of torch may have its elements elsewhere"),
    "ragged": (ragged, "a NestedTensor of torch may have its elements elsewhere"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), ""),
    "zeros": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "gives a null pointer for"),
    "meta": (lambda x: x.to("meta"), ""),
    "quantized": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), ""),
    "sparse": (torch.Tensor.to_sparse, ""),
    "compressed": (lambda x: x.reshape(1, -1).to_sparse_csr(), ""),
    "conjugate": (lambda x: torch.complex(x.double(), x.double()).conj(), ""),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|in beta|deprecated)")


def by_role():
    """Arguments, each with the function that takes it, by name; all but the one are plain."""
    generator = torch.Generator().manual_seed(2)
    logits, w = torch.randn(2, 3, 4, generator=generator)
    targets = torch.tensor([1, 0, 3])
    _, residuals = pce.softmax_cross_entropy_forward(logits, targets, reduction="none")
    loss = pce.softmax_cross_entropy_value_and_grad
    return {
        "logits": (logits, lambda x: loss(x, targets)),
        "targets": (targets, lambda t: loss(logits, t)),
        "probabilities": (logits.softmax(-1), lambda q: loss(logits, q)),
        "weight": (logits[0].abs(), lambda each: loss(logits, targets, weight=each)),
        "dloss": (logits[:, 0], lambda g: (pce.softmax_cross_entropy_backward(g, residuals),)),
        "teacher": (w, lambda teacher: pce.kl_divergence_value_and_grad(logits, teacher)),
        "ids": (targets[:, None], lambda ids: (pce.take_classes(logits, ids),)),
        "w": (w.T.contiguous(), lambda w: pce.linear_class_statistics(logits, w, targets % 3)[:2]),
        "array": (logits, lambda x: (pce.distribute(x, pce.Mesh(MPI.COMM_SELF, one=1)).local,)),
    }


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", RIGHT)
def test_tensor_of_another_kind_is_right_everywhere(alone, kind):
    for role, (plain, call) in by_role().items():
        if kind == "parameter" and not plain.is_floating_point():
            continue
        for expected, found in zip(call(plain), call(RIGHT[kind](plain)), strict=True):
            assert as_array(found, role).tobytes() == as_array(expected, role).tobytes(), role


@pytest.mark.ranks(1)
@pytest.mark.parametrize("role", ["logits", "dloss", "w"])
def test_call_breaks_the_graph_of_torch_compile(alone, role):
    plain, call = by_role()[role]
    compiled = torch.compile(lambda x: [2 * each for each in call(+x)], backend="eager")
    values = [plain, *[over_a_mesh(plain)] * (role == "logits")]
    for value in values:
        for expected, found in zip(call(value), compiled(value), strict=True):
            assert type(found) is type(expected) and torch.equal(found, 2 * expected)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(call, backend="eager", fullgraph=True)(plain)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_tensor_without_memory_of_its_own_is_refused(alone, kind):
    make, said = REFUSED[kind]
    for role, (plain, call) in by_role().items():
        if (kind in ("nested", "compressed") and plain.ndim < 2) or (kind == "over a mesh" and role in ("logits", "w")):
            continue
        with pytest.raises(TypeError, match=said):
            call(make(plain))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_is_never_written_elsewhere(alone, dtype):
    logits, targets = torch.ones(3, 4, dtype=dtype), torch.tensor([1, 0, 3])
    _, expected = pce.softmax_cross_entropy_value_and_grad(logits, targets)
    out = waiting(torch.full_like(logits, 7.0))
    _, returned = pce.softmax_cross_entropy_value_and_grad(logits, targets, out=out)
    assert returned is out
    assert torch.equal(out + 0, expected)
    makers = {name: make for name, (make, _) in REFUSED.items()} | {"negative": torch._neg_view}
    for make in makers.values():
        with pytest.raises(TypeError):
            pce.softmax_cross_entropy_value_and_grad(logits, targets, out=make(torch.full_like(logits, 7.0)))


@pytest.mark.ranks(1)
def test_tensor_inside_transformation_of_torch_is_refused():
    seen = []

    def call(x):
        try:
            seen.append(pce.softmax_cross_entropy(x, torch.tensor([1, 0, 3])))
        except TypeError as error:
            seen.append(error)
        return (x * x).sum()

    x = torch.ones(2, 3, 4)
    torch.vmap(call)(x)
    torch.func.grad(call)(x[0])
    torch.func.jvp(call, (x[0],), (x[0],))
    assert [type(each) for each in seen] == [TypeError] * 3, seen


def test_dtensor_of_one_rank_is_refused_everywhere(comm, problem, alone):
    logits, targets, mine = problem
    shard = logits[:, mine].contiguous()
    given = over_a_mesh(shard) if comm.rank == comm.size - 1 else shard
    # The mesh of the last rank is that of rank 0 alone.
    wrong = "is a DTensor, whose mesh and placements say comm: leave it out|has a mesh in which this rank is not"
    with pytest.raises((TypeError, ValueError), match=f"logits ({wrong})"):
        pce.softmax_cross_entropy(given, targets, comm=comm)
