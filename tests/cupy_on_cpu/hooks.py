"""Puts Python functions in the place of C functions that Cython modules export, for modules that are imported later."""

import ctypes
import inspect
import re
import traceback

_NAME = ctypes.pythonapi.PyCapsule_GetName
_NAME.restype, _NAME.argtypes = ctypes.c_char_p, [ctypes.py_object]
_NEW = ctypes.pythonapi.PyCapsule_New
_NEW.restype, _NEW.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_HOLD = ctypes.pythonapi.Py_IncRef
_HOLD.argtypes = [ctypes.py_object]

KNOWN = "tests/cupy_on_cpu knows CuPy 14.2"
TYPES = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "intptr_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "PyObject *": ctypes.py_object,
}
# Cython's own arguments, after those of the function.
CYTHON = re.compile(r"int __pyx_skip_dispatch|struct __pyx_opt_args\w+ \*__pyx_optional_args|void")


def replace(module, functions, answers):
    """Replace C functions of a Cython module by those of the class `functions`, and others by what they answer."""
    replaced = {name: each for name, each in vars(functions).items() if not name.startswith("__")}
    for name, function in {**replaced, **{name: constant(answer) for name, answer in answers.items()}}.items():
        if name not in module.__pyx_capi__:
            raise RuntimeError(f"{module.__name__} of this CuPy exports no {name}: {KNOWN}")
        signature = _NAME(module.__pyx_capi__[name])
        callback = c_function(signature.decode(), name, function)
        for each in (signature, callback):
            _HOLD(each)
        module.__pyx_capi__[name] = _NEW(ctypes.cast(callback, ctypes.c_void_p), signature, None)
        if hasattr(module, name):
            setattr(module, name, function)


def constant(answer):
    return lambda *_: answer


def replace_in_python(module, functions):
    """Replace the functions of a module that only Python calls."""
    for name, function in vars(functions).items():
        if name.startswith("__"):
            continue
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} of this CuPy has no {name}: {KNOWN}")
        setattr(module, name, function)


def c_function(signature, name, function):
    """A C function of this signature that calls `function`."""
    match = re.fullmatch(r"(.*?) ?\((.*)\)", signature)
    arguments = [each for each in match[2].split(", ") if not CYTHON.fullmatch(each)]
    hidden = len(match[2].split(", ")) - len(arguments)
    given = function.__code__.co_argcount if not function.__code__.co_flags & inspect.CO_VARARGS else len(arguments)
    if len(arguments) != given or not {match[1], *arguments} <= TYPES.keys():
        raise RuntimeError(f"{name} of this CuPy is {signature}, and not of {given} arguments: {KNOWN}")
    is_object = match[1] == "PyObject *"

    def call(*values):
        try:
            result = function(*values[:given])
        except Exception:
            # No exception passes through ctypes: CuPy finds NULL, and raises a SystemError.
            traceback.print_exc()
            return 0
        if not is_object:
            return result
        _HOLD(result)
        return id(result)

    types = [TYPES[each] for each in arguments] + [ctypes.c_void_p] * hidden
    return ctypes.PYFUNCTYPE(ctypes.c_void_p if is_object else TYPES[match[1]], *types)(call)
