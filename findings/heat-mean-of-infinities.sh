#!/usr/bin/env bash
# heat 1.8.0 (1.9.0 gave the same), torch 2.13.0, numpy 2.4.6, mpi4py 4.1.2, mpich 5.0.2, on three ranks: the mean of a
# split array with an infinity. It is inf if the last rank has it, as NumPy's is, and nan if another has it, on every rank,
# although the sum is inf, and so is the mean of the same array without a split: means are merged by their difference, and
# inf less inf is nan. A guesser expects inf, or at least an answer that does not depend on where the array is split.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 scipy==1.17.1 \
    mpi4py==4.1.2 mpich==5.0.2 2>"$work/log" || { cat "$work/log"; exit 1; }
# Without what heat requires: an older torch, and a torchvision for data sets, which a stand-in replaces.
"$work/v/bin/pip" install -q --no-compile --disable-pip-version-check --no-deps heat==1.8.0 2>"$work/log" || { cat "$work/log"; exit 1; }
cat >"$work/program.py" <<'PYTHON'
import sys
from unittest.mock import MagicMock

sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.transforms")}

import heat as ht
from mpi4py import MPI
import numpy as np

comm = MPI.COMM_WORLD
for owner in range(3):
    array = np.arange(6, dtype=np.float32)
    array[2 * owner] = np.inf
    split = ht.array(array, split=0)
    found = [comm.allgather(float(each.larray)) for each in (ht.mean(split), ht.sum(split), ht.mean(ht.array(array)))]
    if comm.rank == 0:
        print(f"inf on rank {owner}: mean {found[0]}, sum {found[1]}, mean without a split {found[2]}, NumPy {array.mean()}")
    inf, nan = [np.inf] * 3, [np.nan] * 3
    assert repr(found) == repr([inf if owner == 2 else nan, inf, inf]) and array.mean() == np.inf, "the behaviour has changed"
PYTHON
PATH="$work/v/bin:$PATH" mpiexec -n 3 python "$work/program.py" 2>"$work/errors" || { tail -n 5 "$work/errors"; exit 1; }
# Seen:
# inf on rank 0: mean [nan, nan, nan], sum [inf, inf, inf], mean without a split [inf, inf, inf], NumPy inf
# inf on rank 1: mean [nan, nan, nan], sum [inf, inf, inf], mean without a split [inf, inf, inf], NumPy inf
# inf on rank 2: mean [inf, inf, inf], sum [inf, inf, inf], mean without a split [inf, inf, inf], NumPy inf
