"""The public functions over a mesh: each call is counted, and an error that leaves one is told to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, ValuesView
from functools import wraps
from inspect import isfunction
from itertools import islice
from typing import Any, TypeVar, cast

from pce_mpi.comm.peers import Peers, tell_peers
from pce_mpi.comm.uncaught import install

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

_NOBODY = Peers(None)
# Those of the last call: they hear an error of a call whose arguments name no mesh, as where one is wrong.
_last = _NOBODY


# Values in a list, and lists within lists, beyond which no mesh is looked for.
_MOST_VALUES, _MOST_LISTS, _DEPTH = 1000, 16, 2


def peers_in(values: Iterable[Any], depth: int = 0) -> Iterator[Peers]:
    """Yield the ranks of each mesh that arguments name: of distributed arrays, meshes and optimizers, also in lists."""
    lists = []
    for value in islice(values, _MOST_VALUES):
        if isinstance(value, tuple | list | dict | ValuesView):
            lists.append(value)
        elif isinstance(peers := getattr(value, "_peers", None), Peers):
            yield peers
    for several in lists[:_MOST_LISTS] if depth < _DEPTH else ():
        yield from peers_in(several.values() if isinstance(several, dict) else several, depth + 1)


def public(function: Function, *, reads: bool = False, has_meshes: bool = False, finds_mesh: bool = True) -> Function:
    """Make `function`, which users call, count its calls and tell its errors to the ranks of its mesh.

    One that `reads` is not counted once it has ended well: ranks may call it alone where it communicates nothing. One
    that `has_meshes` is counted over each mesh of its arguments. Unless `finds_mesh`, a function takes no mesh but the
    one among its arguments.
    """

    name = function.__name__

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        global _last
        peers = getattr(arguments[0], "_peers", None) if arguments else None
        if type(peers) is not Peers:
            peers = next(peers_in((*arguments, *options.values())), _NOBODY)
        if peers.operation:  # the call that this one is a part of is counted, and tells
            return function(*arguments, **options)
        if peers.closed is not None:
            peers.refuse()
        try:
            peers.operation = name
            if has_meshes:
                several = getattr(arguments[0], "_all_peers", None) if arguments else None
                for mesh_peers in several or {peers, *peers_in((*arguments, *options.values()))}:
                    mesh_peers.number += 1
            else:
                peers.number += 1
            if peers.size > 1:
                _last = peers
            result = function(*arguments, **options)
            if reads:
                peers.number -= 1
            return result
        except BaseException as error:
            peers.operation = ""
            install()
            hears_of_it = peers
            is_elsewhere = peers is not _NOBODY or not finds_mesh or options.get("comm") is not None
            if not is_elsewhere and _last.closed is None and _last.name in _last.channels:
                hears_of_it = _last
                _last.number += 1
            tell_peers(error, [hears_of_it, *peers_in((*arguments, *options.values()))])
            raise
        finally:
            peers.operation = ""

    return cast(Function, call)


def public_functions(names: dict[str, Any], but: Collection[str], over_meshes: Collection[str], *folders: str) -> None:
    """Make the functions among `names` public that are defined in `folders`, but those that cannot communicate.

    The arrays of those `over_meshes` may be on several meshes.
    """
    for name in names["__all__"]:
        if isfunction(value := names[name]) and value.__module__.startswith(folders) and name not in but:
            names[name] = call = public(value, has_meshes=name in over_meshes)
            call.__module__ = "pce_mpi"  # where it is found to be pickled


def public_methods(
    kind: Kind, but: Collection[str] = (), reading: Collection[str] = (), has_meshes: bool = False
) -> Kind:
    """Make the methods of the class `kind` that users call, its operators and what they assign, public."""
    for name, value in list(vars(kind).items()):
        if (name.startswith("_") and not name.endswith("__")) or name in but:
            continue
        if isfunction(value) and value.__name__ not in but:
            setattr(kind, name, public(value, reads=name in reading, has_meshes=has_meshes))
        elif isinstance(value, classmethod):
            setattr(kind, name, classmethod(public(value.__func__)))
        elif isinstance(value, property) and value.fset:
            setattr(kind, name, value.setter(public(value.fset)))
    return kind
