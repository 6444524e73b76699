"""Public calls on plain arrays and on the tape, in one table; `test_laws.py` has what must hold of all of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
import inspect
from typing import Any

import numpy as np

import pce_mpi as pce
from pce_mpi import dense
from ranks.problems import as_cosines

Array = np.ndarray[Any, Any]

ROWS, CLASSES, FEATURES, K = 9, 37, 5, 4
IGNORED = 5  # the row whose target is -100, or that `rows` leaves out

# Axes: r are the rows, c the classes. An operand may lack the last, k. A gradient has the axes of its operand.
AXES = {
    **dict.fromkeys(("logits", "student", "teacher"), "rc"),
    **dict.fromkeys(("targets", "ids", "rows", "log_prob", "entropy", "logsumexp", "result", "loss"), "rk"),
    **{"hidden": "rf", "w": "fc", "bias": "c", "weight": "c"},
}


def axes_of(name: str) -> str:
    return AXES[name if name in AXES else name[1:]]


@dataclass(frozen=True)
class Call:
    """One call, of operands of all rows and classes, with the class axis last.

    draw         the operands by name, of a generator and a dtype
    wrt          the operands that have gradients
    upstream     the results that these are gradients of, with the shapes of the upstream gradients
    tape         the name of the operation, where it is another
    bytes_a_row  what the forward pass sends; None: not the same for each row
    same_bits    results and gradients have the bits of one process
    """

    function: str
    what: str
    draw: Callable[[np.random.Generator, Any], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    wrt: tuple[str, ...] = ("logits",)
    upstream: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tape: str = ""
    bytes_a_row: int | None = None
    same_bits: bool = True

    def __str__(self) -> str:
        return f"{self.function} {self.what}"

    def operands(self, dtype: Any, seed: int = 1) -> dict[str, Any]:
        return self.draw(np.random.default_rng(seed), dtype)

    def upstream_gradients(self) -> dict[str, Array]:
        """Numbers that any dtype has."""
        rng = np.random.default_rng(5)
        ones = self.function == "linear_cross_entropy_value_and_grad"
        return {
            name: np.asarray(1.0 if ones else rng.integers(-100, 101, shape) / 64)
            for name, shape in self.upstream.items()
        }

    def function_of(self, kind: str) -> Any:
        return getattr(pce, self.function + kind, None)

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.function_of("_forward") or self.function_of("")).parameters)

    @property
    def takes_out(self) -> bool:
        backward = self.function_of("_backward")
        return backward is not None and "out" in inspect.signature(backward).parameters

    @property
    def ignores_rows(self) -> bool:
        """An ignored row counts nowhere, whatever it holds."""
        has_ignored = self.operands(np.float64).keys() & {"targets", "rows"}
        return bool(has_ignored) and not self.upstream.keys() & {"entropy", "logsumexp"}

    def forward(self, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The results by name, and the residuals, if there are any."""
        if function := self.function_of("_forward"):
            found, residuals = function(**given)
            return named(found), residuals
        return named(self.function_of("")(**given)), None

    def gradients(self, residuals: Any, upstream: dict[str, Any], **out: Any) -> Iterator[tuple[str, Any]]:
        """The gradients by name; `out` has an array for each."""
        if residuals is None:
            return
        backward = self.function_of("_backward")
        for name in self.wrt if "result" in upstream else ():
            more = {"of": name} if len(self.wrt) > 1 else {}
            more |= {"out": out[f"d{name}"]} if out else {}
            yield f"d{name}", backward(upstream["result"], residuals, **more)
        if "result" not in upstream:
            found = backward(residuals, **upstream, **({"out": out["dlogits"]} if out else {}))
            yield from ({"dlogits": found} if self.wrt == ("logits",) else named(found)).items()

    def run(self, given: dict[str, Any], upstream: dict[str, Any]) -> dict[str, Any]:
        """The results and the gradients by name."""
        results, residuals = self.forward(given)
        return results | dict(self.gradients(residuals, upstream))

    def oracle(self, given: dict[str, Any], upstream: dict[str, Any]) -> dict[str, Any]:
        """Compute the same in float64, by the textbook."""
        given = {name: x for name, x in given.items() if name not in {"chunk", "compute_dtype"}}
        if self.function in ("top_k", "argmax"):
            logits = given["logits"]
            order = np.argsort(-logits.astype(float), axis=-1, kind="stable")
            first = order[:, : given.get("k")]
            values = np.take_along_axis(logits, first, -1)
            return {"values": values, "classes": first} if "k" in given else {"result": order[:, 0]}
        if self.function == "take_classes":
            back = dense.take_classes_backward(upstream["result"], given["ids"], CLASSES)
            return {"result": dense.take_classes(**given), "dlogits": back}
        if backward := getattr(dense, f"{self.function}_backward", None):
            gradients = backward(**given, **upstream)
            gradients = {"dlogits": gradients} if self.wrt == ("logits",) else named(gradients)
            return named(getattr(dense, self.function)(**given)) | gradients
        if self.function in ("softmax_cross_entropy", "kl_divergence"):
            result, *gradients = getattr(dense, f"{self.function}_value_and_grad")(**given)
            scaled = [gradient * upstream["result"][..., None] for gradient in gradients]
            return {"result": result} | {f"d{name}": x for name, x in zip(self.wrt, scaled, strict=True)}
        return named(getattr(dense, self.function)(**given))


def named(found: Any) -> dict[str, Any]:
    if hasattr(found, "_asdict"):
        return {name: x for name, x in found._asdict().items() if x is not None}
    return dict(zip(("values", "classes"), found, strict=True)) if isinstance(found, tuple) else {"result": found}


# ---------------------------------------------------------------------------------------------------------- operands


def logits_of(rng: np.random.Generator, dtype: Any) -> Array:
    """Some of a row are masked, and some of another are equal."""
    x = 3.0 * rng.standard_normal((ROWS, CLASSES))
    x[2, ::3], x[3] = -np.inf, np.round(x[3])
    return x.astype(dtype)


def targets_of(rng: np.random.Generator, *more: int) -> Array:
    targets = rng.integers(0, CLASSES, (ROWS, *more))
    targets[2], targets[IGNORED] = 4, -100
    return targets


def logits_alone(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    return {"logits": logits_of(rng, dtype)}


def with_targets(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    return {"logits": logits_of(rng, dtype), "targets": targets_of(rng)}


def with_weight(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    return with_targets(rng, dtype) | {"weight": np.linspace(0.5, 2.0, CLASSES)}


def cosines(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    given = with_targets(rng, dtype)
    return given | {"logits": as_cosines(given["logits"])}


def with_several(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    """Several targets a row, two of them equal."""
    targets = targets_of(rng, K)
    targets[0, 1] = targets[0, 0]
    return {"logits": logits_of(rng, dtype), "targets": targets}


def with_support(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    """Some targets are outside the support of their row."""
    members = [np.sort(rng.choice(CLASSES, count, replace=False)) for count in rng.integers(1, 12, ROWS)]
    return with_targets(rng, dtype) | {"support": (np.concatenate(members), np.cumsum([0, *map(len, members)]))}


def with_ids(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    return {"logits": logits_of(rng, dtype), "ids": rng.integers(0, CLASSES, (ROWS, K))}


def pair(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    student = logits_of(rng, dtype)
    teacher = (student.astype(float) + rng.standard_normal(student.shape)).astype(dtype)
    return {"student": student, "teacher": teacher}


def pair_of_rows(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    return pair(rng, dtype) | {"rows": np.arange(ROWS) != IGNORED}


def head(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    shapes = {"hidden": (ROWS, FEATURES), "w": (FEATURES, CLASSES), "bias": (CLASSES,)}
    drawn = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return drawn | {"targets": targets_of(rng)}


# --------------------------------------------------------------------------------------------------------- the table


def loss(what: str, draw: Any = with_targets, sent: int | None = 40, **options: Any) -> Call:
    upstream = {"result": (ROWS,) if options.get("reduction") == "none" else ()}
    return Call("softmax_cross_entropy", what, draw, options, upstream=upstream, tape="cross_entropy", bytes_a_row=sent)


def statistics(what: str, draw: Any = with_targets, names: str = "", sent: int = 88, **options: Any) -> Call:
    chosen = (ROWS, K) if draw is with_several else (ROWS,)
    upstream = {"log_prob": chosen, "entropy": (ROWS,), "logsumexp": (ROWS,)}
    upstream = {name: shape for name, shape in upstream.items() if name in (names or upstream)}
    return Call("class_statistics", what, draw, options, upstream=upstream, bytes_a_row=sent)


def divergence(direction: str, draw: Any, reduction: str, scale: float) -> Call:
    options = {"direction": direction, "reduction": reduction, "logit_scale": scale}
    upstream = {"result": (ROWS,) if reduction == "none" else ()}
    return Call("kl_divergence", direction, draw, options, ("student", "teacher"), upstream, bytes_a_row=128)


def linear(function: str, what: str, *names: str, **options: Any) -> Call:
    upstream = {name: () if name == "loss" else (ROWS,) for name in names}
    tape = function.removesuffix("_value_and_grad")
    return Call(function, what, head, {"chunk": 4} | options, ("hidden", "w", "bias"), upstream, tape, same_bits=False)


CALLS = [
    loss("mean"),
    loss("sum with all terms", sent=72, reduction="sum", label_smoothing=0.2, z_loss=0.1, logit_scale=0.7),
    loss("weighted", with_weight, None, label_smoothing=0.1),
    loss("none with softcap", reduction="none", softcap=2.0),
    loss("with a margin", cosines, margin=(1.0, 0.5, 0.1), logit_scale=8.0),
    statistics("with a scale", logit_scale=0.7),
    statistics("log_prob alone", names="log_prob", softcap=3.0),
    statistics("entropy alone", names="entropy"),
    statistics("of several targets", with_several, sent=80 + 4 * K, logit_scale=0.7),
    statistics("log_prob of several targets", with_several, "log_prob", sent=80 + 4 * K, softcap=3.0),
    statistics("of a support", with_support, outside="add"),
    statistics("of a support that masks", with_support, names="log_prob entropy", outside="-inf", logit_scale=0.7),
    divergence("forward", pair_of_rows, "mean", 1.0),
    divergence("reverse", pair, "none", 0.7),
    divergence("jensen-shannon", pair_of_rows, "sum", 0.5),
    Call("take_classes", "", with_ids, upstream={"result": (ROWS, K)}),
    Call("top_k", "", logits_alone, {"k": K}, (), bytes_a_row=16 * K),
    Call("argmax", "", logits_alone, {}, (), bytes_a_row=16),
    Call("nucleus", "of all limits", logits_alone, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}, ()),
    Call("nucleus", "of top_p", logits_alone, {"top_p": 0.6, "logit_scale": 0.7}, ()),
    linear("linear_cross_entropy_value_and_grad", "", "loss", label_smoothing=0.1, logit_scale=0.7),
    linear("linear_class_statistics", "log_prob alone", "log_prob"),
    linear("linear_class_statistics", "", "log_prob", "entropy", "logsumexp", softcap=3.0),
]
