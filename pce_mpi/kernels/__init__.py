"""The hot loops, once for each device: reduce each row to a state, and write the gradient of the logits.

On the host `compiled`, an extension module in C++, does the work; without it `definition`, in NumPy, with equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
import os
from pathlib import Path
from types import ModuleType
from typing import Any
import warnings

import numpy as np

from pce_mpi.arrays import array_namespace, is_float8, is_floating
from pce_mpi.hollow import Hollow
from pce_mpi.kernels import hollow
from pce_mpi.kernels.elementary import narrowed

# Functions that promise bits run in a block `with standard_arithmetic():`, in which this thread's floating-point unit
# rounds to nearest and keeps subnormal numbers. Without the compiled module it does nothing: callers check the state.
standard_arithmetic: Callable[[], AbstractContextManager[None]] = nullcontext
with suppress(ImportError):
    from pce_mpi.kernels import _compiled  # built by setup.py

    standard_arithmetic = _compiled.StandardArithmetic
sets_arithmetic = standard_arithmetic is not nullcontext

_VARIABLE = "PCE_MPI_KERNEL"
_REMEDY = (
    "If pce_mpi is a clone, install it with pip install -e; if there was no C++ compiler, install g++ or clang++, and "
    "then pce_mpi again with pip's --no-cache-dir and --force-reinstall"
)


def kernel_of(array: Any) -> ModuleType:
    """Return the module with the loops for this array: that of the host for NumPy, `cuda` for CuPy, or `hollow`."""
    if type(array) is np.ndarray:
        return host_kernel()
    if type(array) is Hollow:
        return hollow
    from pce_mpi.kernels import cuda

    return cuda


def converted(values: Any, dtype: Any, copy: bool = True) -> Any:
    """Return `values.astype(dtype)`, rounded once: ml_dtypes and CuPy round float64 to float32 on the way.

    CuPy also takes numbers below 2^-126 for 0. Without `copy`, an array that has the dtype is returned itself.
    """
    wanted = np.dtype(dtype)
    if values.dtype == wanted and not copy:
        return values
    on_host = array_namespace(values) is np
    if not (is_floating(values.dtype) and (is_floating(wanted) or (on_host and is_float8(wanted)))):
        return values.astype(wanted)
    return narrowed(values, wanted) if on_host else kernel_of(values).converted(values, wanted)


@cache
def host_kernel() -> ModuleType:
    """Return the module with the loops for NumPy arrays; warn, once, if it is not the compiled one.

    `PCE_MPI_KERNEL` chooses: numpy, or an instruction set of the compiled one.
    """
    from pce_mpi.kernels import definition

    wanted = os.environ.get(_VARIABLE, "")
    if wanted.lower() == "numpy":
        return definition
    try:
        from pce_mpi.kernels import compiled
    except ImportError as error:
        if wanted:
            text = f"{_VARIABLE}={wanted}, but the compiled kernel is not installed: {error}. {_REMEDY}"
            raise ImportError(text) from error
        warnings.warn(
            f"pce_mpi in {Path(__file__).parents[1]} has no compiled kernel: the loss has the same bits, but takes "
            f"100 times as long, and gelu, attention and norms take longer. {_REMEDY}",
            stacklevel=2,
        )
        return definition
    compiled.choose(wanted)
    return compiled


def layer_loops(*arrays: Any) -> Any:
    """Return the compiled kernel if it has loops of layers for these arrays, else None; no other kernel has any."""
    if type(arrays[0]) is not np.ndarray:
        return None
    kernel = host_kernel()
    return kernel if hasattr(kernel, "takes_layer") and kernel.takes_layer(*arrays) else None


def digit_loops(*arrays: Any) -> Any:
    """Return the compiled kernel if it multiplies these matrices, else None."""
    return host_kernel() if all(type(x) is np.ndarray for x in arrays) and hasattr(host_kernel(), "multiply") else None


def check_choice() -> None:
    """Raise `ValueError` or `ImportError` if `PCE_MPI_KERNEL` names a kernel that does not exist."""
    if os.environ.get(_VARIABLE):
        host_kernel()


def kernel_text() -> str:
    """Return a text that names the kernel which computes the loss of NumPy arrays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kernel = host_kernel()
        except (ImportError, ValueError) as error:
            return f"none: {error}"
    if hasattr(kernel, "instruction_set"):
        return f"compiled, {kernel.instruction_set()}"
    return f"NumPy ({_VARIABLE}=numpy)" if os.environ.get(_VARIABLE) else "NumPy (no compiled kernel)"


def get_include() -> str:
    """Return the folder of `pce_mpi.h`, the arithmetic of the loss for programs in C++ and CUDA.

    `examples/loss.cpp` is such a program, and `docs/the-bits.md` specifies the bits that it computes.

    Returns
    -------
    str
        A path, for the compiler's option `-I`.

    Examples
    --------
    >>> from pathlib import Path
    >>> Path(get_include(), "pce_mpi.h").is_file()
    True
    """
    return str(Path(__file__).parent)
