"""Losses of other frameworks, called through the adapters of the conformance kit, over the ranks of this job."""

import os
import re
import sys
import textwrap
import types

import numpy as np
import pytest

from jobs.launch import ROOT, complete
from pce_mpi import dense as dense_loss
from pce_mpi.conformance import Gradient, Offer, cases, load, offers, run_case
from pce_mpi.conformance.candidates.loading import FUNCTION_ADAPTERS, NAMED_CANDIDATES, adapted
from pce_mpi.conformance.candidates.torch_tensors import ProcessGroup
from pce_mpi.conformance.judging.outcomes import Report, agree
from pce_mpi.conformance.problems.cases import REDUCTIONS
from pce_mpi.conformance.reports import summary

TORCH = "candidates.gallery.torch_losses"
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

        from pce_mpi.conformance.candidates.loading import FUNCTION_ADAPTERS, NAMED_CANDIDATES, adapted

        def function(logits, targets, group): ...

        made = [*NAMED_CANDIDATES.values(), *(adapted(name, function) for name in FUNCTION_ADAPTERS)]
        print(len(made), *sorted({"torch", "jax", "mpi4py.MPI"} & set(sys.modules)))
        """
    done = complete([sys.executable, "-c", textwrap.dedent(program)])
    assert done.stdout.split() == [str(len(NAMED_CANDIDATES) + len(FUNCTION_ADAPTERS))], done.stderr


def test_unknown_name_is_answered_with_known_ones():
    with pytest.raises(ValueError, match="no adapter 'torch'; there are torch-shards, jax-shard-map"):
        adapted("torch", failures)


# --------------------------------------------------------------------------------------------------------------- torch


def test_dense_torch_conforms_in_float32_and_float64(comm):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    # torch sums log p over the classes before it multiplies by label_smoothing / C: masks of -3e38 overflow.
    overflows = {"finite-mask/lowest-smoothed": {"not finite"}}
    # Each rank gathers the logits and does the same: one rank shows the other dtype.
    dtypes = ["float32", "float64"] if comm.size == 1 else ["float32"]
    assert failures(load(f"{TORCH}:dense"), comm, dtypes=dtypes) == overflows


def test_loss_parallel_is_wrong_on_4_d_logits(comm, started):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    candidate = started(load(f"{TORCH}:loss_parallel"))
    assert failures(candidate, comm, pattern="random-logits") == {}
    wrong = failures(candidate, comm, pattern=["dims/4-D", "axis/4-D-*"])
    assert wrong and all(kinds == {"gradient"} for kinds in wrong.values())


def test_process_group_has_mpi_ranks_and_ends(comm):
    distributed = pytest.importorskip("torch.distributed", reason="make test-peers installs torch")
    candidate = load(f"{TORCH}:loss_parallel")
    for _ in range(2):
        candidate.start(comm)
        ranks = distributed.get_rank(), distributed.get_world_size()
        candidate.stop()
        assert ranks == (comm.rank, comm.size)
        assert not distributed.is_initialized()


def test_candidates_share_process_group_until_last_stops(comm):
    torch = pytest.importorskip("torch", reason="make test-peers installs torch")
    first, second = (adapted("torch-shards", with_the_group_third) for _ in range(2))
    logits, targets = np.ones((2, 3), np.float32), np.zeros(2, np.int64)
    for candidate in (first, second, first):  # the last is started already
        candidate.start(comm)
    first.stop()
    loss, _ = second(logits, targets, class_start=0, num_classes=3 * comm.size, comm=comm)
    assert loss.tolist() == [3.0 * comm.size] * 2
    for _ in range(2):
        second.stop()
    assert not torch.distributed.is_initialized()


def test_process_group_of_the_user_stays(comm):
    distributed = pytest.importorskip("torch.distributed", reason="make test-peers installs torch")
    users = ProcessGroup()
    users.start(comm)  # stands for the user's own init_process_group
    ProcessGroup._users, ProcessGroup._made = 0, False
    try:
        candidate = adapted("torch-shards", with_the_group_third)
        candidate.start(comm)
        candidate.stop()
        assert distributed.is_initialized()
        if comm.size > 1:
            alone = comm.Split(comm.rank)
            with pytest.raises(RuntimeError, match="must have the 1 ranks of the communicator"):
                candidate.start(alone)
            alone.Free()
    finally:
        distributed.destroy_process_group()


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


def of_functional_collectives(gradient):
    """A right loss that is not there yet when it is returned, or whose gradient is not."""
    torch = pytest.importorskip("torch", reason="make test-peers installs torch")
    from torch.distributed import _functional_collectives as functional

    @offers(gradient=gradient, reductions=("none",), checks_targets=False)
    def loss(logits, targets, group):
        if gradient == "value":
            logits = logits.clone().requires_grad_()
        world, rank, count = group.size(), group.rank(), logits.shape[-1]
        shards = [torch.empty_like(logits) for _ in range(world)]
        torch.distributed.all_gather(shards, logits.detach().contiguous(), group=group)
        shards[rank] = logits
        rows = torch.nn.functional.cross_entropy(torch.cat(shards, dim=-1).double(), targets, reduction="none")
        waiting = functional.all_reduce(rows.float() / world, "sum", group)
        if gradient != "value":
            return waiting
        (mine,) = torch.autograd.grad(rows.sum(), logits)
        padded = torch.nn.functional.pad(mine, (count * rank, count * (world - 1 - rank)))
        return waiting.detach(), functional.all_reduce(padded, "sum", group)[:, count * rank : count * (rank + 1)]

    return loss


@pytest.mark.parametrize("gradient", ["none", "value", "backward"])
def test_result_that_torch_waits_for_is_judged(comm, started, gradient):
    candidate = started(adapted("torch-shards", of_functional_collectives(gradient)))
    assert failures(candidate, comm, pattern=["random-logits/float32", "offset"]) == {}


def test_dtensor_from_candidate_is_refused_in_words(comm, started):
    torch = pytest.importorskip("torch", reason="make test-peers installs torch")
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    def loss(logits, targets, group):
        mesh = init_device_mesh("cpu", (group.size(),))
        return DTensor.from_local(logits.sum(-1).detach(), mesh, [Replicate()])

    candidate = started(adapted("torch-shards", offers(gradient="none")(loss)))
    (case,) = cases(candidate, pattern="random-logits/float32")
    (finding,) = run_case(candidate, case, comm).findings
    assert "a DTensor of torch may have its elements elsewhere: take .to_local() or .full_tensor()" in finding.text
    assert torch.distributed.is_initialized()


def with_the_group_third(logits, targets, anything):
    return logits.sum(-1) * anything.size()


def as_megatron(logits, targets, label_smoothing=0.0, tp_group=None):
    return logits.sum(-1) * tp_group.size()


def as_flash_attention(logits, targets, label_smoothing=0.0, process_group=None):
    return logits.sum(-1) * process_group.size()


def with_what_the_kit_knows(logits, targets, *, group, class_start, num_classes):
    assert (class_start, num_classes) == (logits.shape[-1] * group.rank(), logits.shape[-1] * group.size())
    return logits.sum(-1) * group.size()


def without_group(logits, labels):
    return logits.sum(-1) * torch_ranks()


def with_option_third(logits, target, label_smoothing=0.0):
    assert label_smoothing == 0.0
    return logits.sum(-1) * torch_ranks()


def torch_ranks():
    from torch import distributed

    return distributed.get_world_size()


class InAModule:
    """Called as a module of torch is."""

    def __call__(self, *arguments, **keywords):
        return self.forward(*arguments, **keywords)

    def forward(self, logits, targets, process_group):
        return as_flash_attention(logits, targets, process_group=process_group)


@pytest.mark.parametrize(
    "function",
    [
        with_the_group_third,
        as_megatron,
        as_flash_attention,
        with_what_the_kit_knows,
        without_group,
        with_option_third,
        InAModule(),
    ],
    ids=lambda f: getattr(f, "__name__", "InAModule"),
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


def test_undeclared_parts_of_function_stay_inferred():
    @offers(reductions=("sum",), dtypes=("bfloat16",), gradient="none")
    def forward_only(logits, targets, group, label_smoothing=0.0): ...

    expected = Offer(
        reductions=("sum",),
        dtypes=("bfloat16",),
        gradient="none",
        options=("label_smoothing",),
        shards="equal",
        num_classes=False,
    )
    assert adapted("torch-shards", forward_only).offer == expected

    @offers(shards="chunks")
    def uneven(logits, targets, group, num_classes): ...

    offer = Offer(shards="chunks", reductions=("none",), gradient="backward")
    assert adapted("torch-shards", uneven).offer == offer

    def by_attributes(logits, targets, group): ...

    by_attributes.gradient = "value"
    assert adapted("torch-shards", by_attributes).offer.gradient == Gradient.VALUE

    @offers(dtypes=("float32", "bfloat16"))
    def mapped(logits, targets, *, axis_name, label_smoothing=0.0, reduction="mean"): ...

    offer = adapted("jax-shard-map", mapped).offer
    assert (offer.options, offer.reductions) == (("label_smoothing",), REDUCTIONS)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda logits, group: ..., r"takes \(logits, group\): .* it is an entropy, .*@offers\(kind=\"entropy\"\)"),
        (lambda logits: ..., r"too many positional arguments; where it is an entropy, .*@offers\(kind=\"entropy\"\)"),
        (
            lambda logits, target, vocab_start, tp_group: ...,
            r"missing a required argument: 'vocab_start'; write one that calls it: def cross_entropy\(",
        ),
    ],
)
def test_function_that_cannot_be_called_is_told_why(function, said):
    with pytest.raises(TypeError, match=said):
        adapted("torch-shards", function)


def policy():
    """The module in docs/conformance.md, and its functions without their declarations."""
    pytest.importorskip("torch", reason="make test-peers installs torch")
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```text\n(# policy.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    documented, bare = types.ModuleType("policy"), types.ModuleType("policy")
    exec(source, vars(documented))
    exec(re.sub(r"^@offers.*\n", "", source, flags=re.MULTILINE), vars(bare))
    return documented, bare


FEW = ["random-logits", "offset", "masked-row", "masked-classes", "dims", "upstream", "inputs-unmodified"]


@pytest.mark.parametrize("name", ["log_prob", "entropy", "kl"])
def test_policy_of_the_documentation_conforms(comm, started, name):
    documented, _ = policy()
    assert failures(started(adapted("torch-shards", getattr(documented, name))), comm, pattern=FEW) == {}


@pytest.mark.ranks(2, 3)
def test_head_of_the_documentation_is_diagnosed_as_shown(comm, started, monkeypatch):
    documented, _ = policy()
    monkeypatch.setitem(sys.modules, "policy", documented)
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```text\n(# head.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^  (dhidden is of .*?) \(dhidden is", page, re.MULTILINE | re.DOTALL)
    head = types.ModuleType("head")
    exec(source, vars(head))
    candidate = started(adapted("torch-shards", head.log_prob))
    (case,) = cases(candidate, pattern="random-logits/float32")
    (finding,) = run_case(candidate, case, comm).findings
    assert finding.text.startswith(" ".join(shown.split()))
    candidate = started(adapted("torch-shards", offers(dhidden="partial")(head.log_prob)))
    assert failures(candidate, comm, pattern=[*FEW[:2], "product", "chunk-borders", "accumulated-dw"]) == {}


@pytest.mark.ranks(3)
def test_maximum_of_the_documentation_is_diagnosed_as_shown(comm, started):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```text\n(# largest.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^FAIL placement/random/float32.*?\n  (.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    documented = types.ModuleType("largest")
    exec(source, vars(documented))
    candidate = started(adapted("torch-shards", documented.largest))
    outcomes = [run_case(candidate, case, comm) for case in cases(candidate)]
    agree(outcomes)
    for outcome in outcomes:
        assert outcome.case in page and outcome.findings[0].text.partition(" (")[0] in " ".join(shown.split())


@pytest.mark.ranks(3)
def test_sum_of_what_ranks_compute_alike_is_named(comm, started):
    _, bare = policy()
    once_more = bare.SumOverRanks.apply
    bare.SumOverRanks = types.SimpleNamespace(apply=lambda part, group, parts: once_more(part, group, True))
    candidate = started(adapted("torch-shards", offers(kind="kl")(bare.kl)))
    (case,) = cases(candidate, pattern="random-logits/float32")
    text = run_case(candidate, case, comm).findings[0].text
    assert text.startswith("the gradient is 3 times too large: it is summed over the ranks once more")


def test_step_of_the_documentation_is_judged_as_said(comm, started):
    pytest.importorskip("torch", reason="make test-peers installs torch")
    page = (ROOT / "docs" / "the-mean-of-a-step.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```text\n(# step_in_torch.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    documented = types.ModuleType("step_in_torch")
    exec(source, vars(documented))
    assert failures(started(adapted("torch-shards", documented.right)), comm) == {}
    wrong = started(adapted("torch-shards", documented.mean_of_means))
    assert failures(wrong, comm, pattern="step/no-valid-token") == {"step/no-valid-token": {"loss"}}
    if comm.size in (2, 3):
        (case,) = cases(wrong, pattern="step/data-ranks")
        (quoted,) = re.findall(r"The second one fails: \"(.*?)\"", page.replace("\n", " "))
        assert run_case(wrong, case, comm).findings[0].text.startswith(quoted)


def test_candidate_in_pytest_is_as_documented(comm, monkeypatch):
    _, bare = policy()
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```text\n(# test_my_loss.py.*?)^```$", page, re.MULTILINE | re.DOTALL)

    @offers(checks_targets=False)
    def cross_entropy(logits, targets, group):
        return -bare.log_prob(logits, targets, group)

    monkeypatch.setitem(sys.modules, "my_loss", types.SimpleNamespace(cross_entropy=cross_entropy))
    test = types.ModuleType("test_my_loss")
    exec(source, vars(test))
    (parametrized,) = test.test_conforms.pytestmark
    assert [str(case) for case in parametrized.args[1]] == [str(case) for case in cases(test.candidate)]
    test.candidate.start(comm)  # by a user who does not know that it is started
    try:
        for case in cases(test.candidate, pattern=["random-logits", "upstream"]):
            test.test_conforms(case)
    finally:
        test.candidate.stop()


@pytest.mark.ranks(1)  # the compiler takes seconds, and knows nothing of ranks
def test_compiled_function_has_a_backward_pass(comm, started):
    torch = pytest.importorskip("torch", reason="make test-peers installs torch")

    def dense(logits, targets):  # of one rank
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    # With dynamic shapes, its backward pass gives away buffers, and refuses to keep the graph.
    compiled = torch.compile(dense, backend="aot_eager", dynamic=True)

    @offers(checks_targets=False)
    def function(logits, targets, group):
        return compiled(logits, targets)

    candidate = started(adapted("torch-shards", function))
    logits, targets = np.eye(4, 3, dtype=np.float32), np.arange(4) % 3
    loss, backward = candidate(logits, targets, class_start=0, num_classes=3, comm=comm)
    expected = dense_loss.softmax_cross_entropy_value_and_grad(logits, targets, reduction="none")
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(backward(np.ones(4, np.float32)), expected[1], rtol=1e-6)


def hints(candidate, comm):
    """The declarations that the findings in a few cases ask for."""
    outcomes = [run_case(candidate, case, comm) for case in cases(candidate, pattern=["random-logits", "offset"])]
    texts = {finding.text for outcome in outcomes for finding in outcome.findings}
    return {hint for text in texts for hint in re.findall(r"@offers(\((?:[^()]|\([^()]*\))*\))", text)}


def test_hint_for_undeclared_log_prob_is_right(comm, started):
    _, bare = policy()
    assert hints(started(adapted("torch-shards", bare.log_prob)), comm) == {'(kind="log_prob")'}
    declared = offers(kind="log_prob", checks_targets=False)(bare.log_prob)
    assert failures(started(adapted("torch-shards", declared)), comm, pattern=FEW) == {}


def test_hints_for_undeclared_loss_are_right(comm, started):
    _, bare = policy()

    def cross_entropy(logits, targets, group):
        return -bare.log_prob(logits, targets, group)

    pattern = [*FEW, "target-out-of-range"]
    candidate = started(adapted("torch-shards", cross_entropy))
    left_out = [case for case in cases(pattern=pattern) if case not in cases(candidate, pattern=pattern)]
    outcomes = [run_case(candidate, case, comm) for case in [*cases(candidate, pattern=pattern), *left_out]]
    report = Report("", candidate.offer, (comm.size,), {}, 0, False, 1.0, outcomes)
    texts = [finding.text for outcome in outcomes for finding in outcome.findings]
    found = {hint for text in texts for hint in re.findall(r"@offers(\((?:[^()]|\([^()]*\))*\))", text)}
    assert found == {"(checks_targets=False)"}
    hint = summary.hint(report)
    assert "the signature tells no option" in hint and '@offers(dtypes=("float32",' in hint
    cross_entropy = offers(checks_targets=False, dtypes=("float32", "bfloat16"), dims=(2, 3))(cross_entropy)
    candidate = started(adapted("torch-shards", cross_entropy))
    assert len(cases(candidate, pattern=FEW)) > len(cases(Offer(), pattern=FEW))
    assert failures(candidate, comm, pattern=FEW) == {}


def test_hint_for_mean_loss_is_right(comm, started):
    _, bare = policy()

    def mean(logits, targets, group):
        return -bare.log_prob(logits, targets, group).mean()

    assert hints(started(adapted("torch-shards", mean)), comm) == {'(reductions=("mean",))'}
    declared = offers(reductions=("mean",))(mean)
    assert failures(started(adapted("torch-shards", declared)), comm, pattern=["random-logits", "upstream"]) == {}


def test_hint_for_detached_loss_is_right(comm, started):
    _, bare = policy()

    def detached(logits, targets, group):
        return -bare.log_prob(logits, targets, group).detach()

    assert hints(started(adapted("torch-shards", detached)), comm) == {'(gradient="none")'}
    declared = offers(gradient="none")(detached)
    assert failures(started(adapted("torch-shards", declared)), comm, pattern=["random-logits", "offset"]) == {}


# ----------------------------------------------------------------------------------------------------------------- jax


def jax_cross_entropy(logits, targets, *, axis_name, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    import jax
    from jax import lax, numpy as jnp

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
