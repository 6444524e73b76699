"""Help for tests of MPI programs: assertions that know ranks, and a plugin of pytest (`pytest --ranks 1,2,3`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pce_mpi.testing.public import *  # noqa: F403  # a star hands on all names, without a second list
else:
    from pce_mpi.lazy import public_names

    __getattr__, __dir__ = public_names(__name__)
