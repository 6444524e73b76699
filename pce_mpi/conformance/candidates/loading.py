"""Candidates by their names, of this package or imported, and adapters of functions of other frameworks.

==========================  ============================================================================================
`pce`                       this package's forward, then its backward
`pce-value-and-grad`        this package's loss and gradient in one call
`torch-shards`              adapts `function(logits, targets, group, **options)` on each rank's tensors, as Megatron's
`jax-shard-map`             adapts `function(logits, targets, axis_name=..., **options)` under `jax.shard_map`
==========================  ============================================================================================

An adapter whose framework owns its process group has `start(comm)` and `stop()`, called once for each launch.
"""

from collections.abc import Callable
from dataclasses import replace
import importlib
import importlib.util
from pathlib import Path
import sys
from typing import Any

from pce_mpi import loss
from pce_mpi.conformance.candidates.offers import EVERYTHING, Candidate, check_kind, offer_of, signature_of
from pce_mpi.conformance.problems.cases import Gradient
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.kinds.statistics import NOT_DECLARED


def load(name: str) -> Candidate:
    """Import a candidate.

    Parameters
    ----------
    name : str
        "package.module:candidate" or "path/to/file.py:candidate".

    Returns
    -------
    callable
        The candidate.

    Raises
    ------
    ValueError
        The name has another form.
    ImportError
        The module or the candidate cannot be found.
    TypeError
        The candidate cannot be called.

    Notes
    -----
    Errors that the module itself raises are not caught.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ValueError(f"a candidate is named package.module:candidate or path/to/file.py:candidate, got {name!r}")
    candidate: Any = _module_at(Path(where)) if where.endswith(".py") else _module_named(where)
    for part in attribute.split("."):
        try:
            candidate = getattr(candidate, part)
        except AttributeError:
            raise ImportError(f"{where} has no {attribute!r}") from None
    if not callable(candidate):
        raise TypeError(f"{name} must be callable, got {type(candidate).__name__}")
    return candidate


def check_call(candidate: Candidate) -> None:
    """Raise `TypeError` if a candidate cannot be called as one; say what it looks like."""
    check_kind(candidate)
    kind = KINDS[offer_of(candidate).kind]
    arrays, facts = kind.arrays, (*kind.facts, "comm")
    signature = signature_of(candidate)
    keywords = dict.fromkeys(facts)
    try:
        signature.bind(*arrays, **keywords)
    except TypeError as error:
        looks = (
            "for a function on shards of torch or JAX give --adapter torch-shards or jax-shard-map, in Python "
            'adapted("torch-shards", function)'
        )
        try:
            signature.bind(arrays[0], **keywords)
            looks = NOT_DECLARED
        except TypeError:
            pass
        raise TypeError(
            f"a candidate is called with ({', '.join(arrays)}, {'=..., '.join(facts)}=..., **options), "
            f"and this one takes {signature}: {error}; {looks}"
        ) from None


def _module_named(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # the module exists, and one of its own imports fails
        raise ImportError(f"there is no module {error.name!r}; is its folder on PYTHONPATH?") from error


def _module_at(path: Path) -> Any:
    path = path.absolute()
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    # As `python file.py` does: it can import the files beside it.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if path.stem not in sys.modules:
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    return module


class ForwardAndBackward:
    """`softmax_cross_entropy_forward`, then `softmax_cross_entropy_backward` with the kit's upstream gradient."""

    offer = EVERYTHING

    def __call__(self, logits: Any, targets: Any, **options: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the loss and its backward pass."""
        value, residuals = loss.softmax_cross_entropy_forward(logits, targets, **options)
        return value, lambda dloss: loss.softmax_cross_entropy_backward(dloss, residuals)


class ValueAndGrad:
    """`softmax_cross_entropy_value_and_grad`."""

    offer = replace(EVERYTHING, gradient=Gradient.VALUE)
    __call__ = staticmethod(loss.softmax_cross_entropy_value_and_grad)


# This package's own loss: it must pass everything.
NAMED_CANDIDATES = {"pce": ForwardAndBackward(), "pce-value-and-grad": ValueAndGrad()}
# The file and the class; imported on demand, and the framework when the candidate starts.
FUNCTION_ADAPTERS = {
    "torch-shards": ("torch_tensors", "TorchShards"),
    "jax-shard-map": ("jax_shard_map", "JaxShardMap"),
}


def adapted(name: str, function: Callable[..., Any]) -> Any:
    """Make a function on shards of a framework a candidate.

    Parameters
    ----------
    name : str
        "torch-shards", for `function(logits, targets, group, **options)` on tensors; or "jax-shard-map", for
        `function(logits, targets, axis_name=..., **options)` under `jax.shard_map`.
    function : callable
        The function. Its signature and the adapter tell all that it does not declare with `@offers`.

    Returns
    -------
    callable
        The candidate, with `start(comm)`, which starts the framework's process group, and `stop()`. `assert_conforms`
        and the command call both.

    Raises
    ------
    TypeError
        The function cannot be called so.
    ValueError
        There is no such adapter; or `same_bits` is declared: the framework's process group is that of all ranks, and
        cannot give the answer on one.

    Examples
    --------
    >>> def cross_entropy(logits, targets, group, label_smoothing=0.0): ...
    >>> adapted("torch-shards", cross_entropy).offer.options
    ('label_smoothing',)
    """
    if name not in FUNCTION_ADAPTERS:
        raise ValueError(f"there is no adapter {name!r}; there are {', '.join(FUNCTION_ADAPTERS)}")
    file, kind = FUNCTION_ADAPTERS[name]
    candidate = getattr(importlib.import_module(f"{__package__}.{file}"), kind)(function)
    if candidate.offer.same_bits:
        raise ValueError(
            f"same_bits cannot be judged through the adapter {name}: bits are compared with those on one rank, and the "
            "framework's process group has all ranks; leave it out, or make the function a candidate that takes `comm`"
        )
    return candidate


def missing_framework(name: str) -> str | None:
    """Return the package that the adapter `name` needs, if it is not installed."""
    framework = name.partition("-")[0]
    return framework if importlib.util.find_spec(framework) is None else None
