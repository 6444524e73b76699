"""Places of the arrays that the tests of kernels give to a kernel: on the host, or copied to a GPU and back."""

import ctypes

import numpy as np

import strict_cupy


class OnHost:
    """The stand-in's arrays are the host's own memory."""

    @staticmethod
    def on_device(array):
        return strict_cupy.ndarray(array)

    @staticmethod
    def bring_back(array):
        """Do nothing: the written elements are there already."""

    @staticmethod
    def forget():
        """Do nothing: there is nothing to forget."""


class OnGpu:
    """Copies on a GPU, in memory as the host's arrays: with their strides, as far from a multiple of 16 bytes, and no
    longer than what they reach, so that compute-sanitizer sees who goes beyond.

    Arrays that reach over the same bytes have one copy, until it is brought back or forgotten.
    """

    def __init__(self, cupy):
        self._cupy = cupy
        self._copies = {}

    def on_device(self, array):
        if not array.size:
            return self._cupy.empty(array.shape, array.dtype)
        low, high = np.lib.array_utils.byte_bounds(array)
        shift = low % 16
        if (low, high) not in self._copies:
            # The array is kept as well: no other one may take its memory.
            self._copies[low, high] = array, self._cupy.zeros(shift + high - low, np.uint8)
        _, copy = self._copies[low, high]
        copy[shift:].set(memory(low, high))
        start = shift + array.ctypes.data - low
        first = copy[start : start + array.itemsize].view(array.dtype)
        return self._cupy.lib.stride_tricks.as_strided(first, array.shape, array.strides)

    def bring_back(self, array):
        """Take from the copy of `array` what has been written there."""
        if array.size:
            low, high = np.lib.array_utils.byte_bounds(array)
            memory(low, high)[...] = self._copies[low, high][1][low % 16 :].get()
        self.forget()

    def forget(self):
        """The host's memory may be other arrays' from now on."""
        self._copies.clear()


def memory(low, high):
    """The bytes at these addresses."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
