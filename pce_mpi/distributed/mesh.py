"""Named dims over a Cartesian communicator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
import json
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
import weakref

from pce_mpi.comm.agreement import agree, agree_on_call, all_gather_text, local_checks, signature_of
from pce_mpi.comm.communicators import (
    channel_of,
    garbage_count,
    give_back,
    made,
    new_number,
    open_channel,
    tell,
)
from pce_mpi.comm.errors import CollectiveError, CollectiveTimeout, RanksAlong, agreed, named, text_by_rank
from pce_mpi.comm.library import comm_text, is_comm, mpi, ranks_in
from pce_mpi.comm.peers import Peers
from pce_mpi.comm.rehearsed import FakeComm
from pce_mpi.comm.restoring import end_block
from pce_mpi.distributed.placements import checked_dims
from pce_mpi.distributed.plotting import draw_mesh, mesh_size
from pce_mpi.distributed.sharding import Dims, Sharding
from pce_mpi.exact.arithmetic import check_settings, current
from pce_mpi.hints import hint_at_position
from pce_mpi.svg import new_figure, svg_or_none
from pce_mpi.validation import check_floating_point

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mpi4py import MPI

# The number of past operations that can be told apart by name, and that of plain arrays: a model has more of these.
_REMEMBERED = 64
_REMEMBERED_ARRAYS = 256
# Stands for all operations before a refused one.
_REFUSED = "an operation that was refused"
# A sharded axis has a split point for each rank: an operation on this many takes seconds and 100 MB.
_MOST_RANKS = 2**22


def _told_to_comm(make: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor tell its errors to the ranks of the communicator that it takes."""

    @wraps(make)
    def call(*arguments: Any, **dims: Any) -> None:
        try:
            make(*arguments, **dims)
        except BaseException as error:
            hint_at_position(error, make, "sizes without names")
            tell(error, arguments[1:2], "Mesh")
            raise

    return call


class Mesh:
    """The ranks of a communicator as a grid whose dims have names.

    The last dim varies fastest: with `data=2, classes=3` rank 0 is data 0, classes 0; rank 1 is data 0, classes 1; rank
    3 is data 1, classes 0.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    **dims : int
        The size of each dim by name, in order. Their product is `comm.size`.

    Attributes
    ----------
    dims : mapping of str to int
        The size of each dim.
    coordinates : mapping of str to int
        The place of this rank along each dim.
    dim_sizes : tuple of (str, int)
        The dims and their sizes, in order.
    rank, size : int
        This rank of the mesh, and the number of its ranks.
    is_hollow : bool
        True without ranks: the arrays of such a mesh have no elements.

    Raises
    ------
    TypeError
        If `comm` is no communicator or a size no whole number.
    ValueError
        If the sizes do not fit, or a variable of the environment has a wrong value.
    ImportError
        If `PCE_MPI_KERNEL` asks for the compiled kernel, which is not installed.
    CollectiveError
        If ranks name different dims.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes, and the making and freeing of communicators, which the trace does
    not show. Every rank raises the same error.

    MPICH has some 2,000 communicators, and a mesh takes 4 or more: make one mesh, not many. When all of its ranks have
    dropped a mesh, and the communicators that it gave them, they free these as soon as they make another mesh together.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> Mesh(MPI.COMM_SELF, data=1, classes=1)
    Mesh(data=1, classes=1)
    """

    @_told_to_comm
    def __init__(self, comm: MPI.Intracomm, /, **dims: int) -> None:
        if not is_comm(comm):
            raise TypeError(f"comm must be an mpi4py intracommunicator, got {comm_text(comm)}")
        sizes: dict[str, int] = {}
        with local_checks() as checks:
            sizes = checked_dims(dims, comm.size)
            check_settings()  # operations that send nothing would raise on one rank alone
        facts = new_number(), garbage_count()
        said = agree(comm, "Mesh", {"dims": tuple(sizes.items())}, error=checks.error, facts=facts)
        numbers, garbage = said
        if any(garbage):
            give_back(channel_of(comm, "Mesh"), "Mesh")
        cart = made(lambda: comm.Create_cart(list(sizes.values()), reorder=False), numbers[0], "Mesh")
        self._begin(cart, sizes, cart.Get_coords(cart.rank))
        self._open(cart, self._over(sizes), "Mesh")
        self._peers.restart = self._cart.refused

    @classmethod
    def without_ranks(cls, coordinates: Mapping[str, int] | None = None, /, **dims: int) -> Mesh:
        """Make a mesh without its ranks, for hollow arrays: operations note what they would send.

        Parameters
        ----------
        coordinates : mapping of str to int, optional
            The place of this rank along each dim; 0 along those that are not named.
        **dims : int
            The size of each dim by name, in order.

        Returns
        -------
        Mesh
            The mesh.

        Raises
        ------
        TypeError, ValueError
            For sizes that are none, more than 4,194,304 ranks, and coordinates outside the mesh.

        Notes
        -----
        Communicates nothing, and needs no MPI.

        Examples
        --------
        >>> Mesh.without_ranks({"data": 3}, data=512, model=8).rank
        24
        """
        sizes = checked_dims(dims)
        if (ranks := math.prod(sizes.values())) > _MOST_RANKS:
            raise ValueError(f"a mesh without ranks stands for at most {_MOST_RANKS:,} ranks, got {ranks:,}")
        here = {**dict.fromkeys(sizes, 0), **(coordinates or {})}
        for dim, at in here.items():
            if not 0 <= at < sizes.get(dim, 0):
                raise ValueError(f"a mesh with {sizes} has no rank at {dim} = {at}")
        mesh = cls.__new__(cls)
        mesh._begin(FakeComm(list(sizes.values()), list(here.values())), sizes, list(here.values()))
        return mesh

    def _begin(self, cart: Any, sizes: dict[str, int], coordinates: Sequence[int]) -> None:
        self.dims: Mapping[str, int] = MappingProxyType(sizes)
        self.dim_sizes: Dims = tuple(sizes.items())
        self._cart = self._heard(cart)
        self._peers = Peers(None)
        self.rank, self.size = cart.rank, cart.size
        self.coordinates: Mapping[str, int] = MappingProxyType(dict(zip(sizes, coordinates, strict=True)))
        self._comms: dict[tuple[str, ...], MPI.Intracomm] = {tuple(sizes): cart}
        self._history = self._beginnings = 0
        self._in_world = None if isinstance(cart, FakeComm) else ranks_in(cart, mpi().COMM_WORLD)
        self._along: dict[tuple[str, ...], tuple[Any, RanksAlong]] = {}
        self._recent: deque[tuple[int, str, str]] = deque(maxlen=_REMEMBERED)
        self._arrays: deque[tuple[int, str, int]] = deque(maxlen=_REMEMBERED_ARRAYS)
        self._passed = 0
        self._fault: Exception | None = None
        self.is_hollow = isinstance(cart, FakeComm)
        # Without ranks, the shardings of all arrays: they say which ranks would hold arrays of other shapes.
        self.shardings: set[Sharding] | None = set() if self.is_hollow else None

    def comm(self, *dims: str) -> MPI.Intracomm:
        """Return the communicator of the ranks that differ from this one in `dims` only.

        Parameters
        ----------
        *dims : str
            Names of dims, in any order; none of them means this rank alone.

        Returns
        -------
        mpi4py.MPI.Cartcomm
            The communicator, in which the last dim of the mesh varies fastest. The mesh keeps and frees it.

        Raises
        ------
        ValueError
            If the mesh does not have a dim.
        CollectiveError
            If ranks ask for different dims.

        Notes
        -----
        Collective over the mesh when these dims are asked for first: one Allgather of 56 bytes, and the making of the
        communicator.
        """
        try:
            return self._comms[dims]
        except (KeyError, TypeError):  # there is none yet, or a name is a list
            unknown = [dim for dim in dims if dim not in [*self.dims]]
        if unknown:
            raise ValueError(f"the mesh has no dim {unknown[0]!r}; its dims are {', '.join(self.dims)}")
        key = tuple(dim for dim in self.dims if dim in dims)
        if key not in self._comms:
            # Ranks that ask for different dims would get communicators of ranks that do not belong together.
            said = agree(self._cart, "Mesh.comm", {"dims": key}, facts=(new_number(),), over=self._over(self.dims))
            if self.is_hollow:
                self._comms[key] = self._heard(self._sub(key))
            else:
                first = self._cart.Get_cart_rank([0 if dim in key else at for dim, at in self.coordinates.items()])
                comm = self._heard(made(lambda: self._sub(key), said[0][first], "Mesh.comm"))
                self._open(comm, self._over(key), "Mesh.comm")
                self._comms[key] = comm
        return self._comms[key]

    def _sub(self, dims: tuple[str, ...]) -> Any:
        if not dims and not self.is_hollow:  # Sub of Intel MPI gives it to the first rank alone, and others COMM_NULL
            return mpi().COMM_SELF.Create_cart([])
        return self._cart.Sub([dim in dims for dim in self.dims])

    def along(self, dims: Collection[str]) -> tuple[Any, RanksAlong]:
        """Return the communicator of the ranks that differ in `dims` only, and its name, by which messages name ranks.

        Parameters
        ----------
        dims : collection of str
            Names of dims.

        Returns
        -------
        tuple of mpi4py.MPI.Cartcomm and str
            The communicator, and the dims as text with the ranks in COMM_WORLD of the communicator.

        Notes
        -----
        Collective as `comm` is.
        """
        key = tuple(dims)
        if key not in self._along:
            self._along[key] = self.comm(*dims), self._over(key)
        return self._along[key]

    def _over(self, dims: Collection[str]) -> RanksAlong:
        # Without a reference to the mesh: channels keep the name.
        names = partial(_world_rank, self.dim_sizes, dict(self.coordinates), tuple(dims), self._in_world)
        return RanksAlong(text_of_dims(dims), names)

    def _heard(self, comm: Any) -> Any:
        """Return `comm`, which reports refused agreements to this mesh; it may outlive the mesh."""
        weak = weakref.ref(self)

        def refused() -> None:
            if (mesh := weak()) is not None:
                mesh._begin_again()

        def difference(*call: Any) -> str:
            mesh = weak()
            assert mesh is not None  # it has made the call
            return mesh._difference(*call)

        comm.refused, comm.difference = refused, difference
        return comm

    def _open(self, comm: Any, over: RanksAlong, operation: str) -> None:
        """Make the channel of `comm` while all of its ranks are here: once one raises, they might not come for it."""
        channel = open_channel(comm, operation)
        channel.over = over
        if comm is self._cart:
            assert channel.peers is not None
            self._peers = channel.peers
            self._peers.over, self._peers.is_mesh = over, True
        channel.share(self._peers, None if comm is self._cart else self._cart)

    def note(self, checksum: int, what: str, in_full: str, arrays: Sequence[tuple[str, int]] = ()) -> None:
        """Remember that this rank has run an operation.

        Most operations send nothing, so ranks that run different ones do not notice it. The next `agree` does.

        Parameters
        ----------
        checksum : int
            A checksum of `in_full`.
        what : str
            The name of the operation.
        in_full : str
            All that must be the same on every rank.
        arrays : sequence of (str, int), optional
            For plain arrays that must be the same on every rank, where they were passed, and their checksums.

        Notes
        -----
        Communicates nothing. Inside `reproducible` it looks at the state of the floating-point unit; the next `agree`
        raises what it finds.
        """
        if current().rounds_to_nearest:
            self._look_at_arithmetic()
        if arrays:
            checksum = hash((checksum, *[number for _, number in arrays]))
            for where, number in arrays:
                self._passed += 1
                self._arrays.append((self._passed, where, number))
        self._history = hash((self._history, checksum))  # the hash of whole numbers is the same in every process
        self._recent.append((self._history, what, in_full))

    def _look_at_arithmetic(self) -> None:
        """Keep the error for the next `agree`, if this rank computes other bits than the mode promises."""
        with local_checks() as checks:
            check_floating_point()
        if checks.error is not None and self.size == 1:  # a program on one rank may never agree with others
            raise checks.error
        self._fault = self._fault or checks.error

    @contextmanager
    def telling(self, error: Exception) -> Iterator[None]:
        """Tell an error that this rank has found to the other ranks, in the next `agree` of a block.

        Parameters
        ----------
        error : Exception
            The error.

        Notes
        -----
        Communicates nothing.
        """
        before, self._fault = self._fault, error
        try:
            yield
        finally:
            self._fault = before

    def agree(
        self,
        dims: Collection[str],
        operation: str,
        call: Mapping[str, Hashable],
        error: Exception | None = None,
        *,
        fact: int = 0,
        ranks_named: bool = False,
    ) -> list[int]:
        """Make sure that the ranks along `dims` make the same call and have run the same operations before.

        Parameters
        ----------
        dims : collection of str
            Names of dims.
        operation : str
            The name of the operation that the ranks begin.
        call : mapping of str to hashable
            All that must be the same on every rank.
        error : Exception, optional
            The error that the checks of this rank raised.
        fact : int, optional
            A number for the other ranks to know.
        ranks_named : bool, optional
            The text of `error` names its ranks already, from an agreement over other dims.

        Returns
        -------
        list of int
            The `fact` of each rank.

        Raises
        ------
        Exception
            The `error` of the lowest rank that has one, with a text that names the ranks.
        CollectiveError
            If the calls or the operations before them differ.

        Notes
        -----
        Collective over `dims`: one Allgather of 56 bytes. Every rank raises the same error.
        """
        comm, over = self._along.get(tuple(dims)) or self.along(dims)
        facts, beginnings = (self._history, fact), self._beginnings
        arithmetic = current()
        if arithmetic.rounds_to_nearest:
            self._look_at_arithmetic()
        error = error or self._fault
        # As `agree` does, in one function less.
        call = {**call, "arithmetic": arithmetic.name}  # the arithmetic decides what operations send
        known = signature_of(operation, tuple(call.items()), tuple(map(type, call.values())))
        histories, others = agree_on_call(comm, known, facts, error=error, over=over, ranks_named=ranks_named)
        # Ranks may have run other operations before an error of one of them: they are not compared.
        if self._beginnings == beginnings and histories != (self._history,) * len(histories):
            difference = self._difference(comm, (), operation, over)
            self._begin_again()
            raise agreed(named(CollectiveError(difference)), self._peers, comm.size)
        return list(others)

    def _difference(self, comm: Any, numbers: Sequence[int], operation: str, over: str) -> str:
        """Name the first operation that differs between ranks, or that they have made other `numbers` of calls.

        Collective over `comm`, as `all_gather_text` is.
        """
        remembered = json.dumps([list(self._recent), list(self._arrays)])
        texts = all_gather_text(remembered, comm, operation=operation, over=over)
        recent, arrays = zip(*map(json.loads, texts), strict=True)
        if numbers and all(operations == recent[0] for operations in recent):
            first = min(numbers)
            calls = text_by_rank({rank: f"{number - first} calls more" for rank, number in enumerate(numbers)}, over)
            return f"ranks have not made the same calls over this mesh, as after an error that one rank caught: {calls}"
        return _first_difference(recent, arrays, over)

    def attempt(self) -> AbstractContextManager[None]:
        """Make a step that all ranks end together: an error of one rank is raised on every rank as the block ends.

        That is whatever leaves the block on a rank, also what the program raises itself. So catch errors around the
        block, and go on with the next one:

        >>> for batch in batches:  # doctest: +SKIP
        ...     try:
        ...         with mesh.attempt():
        ...             train(batch)
        ...     except ValueError as error:
        ...         print("left out:", error)

        Returns
        -------
        context manager
            The block.

        Raises
        ------
        Exception
            The error of the lowest rank that has one, with its words and the number of that rank. All ranks raise the
            same class: that of the error if each rank has imported it and can make it from its text, otherwise the
            nearest base that they can. KeyboardInterrupt, SystemExit and others that are no `Exception` leave as they
            are on their rank, and as `CollectiveError` on the others.
        CollectiveError
            If ranks have run different operations in the block, or are not in the same one.

        Notes
        -----
        Collective over all dims at the end of the block: one Allgather of 56 bytes. After an error the ranks exchange
        messages and complete the collectives that some of them have left. What a rank has computed or assigned in the
        block before the error stays. Blocks may be nested, and those of several meshes too.
        """
        return _Attempt(self)

    def _begin_again(self) -> None:
        """Forget what this rank has run, as the others along the same dims do: a difference is reported once.

        Every refused agreement over a communicator of this mesh calls this, whichever function agreed: one rank may be
        in `agree`, another in a loss or in `save`, which have agreements of their own.
        """
        self._history, self._fault, self._beginnings = 0, None, self._beginnings + 1
        self._recent.clear()
        self._arrays.clear()
        self._passed = 0
        self._recent.append((0, _REFUSED, _REFUSED))

    def __copy__(self) -> Mesh:
        return self

    def __deepcopy__(self, memo: object) -> Mesh:
        return self  # arrays of two meshes do not mix: a copied model stays on the mesh of the first

    def __reduce__(self) -> NoReturn:
        raise TypeError("a mesh is not pickled, as its communicators belong to one process: make a mesh in each one")

    def plot(self) -> Figure:
        """Draw the ranks as a grid: the last dim to the right, the others downwards.

        Returns
        -------
        matplotlib.figure.Figure
            A new figure; `figure.savefig("mesh.png")` writes it to a file.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Notes
        -----
        Communicates nothing.
        """
        figure = new_figure(*mesh_size(self.dim_sizes))
        draw_mesh(figure, self.dim_sizes)
        return figure

    def _repr_html_(self) -> str | None:
        return svg_or_none(lambda figure: draw_mesh(figure, self.dim_sizes), *mesh_size(self.dim_sizes), name="mesh")

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{dim}={size}' for dim, size in self.dims.items())})"


class _Attempt:
    """A block of `Mesh.attempt`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._peers = mesh, mesh._peers

    def __enter__(self) -> None:
        if self._peers.closed is not None and not self._peers.blocks:
            self._peers.refuse()  # unless others have been closed in this block already
        self._block = self._peers.begin()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        mesh, peers, own = self._mesh, self._peers, error
        try:
            if error is None:
                try:
                    mesh.agree(tuple(mesh.dims), "attempt", {})
                except BaseException as late:
                    error = late
            if error is not None and peers.size > 1:
                if isinstance(error, CollectiveTimeout):
                    raise error
                error = end_block(peers, mesh._cart, self._block, error)
        except BaseException as failure:
            if not peers.outer_has_ended(self._block):
                peers.revoke_block(failure)
            raise
        finally:
            peers.leave(self._block)
        if error is not None and error is not own:
            raise error


def _world_rank(
    sizes: Dims, coordinates: Mapping[str, int], dims: Sequence[str], in_world: Sequence[int] | None, rank: int
) -> int:
    """Return the number in COMM_WORLD of a rank along `dims`; without ranks that in the mesh."""
    at = dict(coordinates)
    for dim, size in reversed(sizes):
        if dim in dims:
            rank, at[dim] = divmod(rank, size)
    found = 0
    for dim, size in sizes:
        found = found * size + at[dim]
    return found if in_world is None else in_world[found]


def check_mesh(mesh: Any) -> None:
    """Raise `TypeError` unless this is a mesh."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")


def text_of_dims(dims: Collection[str]) -> str:
    """Return the name of the ranks along `dims` in messages and in the trace."""
    return ", ".join(dims)


def _first_difference(
    recent: Sequence[list[tuple[int, str, str]]], arrays: Sequence[list[tuple[int, str, int]]], over: str
) -> str:
    """Name the first operation that differs between the ranks, or plain array, among those that they remember."""
    known = set.intersection(*({history for history, *_ in each} for each in recent))
    refused = [bool(each) and each[0][1] == _REFUSED for each in recent]
    if not known and True in refused and False in refused:  # some ranks have begun again, over dims of their own
        said = {rank: _REFUSED if began else "none that was" for rank, began in enumerate(refused)}
        return f"ranks have run different operations: {text_by_rank(said, over)}"
    first, in_full = {}, {}
    for rank, each in enumerate(recent):
        common = max((index for index, (history, *_) in enumerate(each) if history in known), default=-1)
        _, first[rank], in_full[rank] = each[common + 1] if common + 1 < len(each) else (0, "nothing", "nothing")
    if len(set(first.values())) == 1:
        first = in_full
    if len(set(first.values())) == 1 and (difference := _first_array(arrays, over)):
        return difference
    forgotten = not known and all(len(each) == _REMEMBERED for each in recent)
    after = f"; the first of them more than {_REMEMBERED} operations ago" if forgotten else ""
    return f"ranks have run different operations: {text_by_rank(first, over)}{after}"


def _first_array(arrays: Sequence[list[tuple[int, str, int]]], over: str) -> str:
    """Name the first plain array, by its number, that differs between the ranks; "" if none is remembered."""
    by_number = [{number: (where, checksum) for number, where, checksum in of_rank} for of_rank in arrays]
    for number in sorted(set.intersection(*map(set, by_number))):
        places, checksums = zip(*(numbered[number] for numbered in by_number), strict=True)
        if len(set(places)) > 1:
            break
        if len(set(checksums)) > 1:
            values = {rank: f"values with checksum {checksum:08x}" for rank, checksum in enumerate(checksums)}
            return (
                f"ranks have passed different arrays {places[0]}: {text_by_rank(values, over)}. Draw them from one "
                "seed on every rank, or let distribute take those of rank 0, by src_rank=0"
            )
    return ""
