"""The place of the C++ headers."""

from pathlib import Path


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
    return str(Path(__file__).parent / "kernels")
