"""AdamW is the textbook's at any placement, optimizers resume from their state, and learning rates follow the step."""

from fractions import Fraction
import inspect
import math

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import SGD, AdamW, Shard, cosine_schedule, linear_schedule
from pce_mpi.comm.errors import ranks_text
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.optim.optimizers import power_of
from ranks.grids import mesh_of, squarest
from ranks.placed import SUM, traced

OPTIONS = {
    "default": {},
    "all": {"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.01, "weight_decay": 0.3},
    "no decay": {"lr": 0.1, "weight_decay": 0.0},
    "no memory": {"betas": (0.0, 0.0)},
}


def textbook(p, gradients, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    """The parameter after a step with each of the gradients; one that is None is no step."""
    m, v, t = np.zeros_like(p), np.zeros_like(p), 0
    for g in gradients:
        if g is None:
            continue
        t += 1
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr * weight_decay * p
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def drawn(shape=(5, 3), steps=4, dtype=np.float64):
    rng = np.random.default_rng(1)
    return rng.standard_normal(shape).astype(dtype), rng.standard_normal((steps, *shape)).astype(dtype)


def after(optimizer, w, gradients, **placements):
    """Step with each of these whole gradients."""
    for gradient in gradients:
        w.grad = pce.distribute(gradient, w.mesh, **placements)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adamw_is_that_of_textbook_at_any_placement(comm, options):
    values, gradients = drawn()
    expected = textbook(values, gradients, **options)
    for placements in ([], [Shard(0)], [Shard(1), Shard(0)], [pce.Replicate(), Shard(0)]):
        mesh = mesh_of(comm, *squarest(comm.size))
        placements = dict(zip(mesh.dims, placements, strict=False))
        w = pce.distribute(values, mesh, requires_grad=True, **placements)
        after(AdamW([w], **options), w, gradients, **placements)
        np.testing.assert_allclose(w.full(), expected, rtol=1e-12, atol=1e-14, err_msg=str(placements))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_adamw_steps_halves_in_float32(comm, dtype):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn(dtype=dtype)
    w = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    optimizer = AdamW([w], lr=0.1)
    after(optimizer, w, gradients[:1])
    expected = textbook(values.astype(np.float64), gradients[:1].astype(np.float64), lr=0.1)
    np.testing.assert_array_equal(w.full(), expected.astype(dtype))
    assert {optimizer.state()[f"0.{name}"].dtype.name for name in ("exp_avg", "exp_avg_sq")} == {"float32"}


def test_groups_have_options_of_their_own(comm):
    mesh = mesh_of(comm, *squarest(comm.size))
    values, gradients = drawn()
    parameters = [
        pce.distribute(values, mesh, requires_grad=True, data=placed)
        for placed in (Shard(0), pce.Replicate(), Shard(1))
    ]
    optimizer = AdamW(
        [
            {"params": parameters[:1]},
            {"params": iter(parameters[1:2]), "weight_decay": 0.0},
            {"params": parameters[2:], "lr": 0.5, "betas": (0.5, 0.75)},
        ],
        lr=0.1,
        weight_decay=0.3,
    )
    expected = [{"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.5, "betas": (0.5, 0.75)}]
    for number, gradient in enumerate(gradients):
        for w in parameters:
            w.grad = pce.from_local(gradient if mesh.rank == 0 else 0 * gradient, mesh, **dict.fromkeys(mesh.dims, SUM))
        if number % 2:
            parameters[2].grad = None  # the last one is not stepped
        optimizer.step()
    for w, options in zip(parameters, expected, strict=True):
        stepped = gradients if "betas" not in options else gradients[::2]
        np.testing.assert_allclose(w.full(), textbook(values, stepped, **{"weight_decay": 0.3} | options), rtol=1e-12)


def test_gradients_of_all_groups_take_one_buffer(comm):
    mesh = mesh_of(comm, comm.size)
    parameters = [pce.distribute(np.zeros(3), mesh, requires_grad=True) for _ in range(4)]
    for w in parameters:
        w.grad = pce.from_local(np.ones(3), mesh, data=SUM)
    optimizer = SGD([{"params": parameters[::2], "lr": 1.0}, {"params": parameters[1::2]}], lr=2.0)
    _, trace = traced(optimizer.step)
    assert [(event.collective, event.bytes) for event in trace.select()] == [("all_reduce", 4 * 3 * 8)]
    assert [w.local[0] for w in parameters] == [-comm.size, -2 * comm.size] * 2


def test_rate_of_group_follows_its_own_schedule():
    w, v = (pce.distribute(np.zeros(1), mesh_of(MPI.COMM_SELF, 1), requires_grad=True) for _ in range(2))
    optimizer = SGD([{"params": [w], "lr": 1.0}, {"params": [v]}], lr=2.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]
    optimizer.lr = 3.0
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 3.0]
    for group in optimizer.param_groups:  # as schedulers of torch do
        group["lr"] *= 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.5]
    with pytest.raises(ValueError, match=r"of its own: use param_groups\[...\]\['lr'\]"):
        optimizer.lr = 1.0
    with pytest.raises(ValueError, match=r"of its own: use param_groups\[...\]\['lr'\]"):
        assert optimizer.lr
    w.grad = v.grad = pce.distribute(np.ones(1), w.mesh)
    optimizer.step()
    assert (w.item(), v.item()) == (-0.5, -1.5)


@pytest.mark.parametrize(
    ("optimizer", "options", "wrong"),
    [
        (SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": -1.0}),
        (AdamW, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.1}, {"betas": (0.5, 1.0)}),
    ],
)
def test_every_option_may_be_assigned(optimizer, options, wrong):
    assert {*inspect.signature(optimizer).parameters} == {"parameters", *options}
    w, v, u = (pce.distribute(np.ones(2), mesh_of(MPI.COMM_SELF, 1), requires_grad=True) for _ in range(3))
    late, early = optimizer([{"params": [w]}, {"params": [u], "lr": 0.0}], lr=1.0), optimizer([v], **options)
    for name, value in options.items():
        setattr(late, name, value)
        assert getattr(late, name) == value == late.param_groups[0][name]
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            setattr(late, name, value)
        assert getattr(late, name) == options[name]
    for _ in range(2):
        w.grad = v.grad = u.grad = pce.distribute(np.array([1.0, -3.0]), w.mesh)
        late.step()
        early.step()
    assert (w.local == v.local).all() and (u.local == 1.0).all()
    with pytest.raises(AttributeError, match="weigth_decay"):
        late.weigth_decay = 0.1


def test_state_of_groups_counts_through_all(comm):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn((7, 3))
    parameters = [pce.distribute(values, mesh, requires_grad=True, data=Shard(0)) for _ in range(3)]

    def made():
        return SGD([{"params": parameters[:2], "momentum": 0.5}, {"params": parameters[2:]}], lr=0.1)

    optimizer = made()
    after(optimizer, parameters[1], gradients, data=Shard(0))
    state = optimizer.state()
    resumed = made()
    resumed.load_state(state)
    again = resumed.state()
    names = ["0.step", "0.checksum", "0.momentum", "1.step", "1.checksum", "1.momentum", "2.step", "2.checksum"]
    assert list(state) == names
    assert [state[f"{number}.step"].item() for number in range(3)] == [0, 4, 0]
    assert {key: each.local.tobytes() for key, each in again.items()} == {
        key: each.local.tobytes() for key, each in state.items()
    }


@pytest.mark.ranks(3)  # as below
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"lr": -1.0}, ValueError, r"param_groups\[1\]: lr must not be negative and must be finite, got -1.0"),
        ({"weight_decy": 0.0}, TypeError, r"param_groups\[1\]: 'weight_decy' is none of lr, "),
        ({"nesterov": True}, ValueError, r"param_groups\[1\]: nesterov needs a momentum"),
        ({"momentum": "much"}, TypeError, r"param_groups\[1\]: momentum must be a real number, got 'much'"),
    ],
    ids=["lr", "unknown", "nesterov", "text"],
)
def test_wrong_option_of_group_raises_everywhere(comm, change, error, text):
    mesh = mesh_of(comm, comm.size)
    w, v = (pce.distribute(np.zeros(2), mesh, requires_grad=True) for _ in range(2))
    with pytest.raises(error, match=text):
        SGD([{"params": [w]}, {"params": [v]} | change], lr=0.1)
    optimizer = SGD([{"params": [w]}, {"params": [v]}], lr=0.1)
    w.grad = v.grad = pce.distribute(np.ones(2), mesh)
    before = dict(optimizer.param_groups[1])
    for wrong, kind, words in ((change, error, text), ({"params": (w,)}, ValueError, "'params' cannot be exchanged")):
        if comm.rank == comm.size - 1:
            optimizer.param_groups[1].update(before | wrong)
        with pytest.raises(kind, match=words):
            optimizer.step()
        assert not w.local.any()
        optimizer.param_groups[1].maps[0].pop("weight_decy", None)


def test_groups_may_be_over_meshes_of_some_ranks(comm):
    # Stages of a pipeline, of which each rank knows its own parameters and groups.
    ours, mine = mesh_of(comm, comm.size), mesh_of(MPI.COMM_SELF, 1)
    w = pce.distribute(np.zeros(2), ours, requires_grad=True)
    groups = [{"params": [w]}]
    for number in range(comm.rank):
        groups.append({"params": [pce.distribute(np.zeros(2), mine, requires_grad=True)], "lr": 0.5 * number})
    for group in groups:
        for each in group["params"]:
            each.grad = pce.distribute(np.ones(2), each.mesh)
    SGD(groups, lr=1.0).step()
    assert [group["params"][0].local[0] for group in groups] == [-1.0, *(-0.5 * number for number in range(comm.rank))]


def test_ranks_with_other_groups_raise_together(comm, several):
    mesh = mesh_of(comm, comm.size)
    parameters = [pce.distribute(np.zeros(2), mesh, requires_grad=True) for _ in range(3)]
    first = 1 if comm.rank else 2
    optimizer = SGD([{"params": parameters[:first]}, {"params": parameters[first:], "lr": 0.5}], lr=0.1)
    with pytest.raises(pce.CollectiveError, match=r"parameters\[0:2\] lr: 0.1 \(rank 0 along data\), not given"):
        optimizer.step()


MAKERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_resumed_training_has_bits_of_one_straight_through(comm, tmp_path_factory, name):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn((7, 3), steps=6, dtype=np.float32)
    folder = comm.bcast(str(tmp_path_factory.mktemp("state")) if comm.rank == 0 else None)
    straight = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    after(MAKERS[name]([straight]), straight, gradients, data=Shard(0))

    begun = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    optimizer = MAKERS[name]([begun])
    after(optimizer, begun, gradients[:3], data=Shard(0))
    pce.save(f"{folder}/file", {"w": begun} | {f"optimizer.{key}": each for key, each in optimizer.state().items()})

    w = pce.distribute(np.zeros_like(values), mesh, requires_grad=True, data=Shard(0))
    resumed, start = MAKERS[name]([w]), "optimizer."
    state = {f"{start}{key}": each for key, each in resumed.state().items()}
    read = pce.load(f"{folder}/file", mesh, {"w": w} | state)
    w.local[...] = read["w"].local
    assert {key: each.sharding for key, each in read.items()} == {
        key: each.sharding.natural for key, each in ({"w": w} | state).items()
    }
    resumed.load_state({key.removeprefix(start): each for key, each in read.items() if key.startswith(start)})
    after(resumed, w, gradients[3:], data=Shard(0))
    assert w.local.tobytes() == straight.local.tobytes()


PLACED = [{"data": Shard(0)}, {"data": Shard(1)}, {}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_parameters_in_another_order_at_resume_are_found(comm, tmp_path_factory, name, dtype):
    mesh = mesh_of(comm, comm.size)
    folder = comm.bcast(str(tmp_path_factory.mktemp("state")) if comm.rank == 0 else None)
    shapes = [(7, 3), (5,), (7, 3), (7, 3)]
    begun = [np.random.default_rng(seed).normal(size=shape).astype(dtype) for seed, shape in enumerate(shapes)]

    def made(values, placements=PLACED[0]):
        placed = [placements if each.ndim > 1 else {} for each in values]
        return [pce.distribute(each, mesh, requires_grad=True, **at) for each, at in zip(values, placed, strict=True)]

    parameters = made(begun)
    optimizer = MAKERS[name](parameters)
    for each in parameters:
        each.grad = each.detach()
    optimizer.step()
    pce.save(f"{folder}/file", optimizer.state())
    trained = [each.full() for each in parameters]
    raised, taken = [], []
    for placements in PLACED:
        resumed = made(trained, placements)
        swapped = [resumed[number] for number in (2, 1, 3, 0)]
        for order in (resumed, swapped):
            again = MAKERS[name](order)
            state = pce.load(f"{folder}/file", mesh, again.state())
            try:
                again.load_state(state)
                taken.append(order is resumed)
            except ValueError as error:
                assert not again._buffers[0]
                raised.append(str(error))
        others = made([2 * each for each in trained], placements)
        others[0].local[...] = others[2].local  # equal ones, and none of them has values that were saved
        MAKERS[name](others).load_state(state)
        MAKERS[name]([resumed[0], resumed[1], others[2], resumed[3]]).load_state(state)
    everyones = comm.allgather((raised, taken))
    assert everyones == [everyones[0]] * comm.size
    assert taken == [True] * 3
    text = "parameters[0] has the values that parameters[2] had when the state was taken: give "
    assert len(raised) == 3 and all(each.startswith(text) for each in raised)


def test_state_is_a_copy_sharded_as_parameter(comm):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn((7, 3))
    w = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    optimizer = AdamW([w], lr=0.1)
    fresh = optimizer.state()
    after(optimizer, w, gradients[:1], data=Shard(0))
    state = optimizer.state()
    assert fresh.keys() == state.keys()
    for name, array in fresh.items():
        assert (array.sharding, array.dtype) == (state[name].sharding, state[name].dtype)
        assert name == "0.checksum" or not array.local.any()
    before = state["0.exp_avg"].local.copy()
    after(optimizer, w, gradients[1:], data=Shard(0))
    assert state["0.exp_avg"].sharding == w.sharding
    assert state["0.exp_avg"].local.tobytes() == before.tobytes()
    assert (state["0.step"].item(), optimizer.state()["0.step"].item()) == (1, 4)
    np.testing.assert_allclose(state["0.exp_avg"].full(), 0.1 * gradients[0], rtol=1e-12)


def changed(state, mesh, name):
    """A state that is wrong in one way, and the error that says so."""
    step, buffer = state["0.step"], state["0.exp_avg"]
    return {
        "unknown": (state | {"3.step": step}, ValueError, "unknown in the state of AdamW: '3.step'"),
        "missing": ({"0.step": step}, ValueError, "missing in the state of AdamW: '0.checksum', '0.exp_avg'"),
        "nothing": ({}, ValueError, "missing in the state of AdamW: '0.checksum', '0.exp_avg', '0.exp_avg_sq', '0.st"),
        "negative": (
            state | {"0.step": pce.distribute(-5, mesh)},
            ValueError,
            "0.step must be a number of steps from 0",
        ),
        "many": (state | {"0.step": pce.distribute(2**63 - 1, mesh)}, ValueError, "0.step must be a number of steps"),
        "square": (state | {"0.exp_avg_sq": -buffer}, ValueError, "0.exp_avg_sq is a mean of squares, and has a neg"),
        "shape": (state | {"0.exp_avg": step}, ValueError, "0.exp_avg must be float64"),
        "mesh": (state | {"0.step": pce.distribute(1, mesh_of(MPI.COMM_SELF, 1))}, ValueError, "mesh of its parameter"),
        "array": (state | {"0.exp_avg": buffer.local}, TypeError, "0.exp_avg must be a distributed array"),
        "mapping": ([], TypeError, "arrays must be a mapping"),
    }[name]


@pytest.mark.ranks(3)  # two ranks are right
@pytest.mark.parametrize(
    "name",
    ["unknown", "missing", "nothing", "negative", "many", "square", "shape", "mesh", "array", "mapping"],
)
def test_wrong_state_on_one_rank_raises_everywhere(comm, name):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    w = pce.distribute(values, mesh, requires_grad=True)
    optimizer = AdamW([w], lr=0.1)
    after(optimizer, w, gradients[:1])
    right = optimizer.state()
    wrong, error, text = changed(right, mesh, name)
    last = comm.size - 1
    for given, ranks in ((wrong, range(comm.size)), (right if comm.rank < last else wrong, [last])):
        with pytest.raises(error) as raised:
            optimizer.load_state(given)
        assert comm.allgather(str(raised.value)) == [str(raised.value)] * comm.size
        assert text in str(raised.value)
        assert str(raised.value).endswith(f" ({ranks_text(ranks, 'data')})")
    assert {key: each.local.tobytes() for key, each in optimizer.state().items()} == {
        key: each.local.tobytes() for key, each in right.items()
    }


def test_state_of_cupy_arrays_is_saved_and_taken(comm, cupy, tmp_path_factory):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn((7, 3))
    folder = comm.bcast(str(tmp_path_factory.mktemp("state")) if comm.rank == 0 else None)
    x, y = (pce.distribute(cupy.asarray(values), mesh, requires_grad=True, data=Shard(0)) for _ in range(2))
    optimizer = AdamW([x, y], lr=0.1)
    x.grad = pce.distribute(cupy.asarray(gradients[0]), mesh, data=Shard(0))
    optimizer.step()
    state = optimizer.state()
    pce.save(f"{folder}/file", state)
    read = pce.load(f"{folder}/file", mesh, state)
    resumed = AdamW([x, y])
    resumed.load_state(state)
    again = resumed.state()
    for name, array in state.items():
        assert isinstance(again[name].local, cupy.ndarray)
        assert cupy.asnumpy(array.local).tobytes() == cupy.asnumpy(again[name].local).tobytes()
        assert cupy.asnumpy(array.redistribute(**read[name].placements).local).tobytes() == read[name].local.tobytes()


def test_parameters_are_taken_in_order_of_names(comm):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    found = []
    order = 1 - 2 * (comm.rank % 2)  # ranks may differ
    for taken in (list, lambda parameters: dict([*zip("vw", parameters, strict=True)][::order])):
        for optimizer_of in (AdamW, SGD, lambda given, lr: AdamW([{"params": given, "weight_decay": 0.0}], lr)):
            both = [pce.distribute(scale * values, mesh, requires_grad=True, data=Shard(0)) for scale in (1, 2)]
            optimizer = optimizer_of(taken(both), lr=0.1)
            assert [*map(id, optimizer.parameters)] == [*map(id, both)]
            for parameter, gradient in zip(both, gradients, strict=False):
                parameter.grad = pce.distribute(gradient, mesh)
            norm = pce.clip_grad_norm(taken(both), 1.0)
            optimizer.step()
            found.append((norm, *(parameter.full().tobytes() for parameter in both)))
    assert found[:3] == found[3:]


@pytest.mark.ranks(1)  # a rank refuses them by itself
def test_wrong_parameters_and_numbers_are_told(comm):
    mesh = mesh_of(comm, comm.size)
    w, v = (pce.distribute(np.zeros(3), mesh, requires_grad=True) for _ in range(2))
    plain = pce.distribute(np.zeros(3), mesh)
    partial = pce.distribute(np.zeros(3), mesh, requires_grad=True, data=SUM)
    for optimizer, parameters, options, error, text in (
        *(
            (function, given, {}, error, text)
            for function in (SGD, lambda parameters, lr: pce.clip_grad_norm(parameters, lr))
            for given, error, text in (
                ([], ValueError, "parameters are missing"),
                ([np.zeros(3)], TypeError, r"parameters\[0\] must be a distributed array, got ndarray"),
                ([w, plain], ValueError, r"parameters\[1\] must be an array that was made with requires_grad=True"),
                ([w, plain, w], ValueError, r"parameters\[1\] must be an array"),
                ([w, w], ValueError, r"parameters\[1\] is the same array as parameters\[0\]"),
                ([partial], ValueError, r"parameters\[0\] must not be Partial"),
                ({}, ValueError, "parameters are missing"),
                ({"w": np.zeros(3)}, TypeError, r"parameters\[0\] must be a distributed array, got ndarray"),
                ([("w", w)], TypeError, r"parameters\[0\] must be a distributed array, got tuple"),
                (w, TypeError, "must be a list of distributed arrays"),
            )
        ),
        *(
            (SGD, [w], {name: wrong}, error, text.format(name))
            for name in ("lr", "momentum", "weight_decay")
            for wrong, error, text in (
                (-0.1, ValueError, "{} must not be negative and must be finite, got -0.1"),
                (math.nan, ValueError, "{} must not be negative and must be finite, got nan"),
                (math.inf, ValueError, "{} must not be negative and must be finite, got inf"),
                ("0.1", TypeError, "{} must be a real number"),
                (None, TypeError, "{} must be a real number"),
                (True, TypeError, "{} must be a real number"),
                (np.zeros(2), TypeError, "{} must be a real number"),
            )
        ),
        (SGD, [w], {"nesterov": True}, ValueError, "nesterov needs a momentum"),
        (AdamW, [w], {"betas": 0.9}, TypeError, "betas"),
        (AdamW, [w], {"betas": (0.9, 1.0)}, ValueError, "betas"),
        (AdamW, [w], {"betas": (-0.1, 0.9)}, ValueError, "betas"),
        (AdamW, [w], {"eps": -1.0}, ValueError, "eps"),
        (AdamW, [w], {"weight_decay": math.inf}, ValueError, "weight_decay"),
        (AdamW, [w], {"lr": "fast"}, TypeError, "lr"),
        (SGD, [w, {"params": [v]}], {}, TypeError, "must be a dict that has 'params', got .* as number 0"),
        (SGD, {"params": [v]}, {}, TypeError, "groups of parameters must be in a list, got one group"),
        (SGD, [{"params": [w]}, {"parameters": [v]}], {}, TypeError, "as number 1"),
        (SGD, [{"params": w}], {}, TypeError, "parameters must be a list"),
        (SGD, [{"params": [w]}, {"params": [w]}], {}, ValueError, r"parameters\[1\] is the same array as param"),
        (SGD, [{"params": []}], {}, ValueError, "parameters are missing"),
        (pce.clip_grad_norm, [w], {"max_norm": -1}, ValueError, "max_norm must not be negative, got -1"),
        (pce.clip_grad_norm, [w], {"max_norm": None}, TypeError, "max_norm must be a real number"),
    ):
        rate = {} if optimizer is pce.clip_grad_norm else {"lr": 0.1}
        with pytest.raises(error, match=text):
            optimizer(parameters, **(rate | options))
    optimizer = SGD([w], lr=1.0)
    optimizer.lr = np.array(2)
    with pytest.raises(ValueError, match="lr must not be negative and must be finite, got -1"):
        optimizer.lr = -1
    assert optimizer.lr == 2.0
    assert pce.clip_grad_norm([w], 1.0) == 0.0  # without a gradient


@pytest.mark.parametrize("schedule", [linear_schedule, cosine_schedule])
def test_schedule_rises_falls_and_stays(schedule):
    rates = [schedule(step, lr=2.0, steps=10, warmup=4, final=0.5) for step in range(13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[7] == pytest.approx(1.25)
    assert rates[10:] == [0.5] * 3
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert [schedule(step, lr=2.0, steps=4) for step in (0, 2, 4)] == [2.0, 1.0, 0.0]
    for warmup in (-1, 10):
        with pytest.raises(ValueError, match="warmup"):
            schedule(0, lr=1.0, steps=10, warmup=warmup)


def test_cosine_schedule_calls_no_libm(monkeypatch):
    rates = [cosine_schedule(step, lr=2.0, steps=10) for step in range(10)]
    assert rates == pytest.approx([1.0 + math.cos(math.pi * step / 10) for step in range(10)], rel=1e-15)
    monkeypatch.setattr(math, "cos", None)
    assert [cosine_schedule(step, lr=2.0, steps=10) for step in range(10)] == rates


@pytest.mark.parametrize("beta", [0.0, 1e-300, 0.5, 0.9, 0.999, 1 - 2.0**-53])
def test_bias_correction_is_rounded_power(beta):
    for step in (*range(1, 40), 700):
        assert 1.0 - power_of(beta, step) == 1.0 - float(Fraction(beta) ** step)


def test_ranks_with_other_states_raise_together(comm, several):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    w = pce.distribute(values, mesh, requires_grad=True)
    optimizer = AdamW([w])
    after(optimizer, w, gradients[:1])
    state = optimizer.state()
    first = comm.rank == 0
    with pytest.raises(pce.CollectiveError, match=r"disagree on 0\.step: 1 \(rank 0 along data\), 2"):
        optimizer.load_state(state | {"0.step": pce.distribute(1 if first else 2, mesh)})
    placed = Sharding.of(mesh.dim_sizes, values.shape, {"data": Shard(int(first))})
    moved = DistArray(values[placed.slices(mesh.coordinates)], mesh, placed)
    with pytest.raises(pce.CollectiveError, match=r"disagree on 0\.exp_avg: "):
        optimizer.load_state(state | {"0.exp_avg": moved})


def test_state_follows_momentum_that_is_assigned():
    mesh = mesh_of(MPI.COMM_SELF, 1)
    values, gradients = drawn()
    w = pce.distribute(values, mesh, requires_grad=True)
    optimizer = SGD([w], lr=0.1, momentum=0.9)
    after(optimizer, w, gradients[:1])
    optimizer.param_groups[0]["momentum"] = 0.0
    assert list(optimizer.state()) == ["0.step", "0.checksum"]
    SGD([w], lr=0.1).load_state(optimizer.state())
    plain = SGD([w], lr=0.1)
    after(plain, w, gradients[:1])
    plain.defaults["momentum"] = 0.9
    assert not plain.state()["0.momentum"].local.any()
