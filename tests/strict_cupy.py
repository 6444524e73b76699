"""A stand-in for CuPy on machines without a GPU: NumPy's arithmetic behind CuPy's refusals.

Its arrays are no `numpy.ndarray`, cannot be turned into one but by `asnumpy`, and refuse to meet one: in arithmetic, as
an index, or as a value. So code that passes with it takes the array library from the array and says where it moves
data. It knows nothing of streams, of memory or of speed.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


class ndarray:
    __array_ufunc__ = None  # NumPy's operators step back
    __hash__ = None  # type: ignore[assignment]  # as CuPy's, which compare element by element

    def __init__(self, array):
        self._array = array

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array is not allowed; use asnumpy")

    def __getattr__(self, name):
        attribute = getattr(self._array, name)
        if name in WITHOUT_INITIAL:
            attribute = refuses_initial(attribute)
        return on_device(attribute) if callable(attribute) else wrap(attribute)

    @property
    def data(self):
        return SimpleNamespace(ptr=self._array.ctypes.data)

    def __getitem__(self, index):
        return ndarray(np.asarray(self._array[unwrap(index)]))

    def __setitem__(self, index, value):
        self._array[unwrap(index)] = unwrap(value)

    def __bool__(self):
        return bool(self._array)

    def __float__(self):
        return float(self._array)

    def __len__(self):
        return len(self._array)


def operator_method(name):
    def method(self, *others):
        result = getattr(self._array, name)(*(unwrap(other) for other in others))
        return self if result is self._array else wrap(result)

    return method


for _name in "add sub mul truediv pow matmul and or".split():
    for _prefix in ("", "r", "i"):
        setattr(ndarray, f"__{_prefix}{_name}__", operator_method(f"__{_prefix}{_name}__"))
for _name in "lt le gt ge eq ne neg abs invert".split():
    setattr(ndarray, f"__{_name}__", operator_method(f"__{_name}__"))


# CuPy's reductions know neither `initial` nor `where`, and so no largest element of none.
WITHOUT_INITIAL = {"max", "min", "amax", "amin", "sum", "prod", "mean", "all", "any"}


def refuses_initial(function):
    def call(*arguments, **options):
        for name in {"initial", "where"} & options.keys():
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'")
        return function(*arguments, **options)

    return call


def unwrap(value):
    if isinstance(value, ndarray):
        return value._array
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(unwrap(item) for item in value)
    return value


def wrap(value):
    return ndarray(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def on_device(function):
    def call(*arguments, **options):
        return wrap(function(*unwrap(arguments), **{name: unwrap(value) for name, value in options.items()}))

    if isinstance(function, np.ufunc):
        call.at = on_device(function.at)
    return call


class StrictCupy(ModuleType):
    def __init__(self):
        super().__init__("cupy")
        self.ndarray = ndarray

    def __getattr__(self, name):
        function = getattr(np, name)
        return on_device(refuses_initial(function) if name in WITHOUT_INITIAL else function)

    @staticmethod
    def asarray(value, dtype=None):
        return ndarray(np.array(value._array if isinstance(value, ndarray) else value, dtype=dtype))

    @staticmethod
    def asnumpy(array):
        return array._array.copy()


@pytest.fixture
def cupy(monkeypatch):
    module = StrictCupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module
