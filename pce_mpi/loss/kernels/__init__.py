"""The two hot loops, once per device: fill one record per row, and write the gradient of the logits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.loss.kernels import blockwise

__all__ = ["kernels_of"]


def kernels_of(array: Any) -> ModuleType:
    """The module with the loops for arrays like this one: `blockwise` for NumPy's, `cuda` for CuPy's."""
    if array_namespace(array) is np:
        return blockwise
    from pce_mpi.loss.kernels import cuda  # compiles and loads code for the GPU

    return cuda
