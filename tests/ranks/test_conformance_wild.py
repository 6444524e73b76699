"""Losses that projects have shipped, by their formulas in tests/candidates/wild: the kit names their faults."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from candidates.shipped import defined_in
from candidates.wild import (
    bmtrain,
    colossalai,
    insightface,
    liger,
    megatron,
    mesh_transformer,
    mindspeed,
    ms_swift,
    nanotron,
    nemo,
    nemo_aligner,
    nemo_rl,
    neuronx,
    pipegoose,
    rlinf,
    torchtitan,
    transformer_engine,
    transformer_parallelisms,
    trl,
    unshifted,
    unsloth,
)
from candidates.wild.vocab_parallel import VocabParallel
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.judging.outcomes import Verdict
from pce_mpi.conformance.runs.running import run_case

PROJECTS = [
    *(bmtrain, colossalai, insightface, liger, megatron, mesh_transformer, mindspeed, ms_swift, nanotron, nemo),
    *(nemo_aligner, nemo_rl, neuronx, pipegoose, rlinf, torchtitan, transformer_engine, transformer_parallelisms),
    *(trl, unshifted, unsloth),
]


class Shipped(NamedTuple):
    """A candidate, a case, and the words of the line that its report begins with."""

    candidate: type
    case: str
    words: str
    ranks: int = 3

    def __str__(self):
        return f"{self.candidate.__name__}-{self.case}"


LOCAL = "label smoothing is spread over the 8 local classes, with the factor K / (K - 1), not over all 24"
LOG_OF_0 = "log p is the logarithm of an exponential that has become 0"
NO_MAXIMUM = "z_loss lacks the maximum that the logits were shifted by"
TIMES_0 = "a rank that does not have the target adds 0 times the logit of its first class: nan where that is -inf"
UNSHIFTED = "the entropy is logsumexp less the mean logit: an offset that all logits share costs its digits"
NOT_DIVIDED = "the softmax is never divided by its sum"
SHIPPED = [
    Shipped(megatron.MegatronSmoothing, "label_smoothing/float32", f"the ranks' losses differ: {LOCAL}"),
    Shipped(
        megatron.MegatronSmoothing,
        "pair/ignore_index+label_smoothing",
        "is spread over each rank's own 3, 6, 15 local classes, with the factor K / (K - 1), not over all 24",
    ),
    Shipped(
        megatron.MegatronSmoothing,
        "logits-of-1000-smoothed/float32",
        "log p is the logarithm of an exponential that has become 0, and infinite where label smoothing needs it",
    ),
    Shipped(
        megatron.MegatronSmoothing,
        "inputs-unmodified",
        "logits were modified; where that is meant, declare it: @offers(overwrites_logits=True)",
    ),
    Shipped(
        megatron.MegatronSmoothing,
        "label_smoothing/float32",
        "label smoothing is spread over the 23 other classes, not over all 24",
        ranks=1,
    ),
    Shipped(megatron.MegatronSmoothing, "target-out-of-range/one-too-many", "no rank refused it"),
    Shipped(megatron.MegatronFused, "random-logits/float32", "every entry of the gradient is rounded to bfloat16"),
    Shipped(megatron.MegatronFused, "logits-of-1000/float32", "every entry of the gradient is rounded to bfloat16"),
    Shipped(megatron.MegatronFused, "masked-row", "every entry of the gradient is rounded to bfloat16"),
    Shipped(megatron.MegatronFused, "p-near-1/float32", "every entry of the gradient is rounded to bfloat16"),
    Shipped(
        megatron.MegatronBackward,
        "backward-twice/each-row",
        "the second backward pass changed the gradient that the first one had returned",
    ),
    Shipped(
        transformer_engine.TransformerEngineSmoothing,
        "label_smoothing/float32",
        "the ranks' losses differ: the sum of label smoothing is of each rank's own classes only: it is never reduced",
    ),
    Shipped(
        transformer_engine.TransformerEngineBackward,
        "backward-twice/each-row",
        "the second backward pass changed the gradient that the first one had returned",
    ),
    Shipped(
        ms_swift.MsSwiftLogProb,
        "random-logits/float32",
        "only the shard that owns a row's target has a gradient: an all-reduce that autograd does not see",
    ),
    Shipped(
        ms_swift.MsSwiftLogProb,
        "targets-on-one-rank",
        "only the shard that owns a row's target has a gradient: an all-reduce that autograd does not see",
    ),
    Shipped(
        ms_swift.MsSwiftEntropy,
        "random-logits/float32",
        "each rank has the gradient of its own classes' part of the entropy: an all-reduce that autograd does not see",
    ),
    Shipped(
        colossalai.ColossalAI,
        "p-equal-1",
        "the mean counts the rows whose loss is not 0, and leaves out those that are predicted perfectly",
    ),
    Shipped(colossalai.ColossalAI, "ignored/inside", "ignored rows have a gradient of -1 at their target"),
    Shipped(nanotron.NanotronZLoss, "z_loss/float32", NO_MAXIMUM),
    Shipped(liger.LigerGradient, "p-near-1/bfloat16", "1 is subtracted at the target after rounding to bfloat16"),
    Shipped(ms_swift.MsSwiftLogProb, "result-form/each-row", "only the shard that owns a row's target has a gradient"),
    Shipped(liger.LigerGradient, "inputs-unmodified", "logits were modified; where that is meant, declare it"),
    *(
        Shipped(candidate, "masked-classes/every-third", "0 times -inf gives nan: a class whose logit is -inf has")
        for candidate in (
            *(unshifted.UnshiftedEntropy, unshifted.VerlEntropy, unshifted.ArealEntropy),
            nemo_rl.NemoRLEntropy,
        )
    ),
    *(
        Shipped(candidate, f"offset/{offset}/float32", UNSHIFTED)
        for candidate in (unshifted.UnshiftedEntropy, unshifted.VerlEntropy, unshifted.ArealEntropy)
        for offset in ("1e3", "1e4")
    ),
    *(
        Shipped(candidate, "masked-classes/first-block", TIMES_0)
        for candidate in (mindspeed.FirstClassTimes0, neuronx.NeuronxLoss, neuronx.NeuronxLogProb)
    ),
    *(
        Shipped(candidate, case, words)
        for candidate, case, words in (
            (unshifted.UnshiftedEntropy, "dims/2-D", UNSHIFTED),
            (unshifted.VerlEntropy, "inputs-unmodified", "logits were modified"),
            (nemo.NeMoSmoothing, "label_smoothing/float32", f"the ranks' losses differ: {LOCAL}"),
            (neuronx.NeuronxLoss, "label_smoothing/float32", f"{LOCAL}; the gradient is wrong too"),
            (mesh_transformer.MeshTransformerZLoss, "z_loss/float32", NO_MAXIMUM),
            (bmtrain.BMTrainGradient, "p-near-1/bfloat16", "1 is subtracted at the target after rounding to bfloat16"),
            (trl.TrlLogProb, "offset/1e4/float32", "logsumexp is rounded before a logit is subtracted"),
            (nemo_aligner.NeMoAlignerLogProb, "logits-of-1000/float32", LOG_OF_0),
            (
                insightface.InsightFace,
                "logits-of-1000/float32",
                "log p is the logarithm of a softmax that is clipped at",
            ),
            (pipegoose.Pipegoose, "random-logits/float32", NOT_DIVIDED),
            (pipegoose.Pipegoose, "logits-of-1000/float32", NOT_DIVIDED),
            (
                transformer_parallelisms.NoMaximumAtAll,
                "logits-of-1000/float32",
                "exponentials are of logits from which",
            ),
            (rlinf.RLinfEntropy, "random-logits/float32", "the gradient of the entropy is dropped: it is 0"),
            (rlinf.RLinfEntropy, "logits-of-1000/float32", "the gradient of the entropy is dropped: it is 0"),
            (rlinf.RLinfLogProb, "masked-shard/last", "the gradient is wrong: nan in rows that have a logit of -inf"),
            (unsloth.UnslothLogProb, "random-logits/float64", "the log-probability is computed in float32"),
        )
    ),
]


def run(candidate, name, comm):
    (case,) = cases(candidate, pattern=name)
    return run_case(candidate, case, comm)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_shipped_fault_is_named_first(comm, shipped):
    if comm.size != shipped.ranks:
        pytest.skip(f"the words are those of {shipped.ranks} ranks: make test N={shipped.ranks} runs it")
    outcome = run(shipped.candidate(), shipped.case, comm)
    assert outcome.failed
    assert shipped.words in outcome.findings[0].text, outcome.findings


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "candidate",
    [megatron.MegatronSmoothing, transformer_engine.TransformerEngineSmoothing, nanotron.NanotronZLoss],
    ids=lambda each: each.__name__,
)
def test_fault_of_option_passes_without_it(comm, candidate):
    plain = [
        "random-logits/float32",
        "reduction/none",
        "p-near-1/float32",
        "offset/1e4/float32",
        "masked-classes/every-third",
    ]
    outcomes = [run(candidate(), name, comm) for name in plain]
    assert [outcome.findings for outcome in outcomes if outcome.failed] == []


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("candidate", "pattern"),
    [
        (VocabParallel, None),
        (torchtitan.TorchtitanLoss, ["random-logits", "p-near-1", "offset", "masked-*", "ignored"]),
    ],
)
def test_common_ground_of_projects_conforms(comm, candidate, pattern):
    """The faults are those of the projects, not of the steps that they share."""
    chosen = [case for case in cases(candidate(), pattern=pattern) if case.family != "many-rows"]
    outcomes = [run_case(candidate(), case, comm) for case in chosen]
    failed = [(outcome.case, outcome.findings) for outcome in outcomes if outcome.verdict != Verdict.PASS]
    assert chosen and failed == []


@pytest.mark.ranks(3)  # on one rank the two conventions are one
def test_declared_smoothing_keeps_the_name_of_its_fault(comm):
    candidate = megatron.MegatronSmoothing()
    declared = replace(candidate.offer, smoothing="others")
    (case,) = cases(declared, pattern="label_smoothing/float32")
    assert LOCAL in run_case(candidate, case, comm, offer=declared).findings[0].text


def test_every_shipped_loss_has_a_test():
    assert defined_in(*PROJECTS) == {each.candidate for each in SHIPPED} | {torchtitan.TorchtitanLoss}
