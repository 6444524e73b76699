"""Top-k, top-p and min-p as samplers compute them, in float32, and the reasons for which a row of theirs may differ.

The formulas are those of Hugging Face transformers (`TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper`,
`MinPLogitsWarper`, in this order) and of vLLM (`apply_top_k_top_p_pytorch`), in NumPy.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
f32 = np.float32


def _softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _lowest_removed(z: Array, top_p: float) -> Array:
    """Return which classes are left after the lowest, with at most 1 - top_p of the mass together, are removed."""
    order = np.argsort(z, axis=1)
    below = np.cumsum(_softmax(np.take_along_axis(z, order, 1)), axis=1, dtype=f32) <= f32(1 - top_p)
    below[:, -1] = False
    left = np.empty(z.shape, np.bool_)
    np.put_along_axis(left, order, ~below, 1)
    return left


def hugging_face(logits: Array, top_k: Any, top_p: Any, min_p: Any, temperature: float) -> Array:
    """Return which classes are left, (rows, classes); one step after the other."""
    z = logits.astype(f32) / f32(temperature)
    if top_k is not None:
        z = np.where(z < np.sort(z, axis=1)[:, -min(top_k, z.shape[1]), None], -np.inf, z).astype(f32)
    if top_p is not None and top_p < 1:
        z = np.where(_lowest_removed(z, top_p), z, -np.inf).astype(f32)
    if min_p is not None:
        p = _softmax(z)
        z = np.where(p < f32(min_p) * p.max(axis=1, keepdims=True), -np.inf, z).astype(f32)
    return z > -np.inf


def vllm(logits: Array, top_k: Any, top_p: Any, min_p: Any, temperature: float) -> Array:
    """Return which classes are left, (rows, classes); both masks on the logits in order, min-p beforehand."""
    assert min_p is None
    z = logits.astype(f32) / f32(temperature)
    order = np.argsort(z, axis=1)
    z = np.take_along_axis(z, order, 1)
    if top_k is not None:
        z[z < z[:, -min(top_k, z.shape[1]), None]] = -np.inf
    if top_p is not None:
        removed = np.cumsum(_softmax(z), axis=1, dtype=f32) <= f32(1) - f32(top_p)
        removed[:, -1] = False
        z[removed] = -np.inf
    left = np.empty(z.shape, np.bool_)
    np.put_along_axis(left, order, z > -np.inf, 1)
    return left


KINDS = ["normal", "peaked", "flat", "ties", "float16", "bfloat16", "wide"]
OPTIONS: list[dict[str, Any]] = [
    {"top_k": None, "top_p": 0.9, "min_p": None, "temperature": 1.0},
    {"top_k": 20, "top_p": None, "min_p": None, "temperature": 1.0},
    {"top_k": 40, "top_p": 0.95, "min_p": None, "temperature": 0.7},
    {"top_k": 100, "top_p": None, "min_p": 0.05, "temperature": 1.5},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.1, "temperature": 1.0},
]


def our_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `pce.nucleus` for those of a sampler."""
    limits = {name: value for name, value in options.items() if name != "temperature"}
    return limits | {"logit_scale": 1 / options["temperature"]}


def drawn(rows: int, seed: int = 0) -> Iterator[tuple[Array, dict[str, Any]]]:
    """Yield `rows` rows or a few more, of all kinds, in parts with the options of each; a fiftieth of them wide."""
    rng = np.random.default_rng(seed)
    share = -(-rows // ((len(KINDS) - 1) * len(OPTIONS)))
    for kind in KINDS:
        for options in OPTIONS:
            part, classes = (-(-share // 50), 5000) if kind == "wide" else (share, int(rng.integers(30, 200)))
            x = rng.standard_normal((part, classes)) * (0.01 if kind == "flat" else 3.0)
            if kind == "ties":
                x = np.round(x)
            if kind == "peaked":
                x[:, 0] += rng.uniform(5, 20, part)
            dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(kind, f32)
            yield x.astype(dtype), options


def reason(x: Array, ours: Array, theirs: Array, options: dict[str, Any]) -> str:
    """Return the reason for which two sets of classes of a row differ; nothing if there is none.

    Both leave a prefix of the classes in the order of their logits, but for the order of equal ones.
    """
    z = x.astype(f32) / f32(options["temperature"])
    if Counter(z[ours].tolist()) == Counter(z[theirs].tolist()):
        return "equal logits in another order"
    if options["top_k"] is not None and not (ours & ~theirs).any() and (z[theirs & ~ours] == z[ours].min()).all():
        if len(set(x[z == z[ours].min()].tolist())) > 1:
            return "logits that are equal after a float32 division"
    descending = np.sort(x.astype(np.longdouble) / options["temperature"])[::-1]
    e = np.exp(descending - descending[0])
    kept = e if options["top_k"] is None else e[descending >= descending[min(options["top_k"], len(e)) - 1]]
    places = slice(*sorted((int(ours.sum()), int(theirs.sum()))))
    before = (np.cumsum(e) - e)[places] / kept.sum()
    # Each of so many additions in float32 rounds by 2^-25 of 1 at most, and so does each term.
    near = 2.0**-24 * len(e)
    if options["top_p"] is not None and (np.abs(before - options["top_p"]) <= near).all():
        return "a float32 sum crossed top_p"
    if options["min_p"] is not None and (np.abs(e[places] / options["min_p"] - 1) <= 2.0**-21).all():
        return "a float32 probability crossed min_p"
    return ""
