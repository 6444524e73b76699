"""Softmax cross entropy, and the faults of losses that projects have shipped."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from pce_mpi import dense
from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.problems.cases import OPTIONS, REDUCTIONS, has_dtype
from pce_mpi.conformance.problems.kinds import sharding
from pce_mpi.conformance.problems.problem import Array, Kind, Problem, Told
from pce_mpi.conformance.problems.textbook import Faults, Given, Textbook, all_ranks, each_rank, of_gradient, softmax
from pce_mpi.ulps import ulp

_LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128, "float32": 2.0**128, "float64": np.finfo(np.float64).max}


def _exact(problem: Problem) -> tuple[Array, Array]:
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(
        problem.logits, problem.targets, axis=problem.axis, reduction=problem.reduction, **problem.exact_options
    )
    return np.asarray(loss), gradient * problem.upstream


def sizes(book: Textbook) -> tuple[Array, Array, Array]:
    """Return approximate sizes of the summands of a loss and its gradient.

    upstream   (rows,) sum_c u_c and the size of terms of logsumexp, after the reduction: the factor of -log p
    slope      (rows,) the same for the gradient: times dloss and logit_scale
    opposed    (rows, classes) the largest of an entry's summands that may cancel against each other
    """
    problem = book.problem
    slope = np.abs(book.g * problem.exact_options.get("logit_scale", 1.0))
    at_target = (0.0 if problem.with_probabilities else 1.0 - book.smoothing) * (book.q @ book.w)
    u = np.abs(book.u - at_target[:, None] * book.q)
    others = u.sum(axis=-1) + sum(np.abs(derivative) for _, derivative in book.of_lse())
    factor = problem.valid / (book.divisor or 1.0)
    upstream = factor * (at_target + others)
    return upstream, slope * upstream, (slope * factor)[:, None] * np.maximum(others[:, None] * book.p, u)


def _faults(b: Textbook) -> Faults:
    first = (_masks, sharding.of_losses, _options, _numbers, _upstream, _exponentials)
    for family in (*first, _smoothing, _z_loss, _owners, _rows, _ignore_index, _chunks, _probabilities, _roundings):
        yield from family(b)


def _masks(b: Textbook) -> Faults:
    """optax; neuronx-distributed, MindSpeed, Fast-LLM; TransformerEngine, flash-attention."""
    zero_times = ((b.u == 0.0) & (b.nll == np.inf)).any(axis=-1)
    if zero_times.any():
        text = "0 times the logit -inf of another class gives nan, where it is due to give 0"
        yield text, all_ranks(b.but(lost=np.where(zero_times, np.nan, 0.0)))
    ignored = ~b.valid & (b.z[:, :1] == -np.inf).any(axis=-1)
    if ignored.any():
        text = "an ignored row adds 0 times the logit of class 0: nan where that is -inf"
        counted = b.but(lost=np.where(ignored, np.nan, b.lost), valid=b.valid | ignored)
        yield text, Given((counted.loss(),), None)
    starts = [(rank, start) for rank, (start, stop) in enumerate(pairwise(b.problem.splits)) if start < stop]
    first = np.array([~b.owns(rank) & (b.z[:, start] == -np.inf) for rank, start in starts]).any(axis=0) & b.valid
    if first.any() and b.problem.with_numbers and not np.array_equal(first, zero_times):
        text = "a rank that does not have the target adds 0 times the logit of its first class: nan where that is -inf"
        yield text, all_ranks(b.but(lost=np.where(first, np.nan, 0.0)))
    ranks, shards = b.problem.ranks, np.diff(b.problem.splits)
    masked = np.stack([(b.z[:, b.in_shard(rank)] == -np.inf).all(-1) for rank in range(ranks)])
    if masked[shards != 0].any():
        text = "a shard whose logits are all -inf makes the row nan: -inf less the maximum -inf"
        nan = np.where(masked[shards != 0].any(0) & b.valid, np.nan, 0.0)
        yield text, all_ranks(b.but(lost=nan, p=b.p + nan[:, None]))
        yield text, of_gradient(np.where(np.repeat(masked.T, shards, axis=1), np.nan, b.gradient()))


def _exponentials(b: Textbook) -> Faults:
    """pipegoose; insightface; NeMo-Aligner, Megatron-LM; lweitkamp/transformer_parallelisms."""
    top = b.z.max(axis=-1, keepdims=True, initial=-np.inf)
    yield "the softmax is never divided by its sum", of_gradient(b.but(p=np.exp(b.z - top)).gradient())
    if (clipped := np.minimum(b.nll, -np.log(1e-30))).sum() < b.nll.sum():
        yield "log p is the logarithm of a softmax that is clipped at 1e-30", Given((b.but(nll=clipped).loss(),), None)
    dtype, largest = b.problem.dtype, _LARGEST[b.problem.dtype.name]
    text = "log p is the logarithm of an exponential that has become 0"
    if b.smoothing:
        text += ", and infinite where label smoothing needs it"
        if b.nll.sum() > largest:  # the loss of both is infinite
            text = f"a sum of log p over classes and rows overflows {dtype}, which ends at {largest:.5g}; or {text}"
    yield text, all_ranks(b.but(nll=np.where(b.p < np.finfo(np.float32).smallest_subnormal, np.inf, b.nll)))
    exp = np.exp(b.z.astype(compute_dtype_of(b.problem.dtype))).astype(np.float64)
    total = exp.sum(axis=-1, keepdims=True)
    if not np.isfinite(np.log(total[np.isfinite(top)])).all():
        text = "exponentials are of logits from which no maximum was subtracted: they overflow, or all become 0"
        yield text, all_ranks(b.but(p=exp / total, nll=np.log(total) - b.z))
        yield text, all_ranks(b.but(p=exp / total, nll=-np.log(exp / total)))


def _smoothing(b: Textbook) -> Faults:
    """Label smoothing over the wrong classes or rows, or not reduced."""
    s, classes = b.smoothing, b.problem.classes
    if not s or not classes:
        return
    shards = np.diff(b.problem.splits)
    smooth = np.broadcast_to(b.w * s / classes, b.u.shape)
    target = b.u - smooth
    if not b.valid.all():  # u has the terms of ignored rows
        text = "label smoothing counts ignored rows too"
        everywhere = b.but(valid=np.ones_like(b.valid), z_loss=np.where(b.valid, b.z_loss, 0.0))
        yield text, all_ranks(everywhere)
        if b.problem.reduction == "mean":
            yield text, all_ranks(everywhere.with_u(target + smooth * b.valid.mean()))
    if b.problem.ranks > 1:
        what = f"the {shards[0]}" if len(set(shards)) == 1 else f"each rank's own {', '.join(map(str, shards))}"
        spread = f"label smoothing is spread over {what} local classes"
        share = b.w * s * np.repeat(1.0 / np.maximum(shards, 1), shards)
        local = each_rank(b, lambda rank: b.with_u(target + b.in_shard(rank) * share))
        yield f"{spread}, not over all {classes}", local
        # The losses are summed over the ranks.
        yield f"{spread}, not over all {classes}", Given((b.with_u(target + share).loss(),), local.gradient)
        if shards.min() > 1:
            # Megatron-LM: s K / (K - 1) in place of s, over the K classes of a shard; s / (C - 1) may be meant
            hard, more = target / (1.0 - s), b.problem.options["label_smoothing"] * shards / (shards - 1)
            each = np.repeat(more / shards, shards) * b.w
            text = f"{spread}, with the factor K / (K - 1), not over all {classes}"
            yield text, each_rank(b, lambda rank: b.with_u(hard * (1.0 - more[rank]) + b.in_shard(rank) * each))
        text = "the sum of label smoothing is of each rank's own classes only: it is never reduced over the ranks"
        partly = each_rank(b, lambda rank: b.with_u(target + b.in_shard(rank) * smooth))
        yield text, Given(partly.losses, b.gradient())
        # TransformerEngine: the sum of logits that are not shifted is local, its other terms are not
        top = b.z.max(axis=-1, initial=-np.inf)
        shift = np.where(b.valid, top, 0.0)
        books = [book.but(total=b.total, lost=(b.total - book.u.sum(axis=-1)) * shift) for book in partly.books]
        yield text, Given(each_rank(b, lambda rank: books[rank]).losses, b.gradient())
    text = f"label smoothing is spread over the {classes - 1} other classes, not over all {classes}"
    yield text, all_ranks(b.with_u(b.w * (b.q * (1.0 - s) + (1.0 - b.q) * s / max(classes - 1, 1))))


def _options(b: Textbook) -> Faults:
    """Options that are taken as keywords, and not used; a softcap too many."""
    options = b.problem.options
    for name in OPTIONS:
        if name in options and name != "ignore_index":
            others = {other: value for other, value in options.items() if other != name}
            yield f"{name} is not looked at", all_ranks(Textbook.of(replace(b.problem, options=others)))
    if "softcap" in options:
        cap = options["softcap"]
        twice, slope = cap * np.tanh(b.z / cap), b.slope / np.cosh(b.z / cap) ** 2
        yield "softcap is applied twice", all_ranks(b.but(z=twice, slope=slope, **softmax(twice)))
    else:
        for cap in (15.0, 30.0):  # nanochat; Gemma 2
            capped = Textbook.of(replace(b.problem, options=options | {"softcap": cap}))
            yield f"a softcap of {cap:g} is applied, and none was given", all_ranks(capped)


def _numbers(b: Textbook) -> Faults:
    """Class numbers that are rounded, cut, or those of other rows; shards that are taken in another order."""
    if not b.problem.with_numbers:
        return
    starts = np.array(b.problem.splits[:-1])[:, None]
    for done, dtypes in (("rounded", ("bfloat16", "float16")), ("cut", ("uint8", "int16", "uint16"))):
        for dtype in filter(has_dtype, dtypes):
            numbers = b.t.astype(dtype_named(dtype)).astype(np.int64)
            if (numbers != b.t)[b.valid].any():
                yield from sharding.with_targets(b, f"class numbers are {done} to {dtype}", numbers - starts)
    for shift in (1, -1):
        text = "the targets are shifted by one row against the logits"
        yield from sharding.with_targets(b, text, np.roll(b.t, shift) - starts)
    for text, order in sharding.orders(b):
        widths = np.diff(b.problem.splits)[list(order)]
        starts[list(order), 0] = np.cumsum(widths) - widths
        yield from sharding.with_targets(b, text, b.t - starts)


def _upstream(b: Textbook) -> Faults:
    """Liger#968."""
    if b.problem.reduction == "none" and b.problem.dloss is not None and b.problem.rows:
        first = b.but(g=np.broadcast_to(b.g[0], b.g.shape))
        yield "the upstream gradient of row 0 is taken for all rows", of_gradient(first.gradient())


def _z_loss(b: Textbook) -> Faults:
    """nanotron."""
    if b.problem.options.get("z_loss"):
        text = "z_loss lacks the maximum that the logits were shifted by"
        yield text, all_ranks(b.but(lse=b.lse - b.z.max(axis=-1, initial=-np.inf)))


def _owners(b: Textbook) -> Faults:
    """ms-swift."""
    owned = np.zeros(b.p.shape, np.bool_)
    parts, largest = np.zeros_like(b.p), np.zeros_like(b.p)
    for rank, (start, stop) in enumerate(pairwise(b.problem.splits)):
        if start < stop:
            owned[:, start:stop] = b.owns(rank)[:, None]
            parts[:, start:stop] = b.p[:, start:stop].sum(axis=-1, keepdims=True)
            largest[np.arange(len(b.z)), start + b.z[:, start:stop].argmax(axis=-1)] = 1.0
    if b.problem.with_probabilities or owned[b.valid].all():
        return
    text = "only the shard that owns a row's target has a gradient: an all-reduce that autograd does not see"
    yield text, of_gradient(np.where(owned, b.gradient(), 0.0))
    # The shard's maximum is not detached, though it is a constant after its all-reduce.
    more = b.gradient_of(b.total[:, None] * largest * (1.0 - parts))
    yield text, of_gradient(np.where(owned, b.gradient() + more, 0.0))


def _rows(b: Textbook) -> Faults:
    """Wrong rows count, or a mean has a wrong divisor."""
    rows, left = b.problem.rows, int(b.valid.sum())
    if b.problem.reduction == "mean":
        if not left:
            yield "the mean divides by max(count, 1): it is 0 where no row counts", all_ranks(b.but(divisor=1.0))
        if left < rows:  # Paddle
            text = f"the mean divides by all {rows} rows, not by the {left} that are not ignored"
            yield text, all_ranks(b.but(divisor=float(rows)))
        counted = b.valid & (b.row_losses().astype(np.float32) != 0)
        if counted.sum() < left:  # ColossalAI
            text = "the mean counts the rows whose loss is not 0, and leaves out those that are predicted perfectly"
            yield text, all_ranks(b.but(divisor=float((b.q[counted] @ b.w).sum())))
    inside = ~b.valid & (b.t >= 0) & (b.t < b.problem.classes)
    if inside.any():
        # ColossalAI: their softmax is set to 0, and 1 is subtracted at the target all the same
        one = np.where(inside[:, None], np.arange(b.problem.classes) == b.t[:, None], 0.0)
        everywhere = b.but(valid=np.ones_like(b.valid))
        gradient = np.where(b.valid[:, None], b.gradient(), everywhere.gradient_of(-one))
        yield "ignored rows have a gradient of -1 at their target", of_gradient(gradient)


def _ignore_index(b: Textbook) -> Faults:
    """torchshard: a keyword that is taken, and a row with that target counts as any other."""
    if b.problem.with_numbers and "ignore_index" in b.problem.options and not b.valid.all():
        # The number of no row.
        heeded = Textbook.of(replace(b.problem, options=b.problem.options | {"ignore_index": b.t.max() + 1}))
        # A target that is no class adds no logit.
        without = (heeded.total == 0.0) & ~b.valid
        divisor = heeded.divisor + without.sum() if b.problem.reduction == "mean" else heeded.divisor
        yield "ignore_index is not looked at", all_ranks(heeded.but(total=heeded.total + without, divisor=divisor))


# Chunks of up to so many rows are of any length, and of a power of 2 beyond that.
_SHORT = 64


def _chunks(b: Textbook) -> Faults:
    """Automodel#3804: the means of chunks of rows are added up, or averaged whatever each has counted."""
    rows, counted = b.problem.rows, b.q @ b.w
    if b.problem.reduction != "mean" or not counted.any():
        return
    for length in range(2, rows) if rows <= _SHORT else (2**power for power in range(1, (rows - 1).bit_length())):
        chunk = np.arange(rows) // length
        of_chunk = np.bincount(chunk, counted)
        divisor = np.where(of_chunk == 0.0, np.inf, of_chunk)[chunk]
        if np.ptp(divisor[counted != 0.0]) == 0.0:  # one factor, as other faults have
            continue
        text = f"means of chunks of {length} rows are {{}}, and chunks count different numbers of rows"
        yield text.format("added up"), all_ranks(b.but(divisor=divisor))
        yield text.format("averaged"), all_ranks(b.but(divisor=divisor * len(of_chunk)))


def _probabilities(b: Textbook) -> Faults:
    """maxtext; PyTorch's loss_parallel."""
    if b.problem.with_probabilities:
        text = "the gradient is p - q, which is right where the probabilities q of a row sum to 1"
        yield text, of_gradient(b.gradient_of(b.p * (1.0 + 2.0 * b.z_loss * b.lse)[:, None] - b.u))
        text = "the gradient is that of the log-probabilities: it has not gone through log_softmax"
        yield text, of_gradient(b.gradient_of(-b.u))


def _roundings(b: Textbook) -> Faults:
    """Numbers that are rounded or clipped too early."""
    dtype, top = b.problem.dtype, b.z.max(-1, keepdims=True, initial=-np.inf)
    log_p = -softmax(np.maximum(b.z - top, -64.0))["nll"]  # Paddle
    yield "differences to the maximum are clipped at -64", all_ranks(b.but(nll=-log_p, p=np.exp(log_p)))
    # optax, NumPyro.
    text = "logsumexp is rounded before a logit is subtracted: an offset that all logits share costs its bits"
    for narrow in dict.fromkeys((dtype, compute_dtype_of(dtype))):
        lse = b.lse.astype(narrow).astype(np.float64)[:, None]
        yield text, Given((b.but(nll=lse - b.z).loss(),), None)
        yield text, all_ranks(b.but(nll=lse - b.z, p=np.exp(b.z - lse)))
    if dtype.itemsize == 2:

        def rounded(array: Array) -> Array:
            return array.astype(dtype).astype(np.float64)

        # PyTorch's loss_parallel, and Liger.
        text = f"log-probabilities are kept in {dtype}"
        low, scale = b.but(p=np.exp(-rounded(b.nll)), nll=rounded(b.nll)), (b.g / b.divisor)[:, None]
        yield text, all_ranks(low)
        of_row = np.where(b.valid[:, None], rounded(rounded(low.p) * b.total[:, None] - b.u) * rounded(scale), 0.0)
        yield text, Given((low.loss(),), rounded(of_row * b.slope))
        at_target = np.where(b.q != 0, rounded(b.p), b.p)
        late = np.where((b.q != 0) & b.valid[:, None], rounded(b.p * scale) - b.u * scale, b.gradient())
        text = f"1 is subtracted at the target after rounding to {dtype}, when p close to 1 has become 1"
        yield text, of_gradient(b.but(p=at_target).gradient())
        yield text, of_gradient(b.but(p=rounded(b.p)).gradient())
        yield text, of_gradient(rounded(late))


def _tell(b: Textbook, name: str, got: Array) -> Told | None:
    """Name a gradient that is divided by no rows (aiter#5165), or a total in half precision (PyTorch)."""
    if name == "loss":
        return _added_in_half(b, got)
    if b.problem.reduction == "mean" and not b.valid.any() and not np.isfinite(got).all():
        return Told(("no row counts, and the gradient is divided by their number 0: it is due to be 0",))
    return None


def _added_in_half(b: Textbook, got: Array) -> Told | None:
    """Name a sum or mean that has the bits of a running total in half precision, over chunks of a power of 2 rows."""
    dtype, rows, due = b.problem.dtype, b.problem.rows, b.problem.expected[0]
    # One rounding of the right number is another fault.
    if dtype.itemsize != 2 or b.problem.reduction == "none" or (np.abs(got - due) < 2.0 * ulp(due, dtype.name)).any():
        return None
    whole = np.where(b.valid, b.row_losses(), 0.0) / b.divisor
    of_lse = np.where(b.valid, b.total * (b.lse - b.z.max(axis=-1, initial=-np.inf)), 0.0) / b.divisor
    for parts in ((whole,), (whole - of_lse, of_lse)):
        for power in range((rows - 1).bit_length()):
            total, starts = np.zeros((), dtype), np.arange(0, rows, 2**power)
            for each in np.stack([np.add.reduceat(part, starts) for part in parts], axis=-1).astype(np.float32).flat:
                total = (total + each).astype(dtype)
            if (got == float(total)).all():
                return Told((f"the {b.problem.reduction} is added up over chunks of rows in {dtype}",))
    return None


LOSS = Kind(
    noun="loss",
    plural="losses",
    exact=_exact,
    sizes=sizes,
    faults=_faults,
    told='the loss is of the opposite sign: a loss is declared by @offers(kind="loss", reductions=("none",))',
    options=OPTIONS,
    tell=_tell,
    reductions=REDUCTIONS,
)
