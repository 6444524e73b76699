"""States of the floating-point unit that programs may leave behind: set for a block, by the C library alone."""

from collections.abc import Iterator
from contextlib import contextmanager
import ctypes
import platform

import pytest

# The place of the control word of SSE or of AArch64 in `fenv_t` of glibc, and the bits of that word.
_MACHINE = platform.machine()
_OFFSET = {"x86_64": 28, "aarch64": 0}.get(_MACHINE)
_BITS = {
    "x86_64": {
        "results to 0": 0x8000,
        "operands to 0": 0x40,
        "both to 0": 0x8040,
        "downwards": 0x2000,
        "upwards": 0x4000,
        "towards 0": 0x6000,
    },
    "aarch64": {"both to 0": 1 << 24, "downwards": 2 << 22, "upwards": 1 << 22, "towards 0": 3 << 22},
}.get(_MACHINE, {})
STATES = sorted(_BITS)


def _environment() -> bytearray:
    environment = ctypes.create_string_buffer(256)
    ctypes.CDLL("libm.so.6").fegetenv(environment)
    return bytearray(environment.raw)


def control_word() -> int:
    """The control word of this thread, without the flags of what has happened."""
    assert _OFFSET is not None
    return int.from_bytes(_environment()[_OFFSET : _OFFSET + 4], "little") & ~0x3F


@contextmanager
def floating_point(state: str) -> Iterator[None]:
    """A block in which this thread's floating-point unit has one of `STATES`."""
    if not STATES:
        pytest.skip(f"knows no control word of {_MACHINE}")
    assert _OFFSET is not None
    libm, before, changed = ctypes.CDLL("libm.so.6"), _environment(), _environment()
    changed[_OFFSET : _OFFSET + 4] = (control_word() | _BITS[state]).to_bytes(4, "little")
    libm.fesetenv(bytes(changed))
    try:
        yield
    finally:
        libm.fesetenv(bytes(before))
