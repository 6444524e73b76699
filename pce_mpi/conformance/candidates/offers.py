"""The declaration of what a candidate supports; `help(pce_mpi.conformance.offers)` has all of it.

The names of the candidate's parameters, and the adapter that calls it, tell all that is not declared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
import inspect
from textwrap import indent
from typing import Any, Literal, TypeVar, get_args, get_origin

from pce_mpi.conformance.problems.cases import DTYPES, OPTIONS, REDUCTIONS, Gradient, Shards
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.kinds.placement import FINDS, MOVES

# Further options, of candidates of one kind.
MORE_OPTIONS = ("temperature", "support", "bias")
AVERAGED = ("data", "context", "micro-batches")
Computed = Literal["sum", "mean", "max", "min", "prod", "norm", "norm-inf", "logsumexp", "replicate", "shard"]

Candidate = Callable[..., Any]
_Candidate = TypeVar("_Candidate", bound=Candidate)


@dataclass(frozen=True)
class Offer:
    """The features that a candidate supports; other cases are reported as not offered.

    Parameters
    ----------
    kind : str
        "loss"; "log_prob", the log-probability of each row's target; "entropy", that of each row's softmax; "kl", the
        divergence of a student's softmax and a teacher's; "topk_kl", that over the teacher's largest `top_k` classes of
        all shards; "step", the loss of a micro-batch, of which a trainer combines the gradients; or "placement", a
        function of an array that ranks hold together. "linear", "linear_log_prob" and "linear_entropy" are the first
        three of logits hidden @ w. Losses and divergences have reductions, all others "none" alone.
    dtypes : tuple of str
        The dtypes of the logits: "float16", "bfloat16", "float32", "float64".
    options : tuple of str
        The keywords that it takes: "weight", "ignore_index", "label_smoothing", "z_loss", "logit_scale", "softcap"; of
        a divergence "temperature" alone; of log-probabilities and entropies "support"; of hidden @ w "temperature" and
        "bias". The logits are multiplied by "logit_scale" and divided by "temperature".
    reductions : tuple of str
        The reductions of the losses per row: "mean", "sum", "none".
    ignore_index : int, optional
        Rows with this target are ignored, and it takes no keyword to change that.
    smoothing : str
        "all": label smoothing s gives each of the C classes s / C. "others": it gives each class but the target
        s / (C - 1).
    direction : str
        Of a divergence: "forward", KL(teacher || student); "reverse", KL(student || teacher); or, over all classes,
        "jensen-shannon".
    beta : float
        Of a Jensen-Shannon divergence: the weight of the teacher in the mean, from 0 to 1.
    temperature_squared : bool
        A divergence is multiplied by the square of the temperature.
    rest : str
        Of the classes beyond the `top_k`: their terms are "dropped", with the probabilities of a softmax over all
        classes; the probabilities of the others are "renormalized" to a sum of 1; or they are a "bucket", one class
        more.
    dhidden : str
        Of logits hidden @ w: the gradient of hidden is "summed" over the classes of all shards, the same on every rank;
        or "partial", of each rank's own classes, and the caller sums it.
    computes : str
        Of a sharded array the "sum", "mean", "max", "min", "prod", "norm", "norm-inf" or "logsumexp" of each row; or a
        move to another placement, "replicate" from shards, or "shard" from replicas.
    partial : str
        "no"; or each rank has a term of a partial array, which that makes whole ("mean" one of
        `Partial("avg")`), and gradients are of that "term", or of the "array" that the terms make, the upstream ones.
    ties : str
        Of "max", "min" and "norm-inf": elements that tie have "shared" the gradient, or the "first" has all of it.
    probabilities : bool
        It takes floating-point targets, shaped and sharded as the logits.
    class_numbers : bool
        It takes class numbers as targets. Without, it takes probabilities alone, and the probability 1 stands for each
        class number.
    normalized : bool
        Target probabilities have to sum to 1 in each row.
    dims : tuple of int
        The numbers of dimensions that the logits may have. Without 2, the rows of most cases are in two axes.
    any_axis : bool
        It takes `axis`; otherwise the classes are the last axis.
    shards : str
        "equal" lengths; "array_split", as numpy.array_split makes them, none of them empty; "chunks", as torch.chunk
        makes them; "any" split points, empty shards included.
    gradient : Gradient
        What it returns beside the loss.
    arrays : str
        The library of its arguments: "numpy", "cupy" or "torch"; its results may be any array that supports DLPack.
    strided : bool
        It takes logits that are not contiguous.
    overwrites_logits : bool
        It may write to the logits, or return their memory.
    deterministic : bool
        It gives the same bits for the same call.
    backward_twice : bool
        Its backward function can be called a second time.
    empty : bool
        It takes zero rows.
    any_rows : bool
        It takes any number of rows; otherwise a multiple of the number of ranks.
    checks_targets : bool
        It refuses targets that are no class.
    num_classes : bool
        It uses `num_classes`, so that it can refuse logits of all classes that were passed as a shard.
    several_targets : bool
        It takes targets with an axis more at the end, several for each row, and returns as many log-probabilities.
    batch_comm : bool
        It takes `batch_comm`, a communicator over which the rows are sharded: a sum or mean is over all of them.
    same_bits : bool
        It gives the same bits on every number of ranks: each result has to equal, to the last bit, its result for the
        whole problem on one rank. So it sends over the communicator that it is given, and over no other.
    averaged : tuple of str
        What its trainer averages gradients over, for `kind="step"`: "data", the ranks that have sequences of their own,
        "context", those that share sequences, and "micro-batches". Over the others it sums.
    """

    kind: str = "loss"
    dtypes: tuple[str, ...] = ("float32",)
    options: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ("mean",)
    ignore_index: int | None = None
    smoothing: Literal["all", "others"] = "all"
    direction: Literal["forward", "reverse", "jensen-shannon"] = "forward"
    beta: float = 0.5
    temperature_squared: bool = False
    rest: Literal["dropped", "renormalized", "bucket"] = "dropped"
    dhidden: Literal["summed", "partial"] = "summed"
    computes: Computed = "sum"
    partial: Literal["no", "term", "array"] = "no"
    ties: Literal["shared", "first"] = "shared"
    probabilities: bool = False
    class_numbers: bool = True
    normalized: bool = False
    dims: tuple[int, ...] = (2,)
    any_axis: bool = False
    shards: Shards = "any"
    gradient: Gradient = Gradient.VALUE
    arrays: Literal["numpy", "cupy", "torch"] = "numpy"
    strided: bool = True
    overwrites_logits: bool = False
    deterministic: bool = True
    backward_twice: bool = True
    empty: bool = True
    any_rows: bool = True
    checks_targets: bool = True
    num_classes: bool = True
    several_targets: bool = False
    batch_comm: bool = False
    same_bits: bool = False
    averaged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind = KINDS[_one("kind", self.kind, tuple(KINDS))]
        self._set("dtypes", _subset("dtypes", self.dtypes, DTYPES))
        self._set("options", _subset("options", self.options, kind.options))
        reductions = self.reductions if len(kind.reductions) > 1 else kind.reductions
        self._set("reductions", _subset("reductions", reductions, kind.reductions))
        self._set("averaged", _subset("averaged", self.averaged, AVERAGED))
        self._set("dims", _subset("dims", self.dims, range(1, 33)))
        self._set("probabilities", self.probabilities if self.class_numbers else True)
        self._set("gradient", Gradient(_one("gradient", self.gradient, tuple(Gradient))))
        if not (isinstance(self.beta, float | int) and 0 <= self.beta <= 1):
            raise ValueError(f"beta must be a number from 0 to 1, got {self.beta!r}")
        for name in ("dtypes", "reductions", "dims"):
            if not getattr(self, name):
                raise ValueError(f"{name} of an offer must not be empty")
        for each in fields(self):
            value = getattr(self, each.name)
            if get_origin(each.type) is Literal:
                _one(each.name, value, get_args(each.type))
            elif each.type is bool and not isinstance(value, bool):
                raise TypeError(f"{each.name} of an offer must be True or False, got {value!r}")
        if self.partial != "no":
            self._set("shards", "equal")
        if self.ignore_index is not None and type(self.ignore_index) is not int:
            raise TypeError(f"ignore_index of an offer must be an int, got {self.ignore_index!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def offers(**supported: Any) -> Callable[[_Candidate], _Candidate]:
    """Declare what the decorated candidate supports.

    Parameters
    ----------
    **supported : Any
        The parameters of `Offer`. One that is left out stays as it is without `@offers`: options, `reduction` and
        `axis` are the names of the candidate's parameters, and an adapter knows more.

    Returns
    -------
    callable
        A decorator that adds to the attribute `declared` of the candidate and returns it.

    Raises
    ------
    TypeError, ValueError
        A value is none that the parameter of `Offer` can have.

    Notes
    -----
    A candidate is a callable, the same on every rank of a communicator over which the class axis is sharded::

        candidate(logits, targets, *, class_start, num_classes, comm, **options)

    Its arguments are this rank's shard of the logits, global class numbers as targets (or probabilities, sharded as the
    logits), the global number of its first class, the number of classes of all shards, and a communicator that nobody
    else uses. It returns the loss; or the loss and its gradient with respect to the logits (for one loss per row: of
    their sum); or the loss and a function that takes the upstream gradient, an array shaped as the loss, and returns
    that gradient.

    A candidate of `kind="log_prob"` returns one log-probability of the target per row in place of the loss, one of
    `kind="entropy"` the entropy of each row's softmax, and that is called without targets. One of `kind="kl"` gets this
    rank's shard of a teacher's logits in place of targets, and its gradient is that of the student's logits; one of
    `kind="topk_kl"` gets the keyword `top_k` besides.

    A candidate of `kind="linear"` gets `hidden`, of shape (..., features) and the same on every rank, and this rank's
    columns of `w`, (features, local classes), in place of the logits. It returns (loss, dhidden, dw), or its function
    of the upstream gradient returns (dhidden, dw). With the option `bias`, dbias follows. `kind="linear_log_prob"` and,
    without targets, `kind="linear_entropy"` are called alike.

    The option `support` is `(ids, offsets)`, the same on every rank: row r is over the classes
    `ids[offsets[r]:offsets[r + 1]]` alone, global numbers in any order, the target among them.

    A candidate of `kind="step"` is called for each micro-batch of each rank, with all classes of its tokens::

        candidate(logits, targets, *, context_ranks, micro_batches, comm)

    Ranks and micro-batches have unequal numbers of tokens, and targets of -100 are ignored. `comm` has all ranks;
    `context_ranks` that follow each other share sequences. `micro_batches` has the targets of all micro-batches of this
    rank. The kit differentiates the loss, combines the gradients as `averaged` says, and compares what each token
    counts with the mean over all valid tokens in one process; and the losses, combined so, or as all ranks have them
    alike.

    A candidate of `kind="placement"` is called for rows of an array that are sharded by `splits`: rank r has the
    elements from splits[r] to splits[r + 1], or one term of a partial array; where it computes "shard", all::

        candidate(array, *, splits, comm)

    It returns what it computes of each row, the same on every rank, or what the rank has after a move; and the gradient
    with respect to the array that this rank was given.

    It gets only arguments that it offers: options that a case sets, `reduction` if it offers more than one, `axis` if
    it takes one and the class axis is not the last, `batch_comm` if rows are sharded too. A case that it does not offer
    is not a failure.

    The adapter `torch-shards` calls `function(logits, targets, group, **options)` on tensors, the group by keyword if a
    parameter is called `group`, `tp_group` or `process_group`. Unless that declares otherwise, its result is one loss
    per row, which autograd differentiates, and shards are of equal length.

    The attributes `start` and `stop` are reserved: a candidate that has them is started by `start(comm)` and stopped by
    `stop()`, once in each process. A framework that owns a process group starts and ends it there.

    Examples
    --------
    >>> @offers(dtypes=("float32", "bfloat16"), gradient="backward")
    ... def cross_entropy(logits, targets, *, class_start, num_classes, comm, ignore_index=-100): ...
    >>> offer_of(cross_entropy).options
    ('ignore_index',)

    For `--adapter torch-shards`:

    >>> @offers(kind="log_prob", dtypes=("float32", "bfloat16"))
    ... def log_prob(logits, targets, group): ...
    >>> @offers(kind="entropy", dtypes=("float32", "bfloat16"))
    ... def entropy(logits, group): ...
    """
    Offer(**supported)

    def declare(candidate: _Candidate) -> _Candidate:
        try:
            candidate.declared = getattr(candidate, "declared", {}) | supported  # type: ignore[attr-defined]  # takes any
        except AttributeError:  # as for a bound method
            kind = type(candidate).__name__
            text = f"a {kind} takes no declarations: write a function that calls it, and declare that"
            raise TypeError(text) from None
        return candidate

    return declare


# help(offers), which people are sent to, has the parameters themselves.
_of_offer = inspect.cleandoc(Offer.__doc__ or "").partition("----------\n")[2]
offers.__doc__ = inspect.cleandoc(offers.__doc__ or "").replace(
    "knows more.\n", f"knows more.\n\n{indent(_of_offer, '    ')}\n"
)


def offer_of(candidate: Candidate, **inferred: Any) -> Offer:
    """Return the offer of a candidate.

    Parameters
    ----------
    candidate : callable
        The candidate.
    **inferred : Any
        The parameters of `Offer` that an adapter knows. The declarations of the candidate come first.

    Returns
    -------
    Offer
        Its attribute `offer`. A candidate without one offers what it declares with `@offers`, or by attributes that are
        named as parameters of `Offer`; and, unless declared, the keywords in its signature: options (all of them, if it
        takes `**options`), `reduction` and `axis`.

    Raises
    ------
    TypeError
        The attribute `offer` is no `Offer`, or the candidate is a class.

    Examples
    --------
    >>> def cross_entropy(logits, targets, *, class_start, num_classes, comm, label_smoothing=0.0): ...
    >>> offer_of(cross_entropy).options
    ('label_smoothing',)
    """
    if inspect.isclass(candidate):
        name = candidate.__name__
        of_autograd = inspect.ismethod(getattr(candidate, "apply", None))  # as that of torch.autograd.Function
        instance = f"{name}.apply" if of_autograd else f"an instance of it, as in loss = {name}()"
        raise TypeError(f"{name} is a class, and a call of it gives no loss; the candidate is {instance}")
    complete = getattr(candidate, "offer", None)
    if isinstance(complete, Offer):
        return complete
    if complete is not None:
        raise TypeError(f"the attribute `offer` of a candidate must be an Offer, got {type(complete).__name__}")
    declared = _declared(candidate)
    supported = _by_signature(candidate) | inferred | declared
    if "options" not in declared:
        kind = KINDS.get(supported.get("kind", "loss"))
        supported["options"] = tuple(each for each in supported["options"] if kind and each in kind.options)
    offer = Offer(**supported)
    _check_meaning(offer, declared)
    return offer


def _check_meaning(offer: Offer, declared: dict[str, Any]) -> None:
    """Raise `ValueError` for a declaration that says nothing of this kind of candidates, or contradicts another."""
    kind = KINDS[offer.kind]
    targets = "targets" in kind.arrays
    probabilities = targets and kind.shared_cases and "probabilities" not in kind.without
    means_something = {
        **dict.fromkeys(("ignore_index", "class_numbers"), targets),
        "several_targets": targets and "several-targets" not in kind.without,
        **dict.fromkeys(("probabilities", "normalized"), probabilities),
        "smoothing": "label_smoothing" in kind.options,
        "direction": "teacher" in kind.arrays and ("top_k" not in kind.facts or offer.direction != "jensen-shannon"),
        "beta": offer.direction == "jensen-shannon",
        "temperature_squared": "teacher" in kind.arrays,
        "rest": "top_k" in kind.facts,
        "dhidden": "hidden" in kind.arrays,
        "averaged": "micro_batches" in kind.facts,
        "computes": "splits" in kind.facts,
        "partial": "splits" in kind.facts and offer.computes not in MOVES,
        "ties": "splits" in kind.facts and offer.computes in FINDS,
    }
    for name, value in declared.items():
        if not means_something.get(name, True) and value != getattr(Offer, name):
            raise ValueError(f"{name}={value!r} says nothing of a candidate of kind={offer.kind!r}: leave it out")
    if not offer.class_numbers and declared.get("probabilities") is False:
        raise ValueError(
            "class_numbers=False says that it takes probabilities, and probabilities=False that it does not"
        )
    if declared.get("normalized") and not offer.probabilities:
        raise ValueError("normalized=True is of probabilities: declare probabilities=True as well, or leave it out")


def signature_of(candidate: Candidate) -> inspect.Signature:
    """Return the signature of a candidate, for a module of torch that of `forward`; any if it is not known."""
    try:
        signature = inspect.signature(candidate)
    except ValueError:  # as for some functions in C
        return _ANYTHING
    silent = [each.kind for each in signature.parameters.values()] == _KINDS
    return signature_of(candidate.forward) if silent and hasattr(candidate, "forward") else signature


_KINDS = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
_ANYTHING = inspect.Signature(
    [inspect.Parameter(name, kind) for name, kind in zip(("arguments", "options"), _KINDS, strict=True)]
)


def check_kind(candidate: Candidate) -> None:
    """Raise `TypeError` if no kind is declared, and names of parameters are those of another kind than a loss."""
    if hasattr(candidate, "offer") or "kind" in _declared(candidate):
        return
    names = list(signature_of(candidate).parameters)
    tells = {
        "step": {"micro_batches", "context_ranks"} & {*names},
        "topk_kl": {name for name in names[:2] if "teacher" in name and "top_k" in names},
        "kl": {name for name in names[:2] if "teacher" in name},
        "linear": {name for name in names[:1] if name.startswith("hidden")},
    }
    for kind, of_kind in tells.items():
        for name in sorted(of_kind):
            raise TypeError(
                f"the parameter {name} is none of a loss of logits and targets: "
                f'declare @offers(kind="{kind}"), or kind="loss" if that is meant'
            )


def _declared(candidate: Candidate) -> dict[str, Any]:
    of_function = _declared(candidate.func) if isinstance(candidate, partial) else {}
    attributes = {each.name: getattr(candidate, each.name) for each in fields(Offer) if hasattr(candidate, each.name)}
    return of_function | attributes | getattr(candidate, "declared", {})


def _by_signature(candidate: Candidate) -> dict[str, Any]:
    parameters = signature_of(candidate).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    # (*arguments, **options) alone says nothing: it is a wrapper.
    open_ended = inspect.Parameter.VAR_KEYWORD in kinds and kinds != _KINDS
    known = (*OPTIONS, *MORE_OPTIONS)
    supported: dict[str, Any] = {"options": tuple(name for name in known if open_ended or name in parameters)}
    if "reduction" in parameters:
        supported["reductions"] = REDUCTIONS
    if "axis" in parameters:
        supported["any_axis"] = True
    return supported


def _subset(name: str, values: Any, known: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} of an offer must be a tuple, got {values!r}")
    values = tuple(values)
    types = {type(each) for each in known}
    if values and not types:
        raise ValueError(f"{name} of an offer have no meaning for this kind, got {values!r}: leave them out")
    for each in values:
        if type(each) not in types or each not in known:
            raise ValueError(f"{name} of an offer must be among {', '.join(map(str, known))}, got {each!r}")
    return values


def _one(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ValueError(f"{name} of an offer must be one of {', '.join(map(str, known))}, got {value!r}")
    return value


#: the offer of a candidate that supports everything
EVERYTHING = Offer(
    dtypes=DTYPES,
    options=OPTIONS,
    reductions=REDUCTIONS,
    probabilities=True,
    dims=(1, 2, 3, 4, 5),
    any_axis=True,
    gradient=Gradient.BACKWARD,
    batch_comm=True,
    same_bits=True,
)
