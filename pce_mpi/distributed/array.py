"""The distributed array: the array that this rank holds, the mesh, and the sharding of the global array.

Every function here is the identity on the global array: it changes where numbers are, never what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
import math
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from pce_mpi.arrays import Array, owned
from pce_mpi.comm.calls import peers_in, public_methods
from pce_mpi.comm.peers import tell_peers
from pce_mpi.comm.tracing import cause
from pce_mpi.comm.uncaught import install
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.plotting import array_size, draw_array
from pce_mpi.distributed.redistribution import checked_dtype, run_step
from pce_mpi.distributed.sharding import Sharding, steps
from pce_mpi.gpu import numbers_in
from pce_mpi.hints import hinted
from pce_mpi.hollow import enter
from pce_mpi.svg import new_figure, svg_or_none

X = TypeVar("X")

# Where arrays of other libraries have their numbers.
_OF_OTHER_LIBRARIES = {"asnumpy", "cpu", "data", "flat", "get", "numpy", "to_numpy", "tolist", "values"}

#: the operations on distributed arrays by name; `operation` enters them
OPERATIONS: dict[str, Callable[..., Any]] = {}


def operators(name: str) -> tuple[Callable[[X, Any], X], Callable[[X, Any], X]]:
    """Make two operators of the operation `name`: for a `DistArray` on the left, and for one on the right."""

    def operator(is_right: bool) -> Callable[[Any, Any], Any]:
        def call(self: Any, other: Any) -> Any:
            # As `public` does, in one function less.
            operands, peers = (other, self) if is_right else (self, other), self._peers
            if peers.operation:
                return OPERATIONS[name](*operands)
            if peers.closed is not None:
                peers.refuse()
            try:
                peers.operation = name
                peers.number += 1
                return OPERATIONS[name](*operands)
            except BaseException as error:
                peers.operation = ""
                install()
                tell_peers(error, peers_in(operands))
                raise
            finally:
                peers.operation = ""

        return call

    return operator(False), operator(True)


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def described(value: Any) -> str:
    """Return the text of a value for an error: of a distributed array without numbers, as those are this rank's own."""
    return value._text(None) if isinstance(value, DistArray) else repr(value)


class DistArray:
    """A global array that the ranks of a mesh hold together; `distribute` and `from_local` make one.

    Operators and functions work on the global array and never change one in place; `==` compares elements. Every rank
    of the mesh calls them, as it calls `full`, `item` and `float`. `print` shows what this rank holds, and sends
    nothing: all numbers, a block as `local=`, or a term of a Partial array as `term=`.

    Attributes
    ----------
    local : numpy.ndarray or cupy.ndarray
        The array that this rank holds: its shard, or a partial. Never write to that of a computed array, as copies of
        the array in other placements may exist.
    mesh : Mesh
        The ranks.
    sharding : Sharding
        The global shape, the placement of each dim, and the split points.
    requires_grad : bool
        `backward` finds the gradient of this array, or of those that it was computed from.
    grad : DistArray or None
        That gradient, for arrays that were made with `requires_grad=True`.

    Notes
    -----
    `copy.deepcopy` makes another array on the same mesh, in memory of its own and with a copy of `grad`; it refuses
    arrays on the tape.
    """

    __slots__ = ("__weakref__", "_peers", "copies", "grad", "local", "mesh", "place", "requires_grad", "sharding")

    def __init__(
        self, local: Array, mesh: Mesh, sharding: Sharding, *, requires_grad: bool = False, computed: bool = False
    ) -> None:
        self.local = local
        self.mesh = mesh
        self._peers = mesh._peers
        self.sharding = sharding
        self.requires_grad = requires_grad
        self.grad: DistArray | None = None
        self.place: Any = None  # on the tape
        # Copies of a computed array in other shardings, which operations needed and which took communication. A step of
        # SGD may write to a made array, or to a view of one, so no copy of those is kept. All ranks must decide alike:
        # by the operations that led here, never by the memory of the local array.
        self.copies: dict[Sharding, DistArray] | None = {} if computed else None
        if mesh.shardings is not None:
            mesh.shardings.add(sharding)
            if requires_grad:
                enter(local, "parameters")

    @property
    def computed(self) -> bool:
        """True if nothing writes to the local arrays any more."""
        return self.copies is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.sharding.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.sharding.shape)

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return math.prod(self.sharding.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.local.dtype

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement of each dim of the mesh."""
        return dict(self.sharding.by_dim)

    @property
    def is_leaf(self) -> bool:
        """True if this array was made rather than computed; `backward` leaves gradients on such arrays."""
        return self.place is None

    def detach(self) -> DistArray:
        """Return the same array, in the same memory, without its place on the tape."""
        return DistArray(self.local, self.mesh, self.sharding, computed=self.computed)

    def own_memory(self) -> None:
        """Make the local array writable: a computed array gets new memory, as copies of it may exist elsewhere."""
        if self.computed:
            self.local, self.copies = owned(self.local, self.local), None

    def full(self, *, rehearsed: Any = None) -> Array:
        """Return the global array, on every rank, in memory of its own.

        Parameters
        ----------
        rehearsed : array, optional
            The array to return on a mesh without ranks, whose arrays have no elements (`rehearse`). Otherwise it
            returns a hollow one.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            The global array.

        Notes
        -----
        Communicates as a redistribution to Replicate does: nothing if every placement is Replicate.
        """
        with cause("full", reason="the global array is asked for"):
            found = redistribute(self, self.sharding.replicated).local.copy()
        return rehearsed if self.mesh.is_hollow and rehearsed is not None else found

    def item(self, *, rehearsed: Any = None) -> Any:
        """Return the only element of the global array, as a Python number.

        Parameters
        ----------
        rehearsed : bool, int or float, optional
            The number to return on a mesh without ranks, whose arrays have no elements (`rehearse`).

        Returns
        -------
        bool, int or float
            The element.

        Raises
        ------
        ValueError
            If there is not exactly one element.
        TypeError
            Without `rehearsed` on a mesh without ranks.

        Notes
        -----
        Communicates as `full` does.
        """
        if self.size != 1:
            raise ValueError(f"only an array of one element is a number, got shape {self.shape}")
        found = self.full(rehearsed=rehearsed)
        return found if found is rehearsed else found.item()

    def __float__(self) -> float:
        return float(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[DistArray]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(self.shape[0]))

    def __bool__(self) -> bool:
        raise TypeError("a distributed array is not true or false; compare the result of .full() or .item()")

    # Data frames leave an operator to the operand with the higher priority: frame + x is x + frame.
    __pandas_priority__ = 5000

    def __array__(self, *_: Any, **__: Any) -> Any:
        # Sparse matrices, and the products of data frames, ask for an array before they try this class's operators.
        raise TypeError(
            "a distributed array becomes a NumPy array by .full(), which communicates, or .local. Functions "
            "of plain arrays are those with comm=, _forward, _backward or _value_and_grad: on the tape call pce_mpi."
            "cross_entropy, kl_divergence, class_statistics, ... and then .backward(). "
            "If the other operand belongs to another library, as in csr @ w or frame @ w, convert one of the two: "
            "distribute(csr.toarray(), mesh) @ w or csr @ w.full(), distribute(frame, mesh) @ w or frame @ w.full()"
        )

    def __copy__(self) -> DistArray:
        copied = DistArray(self.local, self.mesh, self.sharding, requires_grad=self.requires_grad)
        copied.grad, copied.place, copied.copies = self.grad, self.place, self.copies
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> DistArray:
        if not self.is_leaf:
            raise RuntimeError(
                "an array on the tape is not deeply copied, as the tape would not know where the gradient of the copy "
                "belongs: copy x.detach()"
            )
        local = owned(self.local, self.local)
        copied = DistArray(local, self.mesh, self.sharding, requires_grad=self.requires_grad)
        copied.grad = deepcopy(self.grad, memo)
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a distributed array is not pickled, as each rank has only a part of it: write it to a file by "
            "pce_mpi.save, or pickle .full() or .local"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def plot(self) -> Figure:
        """Draw the mesh, and the global array with the block of each rank in the colour of that rank.

        Blocks are named after their ranks: "ranks 0, 2" hold the same numbers, and a block that is "sum of ranks 0, 1"
        is Partial. If there are more than two axes, sharded axes are drawn first, then the last ones; the title names
        the others.

        Returns
        -------
        matplotlib.figure.Figure
            A new figure; `figure.savefig("array.png")` writes it to a file.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Notes
        -----
        Communicates nothing: any rank may call it alone.
        """
        figure = new_figure(*array_size(self.mesh.dim_sizes))
        self._draw(figure)
        return figure

    def _repr_html_(self) -> str | None:
        return svg_or_none(self._draw, *array_size(self.mesh.dim_sizes), name="array")

    def _draw(self, figure: Figure) -> None:
        draw_array(figure, self.sharding, f"{self.shape} of {self.dtype}")

    def __repr__(self) -> str:
        """Show the numbers that this rank holds, too: all of them, a block, or a term of a sum; sends nothing."""
        whole = "" if self.local.shape == self.shape else "local="
        return self._text("term=" if self.sharding.partial_dims else whole)

    def _text(self, label: str | None) -> str:
        """Return the facts of the array, after the numbers of this rank unless `label` is None."""
        numbers = "" if label is None else numbers_in(self.local, f"DistArray({label}")
        shown = f"{label}{numbers}, " if numbers else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"DistArray({shown}shape={self.shape}, dtype={self.dtype}, {self.sharding}{grad})"

    __add__, __radd__ = operators("add")
    __sub__, __rsub__ = operators("subtract")
    __mul__, __rmul__ = operators("multiply")
    __truediv__, __rtruediv__ = operators("divide")
    __floordiv__, __rfloordiv__ = operators("floor_divide")
    __mod__, __rmod__ = operators("remainder")
    __pow__, __rpow__ = operators("power")
    __matmul__, __rmatmul__ = operators("matmul")
    __and__, __rand__ = operators("bitwise_and")
    __or__, __ror__ = operators("bitwise_or")
    __lt__, __le__ = operators("less")[0], operators("less_equal")[0]
    __gt__, __ge__ = operators("greater")[0], operators("greater_equal")[0]

    def __iadd__(self, other: Any) -> Any:
        if self.requires_grad and self.is_leaf:  # the name would be that of a new array, whose grad stays None
            raise TypeError(
                "an assignment such as w -= lr * w.grad would not change the parameter, but make a new array: step by "
                "pce_mpi.SGD([w], lr), or write to w.local, alike on all replicas"
            )
        return NotImplemented  # then Python calls __add__

    __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = __iadd__

    def __eq__(self, other: Any) -> Any:
        return OPERATIONS["equal"](self, other)

    def __ne__(self, other: Any) -> Any:
        return OPERATIONS["not_equal"](self, other)

    __hash__ = object.__hash__  # by identity, as == compares elements

    def __invert__(self) -> DistArray:
        return OPERATIONS["invert"](self)

    def __neg__(self) -> DistArray:
        return OPERATIONS["negative"](self)

    def __abs__(self) -> DistArray:
        return OPERATIONS["abs"](self)

    def __setitem__(self, *_: Any) -> NoReturn:
        raise TypeError(hinted("a distributed array does not support item assignment", "assignment"))

    if not TYPE_CHECKING:  # for which DistArray would have every attribute

        def __getattr__(self, name: str) -> NoReturn:
            # Python asks here for what it does not find. The error is its own, so that libraries may look for names.
            try:
                return object.__getattribute__(self, name)
            except AttributeError as error:
                if name in _OF_OTHER_LIBRARIES:
                    error.args = (hinted(str(error), "array of another library"),)
                raise

    def __getitem__(self, index: Any) -> DistArray:
        return OPERATIONS["getitem"](self, index)

    @property
    def T(self) -> DistArray:
        """The axes in reverse order; see `transpose`."""
        return OPERATIONS["transpose"](self)

    def astype(self, dtype: Any) -> DistArray:
        """Convert the elements to another dtype.

        Parameters
        ----------
        dtype : dtype
            The new dtype.

        Returns
        -------
        DistArray
            The converted array, or this one if it has that dtype; its gradient has the dtype of this array. A Partial
            array stays Partial if `dtype` is a floating-point dtype, otherwise it is reduced first.
        """
        return OPERATIONS["astype"](self, dtype)

    def sum(self, axis: Any = None, keepdims: bool = False) -> DistArray:
        """Sum over axes; see `pce_mpi.sum`."""
        return OPERATIONS["sum"](self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> DistArray:
        """Average over axes of the global array; see `pce_mpi.mean`."""
        return OPERATIONS["mean"](self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> DistArray:
        """Return the largest element over axes; see `pce_mpi.max`."""
        return OPERATIONS["max"](self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> DistArray:
        """Return the smallest element over axes; see `pce_mpi.min`."""
        return OPERATIONS["min"](self, axis, keepdims)

    def var(self, axis: Any = None, ddof: float = 0, keepdims: bool = False) -> DistArray:
        """Compute the variance over axes of the global array; see `pce_mpi.var`."""
        return OPERATIONS["var"](self, axis, ddof, keepdims)

    def std(self, axis: Any = None, ddof: float = 0, keepdims: bool = False) -> DistArray:
        """Compute the standard deviation over axes of the global array; see `pce_mpi.std`."""
        return OPERATIONS["std"](self, axis, ddof, keepdims)

    def logsumexp(self, axis: Any = None, keepdims: bool = False) -> DistArray:
        """Return log(sum(exp(x))) over axes, without overflow; see `pce_mpi.logsumexp`."""
        return OPERATIONS["logsumexp"](self, axis, keepdims)

    def softmax(self, axis: int = -1) -> DistArray:
        """Compute the softmax along an axis; see `pce_mpi.softmax`."""
        return OPERATIONS["softmax"](self, axis)

    def log_softmax(self, axis: int = -1) -> DistArray:
        """Compute the logarithm of the softmax along an axis; see `pce_mpi.log_softmax`."""
        return OPERATIONS["log_softmax"](self, axis)

    def argmax(self, axis: int | None = None) -> DistArray:
        """Find the place of the largest element, in the flattened array unless told an axis; see `pce_mpi.argmax`."""
        return OPERATIONS["_function"](np.argmax, (self, axis), {})

    def cumsum(self, axis: int | None = None) -> DistArray:
        """Sum the elements up to each place along an axis; see `pce_mpi.cumsum`."""
        return OPERATIONS["cumsum"](self, axis)

    def clip(self, min: Any = None, max: Any = None) -> DistArray:
        """Bring elements below `min` up to it, and those above `max` down to it; see `pce_mpi.clip`."""
        return OPERATIONS["clip"](self, min, max)

    def reshape(self, *shape: Any) -> DistArray:
        """Give the elements another shape, one sequence or the lengths one by one; see `pce_mpi.reshape`."""
        return OPERATIONS["reshape"](self, shape[0] if len(shape) == 1 else shape)

    def squeeze(self, axis: Any = None) -> DistArray:
        """Leave out axes of length 1; see `pce_mpi.squeeze`."""
        return OPERATIONS["squeeze"](self, axis)

    def transpose(self, *axes: Any) -> DistArray:
        """Bring the axes into another order, one sequence or one by one; see `pce_mpi.transpose`."""
        return OPERATIONS["transpose"](self, axes[0] if len(axes) == 1 else axes or None)

    def swapaxes(self, axis1: int, axis2: int) -> DistArray:
        """Exchange two axes; see `pce_mpi.swapaxes`."""
        return OPERATIONS["swapaxes"](self, axis1, axis2)

    def redistribute(self, /, **placements: Placement) -> DistArray:
        """Bring the global array to other placements.

        Parameters
        ----------
        **placements : Shard, Replicate or Partial
            The new placement of each dim that is named: `x.redistribute(model=Replicate())`. Other dims stay.

        Returns
        -------
        DistArray
            The same global array. Its gradient goes back to the natural placement of this array: the same shards, or
            Replicate.

        Raises
        ------
        TypeError
            If a value is no placement, or the dtype has no meaning for a Partial.
        ValueError
            If a dim or an axis does not exist.
        CollectiveError
            If ranks ask for different placements.

        Notes
        -----
        ======================================  ==============================================================
        Shard -> Replicate                      all_gather
        Shard -> Shard of another axis          all_to_all; so are other split points, as named dims get even ones
        Partial -> Replicate                    all_reduce
        Partial -> Shard                        reduce_scatter
        Replicate -> anything                   nothing is sent
        Shard -> Partial("sum")                 nothing is sent
        all others                              by way of Replicate
        ======================================  ==============================================================

        If two dims come to shard one axis, the inner one may be gathered first. An Allgather of 56 bytes precedes each
        collective.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> import numpy as np, pce_mpi as pce
        >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
        >>> x = pce.distribute(np.array([[1.0, 2.0], [3.0, 4.0]]), mesh, data=pce.Shard(0))
        >>> total = pce.sum(x, axis=0)
        >>> total.placements, total.redistribute(data=pce.Replicate()).placements
        ({'data': Partial('sum')}, {'data': Replicate()})
        """
        return OPERATIONS["_redistribute"](self, **placements)

    def backward(self) -> None:
        """Add the gradients of this scalar to `grad` of the arrays that it was computed from and that require one.

        The pass frees the tape: a second one needs a new forward pass. Gradients of several passes add up until they
        are set to None (`SGD.zero_grad`).

        Raises
        ------
        ValueError
            If the array has axes.
        RuntimeError
            If nothing requires a gradient, or the tape was freed.

        Notes
        -----
        Communicates as the operations of the pass do. A gradient stays Partial over the dims along which each rank has
        one partial of it; `SGD.step` reduces it.
        """
        OPERATIONS["_backward"](self)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        return OPERATIONS["_ufunc"](ufunc, method, operands, options)

    def __array_function__(self, function: Any, types: Any, positional: Any, named: Any) -> Any:
        return OPERATIONS["_function"](function, positional, named)


# Not those that show or copy an array, or say that it is none of NumPy's: a debugger may call them on one rank.
_ON_ONE_RANK = {"__init__", "__repr__", "__copy__", "__deepcopy__", "__reduce__", "__bool__", "__len__", "__array__"}
# Where these communicate, they agree; of an array that all ranks hold, any rank may ask for the numbers.
_READING = {"full", "item", "__float__", "__int__", "__index__", "__complex__", "__format__"}
public_methods(DistArray, {"call", "plot", "own_memory", "detach", "__getattr__", *_ON_ONE_RANK}, _READING)


def redistribute(x: DistArray, destination: Sharding) -> DistArray:
    """Return the same global array in sharding `destination`, off the tape; `x` itself if it has that sharding.

    Collective over the dims of each step that sends (see `steps`): an Allgather of 56 bytes precedes it, and it needs
    an enclosing `cause`. Raises `CollectiveError`, on the ranks that communicate in a step, if they do not ask for the
    same, and `TypeError` if the dtype has no meaning for a Partial.
    """
    local = checked_dtype(x.local, destination.by_dim, requires_grad=False) if destination.partial_dims else x.local
    taken = steps(x.sharding, destination)
    for step in taken:
        local = run_step(step, local, x.mesh)
    computed = x.computed or any(step.copies for step in taken)
    return DistArray(local, x.mesh, destination, computed=computed) if taken else x
