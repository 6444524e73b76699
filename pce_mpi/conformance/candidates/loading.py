"""Import a candidate by its name; check that it can be called."""

import importlib
import importlib.util
from pathlib import Path
import sys
from typing import Any

from pce_mpi.conformance.candidates.offers import Candidate, check_kind, offer_of, signature_of
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
