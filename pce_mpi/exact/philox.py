"""Random numbers that are functions of a seed and an index alone, for NumPy and CuPy arrays.

The generator is Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011): it maps a counter,
the index, to 128 bits, so that any element can be drawn by itself. All later steps are arithmetic of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
import json
import math

import numpy as np

from pce_mpi.arrays import Array, array_namespace
from pce_mpi.exact.functions import cos, log

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def stream_of(seed: Sequence[int]) -> tuple[int, ...]:
    """Return four words of 32 bits from a seed: two are the key, and two the upper half of the counter."""
    digest = hashlib.blake2b(json.dumps(list(seed)).encode(), digest_size=16).digest()
    return tuple(int.from_bytes(digest[start : start + 4], "little") for start in range(0, 16, 4))


def philox(counter: Sequence[Array], key: Sequence[int]) -> tuple[Array, ...]:
    """Return four words of 32 bits for each counter of four words; all words are in uint64."""
    a, b, c, d = counter
    for number in range(10):
        k, m = ((word + number * step) & _WORD for word, step in zip(key, _INCREMENTS, strict=True))
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (q >> 32) ^ b ^ k, q & _WORD, (p >> 32) ^ d ^ m, p & _WORD
    return a, b, c, d


def uniform(index: Array, stream: Sequence[int]) -> Array:
    """Return a float64 in [0, 1) for each index, a multiple of 2^-53."""
    return _integers(index, stream)[0].astype(np.float64) * 2.0**-53


def normal(index: Array, stream: Sequence[int]) -> Array:
    """Return a normal float64 for each index, sqrt(-2 log u) cos(2 pi v) (Box and Muller, 1958)."""
    u, v = (each.astype(np.float64) for each in _integers(index, stream))
    radius = array_namespace(u).sqrt(-2.0 * log((u + 1.0) * 2.0**-53))
    return radius * cos(v * (2.0**-52 * math.pi))


def _integers(index: Array, stream: Sequence[int]) -> tuple[Array, Array]:
    """Return two whole numbers of 53 bits for each index, in uint64."""
    zeros = index & 0
    a, b, c, d = philox((index & _WORD, index >> 32, zeros + stream[2], zeros + stream[3]), stream[:2])
    return (a | b << 32) >> 11, (c | d << 32) >> 11
