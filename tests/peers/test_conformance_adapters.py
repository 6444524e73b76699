"""Losses of other frameworks, called through the adapters of the conformance kit, over the ranks of this job."""

from dataclasses import replace
import os
import sys
import textwrap

import numpy as np
import pytest

from jobs.launch import ROOT, complete
from pce_mpi.conformance import Gradient, cases, load, offers, run_case
from pce_mpi.conformance.adapters import FUNCTION_ADAPTERS, NAMED_CANDIDATES, adapted, named_candidate

TUTORIAL = str(ROOT / "examples" / "verify_your_loss.py")


@pytest.fixture
def started(comm):
    """Starts a candidate, and stops it after the test."""
    running = []

    def start(candidate):
        candidate.start(comm)
        running.append(candidate)
        return candidate

    yield start
    for candidate in running:
        candidate.stop()


def failures(candidate, comm, **selection):
    """The kinds of what the kit finds in the selected cases that are offered, by case."""
    outcomes = [run_case(candidate, case, comm) for case in cases(candidate, **selection)]
    assert outcomes
    return {outcome.case: {finding.kind for finding in outcome.findings} for outcome in outcomes if outcome.failed}


# ------------------------------------------------------------------------------------------------------------- by name


def test_frameworks_and_mpi_are_imported_when_needed():
    program = """
        import sys

        from pce_mpi.conformance.adapters import FUNCTION_ADAPTERS, NAMED_CANDIDATES, adapted, named_candidate

        def function(logits, targets, group): ...

        made = [named_candidate(name) for name in NAMED_CANDIDATES]
        made += [adapted(name, function) for name in FUNCTION_ADAPTERS]
        print(len(made), *sorted({"torch", "jax", "mpi4py.MPI"} & set(sys.modules)))
        """
    done = complete([sys.executable, "-c", textwrap.dedent(program)])
    assert done.stdout.split() == [str(len(NAMED_CANDIDATES) + len(FUNCTION_ADAPTERS))], done.stderr


def test_unknown_name_is_answered_with_known_ones():
    with pytest.raises(ValueError, match=r"no candidate 'torch'; there are pce, .*torch-dense, torch-loss-parallel"):
        named_candidate("torch")
    with pytest.raises(ValueError, match="no adapter 'torch'; there are torch-shards, jax-shard-map"):
        adapted("torch", failures)


# --------------------------------------------------------------------------------------------------------------- torch


def test_dense_torch_conforms_in_float32_and_float64(comm):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    # torch sums log p over the classes before it multiplies by label_smoothing / C: masks of -3e38 overflow.
    overflows = {"finite-mask/lowest-smoothed": {"not finite"}}
    # Each rank gathers the logits and does the same: one rank shows the other dtype.
    dtypes = ["float32", "float64"] if comm.size == 1 else ["float32"]
    assert failures(named_candidate("torch-dense"), comm, dtypes=dtypes) == overflows


def test_loss_parallel_is_wrong_on_4_d_logits(comm, started):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    candidate = started(named_candidate("torch-loss-parallel"))
    assert failures(candidate, comm, pattern="random-logits") == {}
    wrong = failures(candidate, comm, pattern=["dims/4-D", "axis/4-D-*"])
    assert wrong and all(kinds == {"gradient"} for kinds in wrong.values())


def test_process_group_has_mpi_ranks_and_ends(comm):
    distributed = pytest.importorskip("torch.distributed")
    candidate = named_candidate("torch-loss-parallel")
    for _ in range(2):
        candidate.start(comm)
        ranks = distributed.get_rank(), distributed.get_world_size()
        candidate.stop()
        assert ranks == (comm.rank, comm.size)
        assert not distributed.is_initialized()


def test_tutorial_error_is_found_and_repair_conforms(comm, started):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    wrong = started(adapted("torch-shards", load(f"{TUTORIAL}:cross_entropy")))
    found = failures(wrong, comm)
    if comm.size == 1:
        assert found == {}  # all classes are those of the only shard
    else:
        assert found and all("smooth" in case for case in found)
    wrong.stop()
    repaired = adapted("torch-shards", load(f"{TUTORIAL}:repaired"))
    repaired.start(comm)
    assert failures(repaired, comm) == {}


def test_entropy_of_torch_has_no_targets(comm, started):
    torch = pytest.importorskip("torch", reason="make test-peers installs torch")

    @offers(kind="entropy", gradient="none")
    def entropy(logits, group):
        shards = [torch.empty_like(logits) for _ in range(group.size())]
        torch.distributed.all_gather(shards, logits, group=group)
        log_p = torch.cat(shards, dim=-1).double().log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    assert failures(started(adapted("torch-shards", entropy)), comm, pattern=["random-logits", "offset"]) == {}


def with_the_group_third(logits, targets, anything):
    return logits.sum(-1) * anything.size()


def as_megatron(logits, targets, label_smoothing=0.0, tp_group=None):
    return logits.sum(-1) * tp_group.size()


def as_flash_attention(logits, targets, label_smoothing=0.0, process_group=None):
    return logits.sum(-1) * process_group.size()


def with_what_the_kit_knows(logits, targets, *, group, class_start, num_classes):
    assert (class_start, num_classes) == (logits.shape[-1] * group.rank(), logits.shape[-1] * group.size())
    return logits.sum(-1) * group.size()


@pytest.mark.parametrize(
    "function",
    [with_the_group_third, as_megatron, as_flash_attention, with_what_the_kit_knows],
    ids=lambda f: f.__name__,
)
def test_torch_shards_function_has_group_and_autograd(comm, started, function):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    candidate = started(adapted("torch-shards", function))
    logits, targets = np.ones((2, 3), np.float32), np.zeros(2, np.int64)
    loss, backward = candidate(logits, targets, class_start=3 * comm.rank, num_classes=3 * comm.size, comm=comm)
    assert loss.tolist() == [3.0 * comm.size] * 2
    for upstream in np.array([1.0, 10.0], np.float32), np.array([2.0, 3.0], np.float32):
        assert backward(upstream).tolist() == [[each * comm.size] * 3 for each in upstream]


def test_torch_shards_function_starts_in_its_process_group(comm):
    torch = pytest.importorskip("torch", reason="make test-peers installs torch")
    seen = []

    def function(logits, targets, group): ...

    function.start = lambda comm: seen.append((torch.distributed.get_world_size(), os.environ["RANK"]))
    function.stop = lambda: seen.append(torch.distributed.is_initialized())
    candidate = adapted("torch-shards", function)
    candidate.start(comm)
    candidate.stop()
    assert seen == [(comm.size, str(comm.rank)), True]


def test_function_without_declarations_gives_losses_per_row(comm):
    def megatron_style(logits, targets, tp_group, label_smoothing=0.0): ...

    offer = adapted("torch-shards", megatron_style).offer
    assert (offer.reductions, offer.gradient, offer.options) == (("none",), Gradient.BACKWARD, ("label_smoothing",))
    assert (offer.shards, offer.num_classes) == ("equal", False)


def test_function_offers_what_it_declares():
    @offers(reductions=("sum",), dtypes=("bfloat16",), gradient="none")
    def forward_only(logits, targets, group): ...

    expected = replace(forward_only.offer, shards="equal", num_classes=False)
    assert adapted("torch-shards", forward_only).offer == expected

    @offers(shards="chunks")
    def uneven(logits, targets, group, num_classes): ...

    assert adapted("torch-shards", uneven).offer == uneven.offer


# ----------------------------------------------------------------------------------------------------------------- jax


def jax_cross_entropy(logits, targets, *, axis_name, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    import jax
    from jax import lax
    from jax import numpy as jnp

    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    local, classes = x.shape[-1], x.shape[-1] * lax.axis_size(axis_name)
    counts = targets != ignore_index
    x = x - lax.pmax(lax.stop_gradient(x.max(-1, keepdims=True)), axis_name)
    log_sum = jnp.log(lax.psum(jnp.exp(x).sum(-1), axis_name))
    wanted = (1 - label_smoothing) * jax.nn.one_hot(targets - lax.axis_index(axis_name) * local, local, dtype=x.dtype)
    wanted += label_smoothing / classes
    loss = jnp.where(counts, lax.psum((wanted * (log_sum[..., None] - x)).sum(-1), axis_name), 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counts.sum()


def test_jax_function_under_shard_map_conforms(comm, started):
    pytest.importorskip("jax", reason="jax is not installed")
    function = offers(
        dtypes=("float32", "float64", "bfloat16"),
        options=("ignore_index", "label_smoothing"),
        reductions=("mean", "none"),
        dims=(2, 3),
    )(jax_cross_entropy)
    candidate = started(adapted("jax-shard-map", function))
    assert (candidate.offer.shards, candidate.offer.gradient) == ("equal", Gradient.BACKWARD)
    pattern = ["random-logits", "pair/ignore_index+label_smoothing", "dims/3-D", "backward-twice/scalar"]
    assert failures(candidate, comm, pattern=pattern) == {}


def test_error_of_jax_function_raises_on_every_rank(comm, started):
    pytest.importorskip("jax", reason="jax is not installed")

    def refuses(logits, targets, *, axis_name):
        raise ValueError(f"no classes along {axis_name!r} for me")

    candidate = started(adapted("jax-shard-map", refuses))
    logits, targets = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="no classes along 'classes' for me"):
        candidate(logits, targets, class_start=3 * comm.rank, num_classes=3 * comm.size, comm=comm)
    with pytest.raises(ValueError, match=f"must have num_classes = 2 together, got {3 * comm.size}"):
        candidate(logits, targets, class_start=0, num_classes=2, comm=comm)
