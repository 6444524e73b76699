"""The hints at the end of errors: what to do about a mistake that newcomers make.

An error says what was expected and what came; then comes the hint, if there is one. All hints stand in this table, and
`tests/ranks/test_hints.py` makes the mistake of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: the hints by the mistake
HINTS = {
    "other class numbers": "class numbers are global, from 0 on, and the same on every rank",
    "-1 for no class": "rows without a class need ignore_index=-1",
    "forgotten comm": "without comm, these logits are all classes",
    "comm by position": "options are passed by name, as in comm=comm",
    "probabilities of all classes": "each rank passes the columns of its own classes only, as it does of the logits",
    "rows differ": (
        "if rows are sharded, and not classes, pass batch_comm to a loss in place of comm, and neither to others"
    ),
    "num_classes differ": "num_classes is the number of classes of all shards together",
    "class_start by hand": "leave class_start out, or take it from shard_range",
    "values differ": "pass the same {name} on every rank, drawn from one seed",
    "sizes without names": "the dims of a mesh have names, as in Mesh(comm, data=2, model=2)",
    "class of placements": "this is a class: make an instance, as in Shard(0) or Replicate()",
    "two meshes": "make one mesh, and distribute all arrays over it",
    "array of another library": ".local is the array of this rank, and .full() returns the global array",
    "assignment": "write to .local, alike on all replicas, or distribute a changed .full()",
    "second backward": "compute the loss anew before each backward pass",
}


def hinted(text: str, *mistakes: str, **names: str) -> str:
    """Return the text of an error with the hints for some mistakes, in which `names` are filled in."""
    return "; ".join([text, *(HINTS[mistake].format(**names) for mistake in mistakes)])


def hint_at_position(error: BaseException, function: Callable[..., Any], mistake: str) -> None:
    """Add a hint to the error by which Python refuses more arguments of `function` by position than it takes."""
    if isinstance(error, TypeError) and str(error).startswith(f"{function.__qualname__}() takes "):
        error.args = (hinted(str(error), mistake),)
