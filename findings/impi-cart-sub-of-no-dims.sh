#!/usr/bin/env bash
# impi-rt 2021.18.1, mpich 5.0.2, mpi4py 4.1.2: MPI_Cart_sub that keeps no dimension, on three ranks.
# MPI says that each rank then gets a communicator of its own, without dimensions, and MPICH does so. Intel MPI gives one
# to rank 0 and MPI_COMM_NULL to all others, as if a new grid without dimensions had been made of all ranks. A guesser
# expects the same of a library that was made from MPICH.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/sub.py" <<'E2'
from mpi4py import MPI

alone = MPI.COMM_WORLD.Create_cart([3]).Sub([False])
sizes = MPI.COMM_WORLD.gather("COMM_NULL" if alone == MPI.COMM_NULL else alone.size)
if sizes:
    print(*sizes)
E2
for library in mpich==5.0.2 impi-rt==2021.18.1; do
    python3 -m venv "$work/$library"
    "$work/$library/bin/pip" install -q --no-compile --disable-pip-version-check mpi4py==4.1.2 "$library" \
        2>"$work/log" || { cat "$work/log"; exit 1; }
    PATH="$work/$library/bin:$PATH" mpiexec -n 3 python "$work/sub.py" > "$work/$library.txt"
    echo "$library: $(cat "$work/$library.txt")"
done
[[ $(cat "$work/mpich==5.0.2.txt") == "1 1 1" && $(cat "$work/impi-rt==2021.18.1.txt") == "1 COMM_NULL COMM_NULL" ]]
