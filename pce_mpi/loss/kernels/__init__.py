"""The two hot loops, once for each device: reduce each row to a state, and write the gradient of the logits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.loss.kernels import blockwise


def kernels_of(array: Any) -> ModuleType:
    """The module with the loops for this array: `blockwise` for NumPy, `cuda` for CuPy."""
    if array_namespace(array) is np:
        return blockwise
    from pce_mpi.loss.kernels import cuda

    return cuda
