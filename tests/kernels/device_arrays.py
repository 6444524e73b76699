"""Arrays of the stand-in in memory as real ones may be: misaligned, far apart, and next to what must not be touched."""

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
MARK = 0xA7
NO_ACCESS = 0


class Fenced:
    """`size` bytes between memory that nobody may touch: the nearest bytes are marked, further ones trap."""

    def __init__(self, size, at_end):
        pages = -(-(size + 64) // PAGE)
        self._map = mmap.mmap(-1, (pages + 2) * PAGE)
        self._all = np.frombuffer(self._map, np.uint8)
        address = self._all.ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (0, pages + 1):
            if libc.mprotect(ctypes.c_void_p(address + page * PAGE), ctypes.c_size_t(PAGE), NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        inside = self._all[PAGE : (pages + 1) * PAGE]
        inside[:] = MARK
        start = pages * PAGE - size if at_end else 0
        self.bytes = inside[start : start + size]
        self._around = inside[:start], inside[start + size :]

    def is_whole(self):
        return all((part == MARK).all() for part in self._around)


def rows_in_memory(values, *, pitch=0, shift=0, at_end=False):
    """Values as rows `pitch` elements apart, the first one `shift` elements after a multiple of 16 bytes.

    `values` are (outer, classes, inner). With `at_end` they end right before memory that traps, wherever they start.

    Returns the array and the memory around it.
    """
    outer, classes, inner = values.shape
    dtype = values.dtype
    pitch = pitch or classes
    count = (outer * inner - 1) * pitch + classes
    fence = Fenced((count + (0 if at_end else shift)) * dtype.itemsize, at_end)
    flat = fence.bytes.view(dtype)[0 if at_end else shift :]
    far, near = inner * pitch * dtype.itemsize, pitch * dtype.itemsize
    array = np.lib.stride_tricks.as_strided(flat, values.shape, (far, dtype.itemsize, near))
    array[...] = values
    return array, fence
