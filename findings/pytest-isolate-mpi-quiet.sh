#!/usr/bin/env bash
# pytest-isolate-mpi 0.4.1, pytest 9.2.0, mpi4py 4.1.2, mpich 5.0.2: `pytest -q` fails every test that it isolates.
# A test that passes on two ranks fails as soon as the session is quiet: the count of -v, which is negative then, becomes
# an option without a letter for the pytest of the ranks, which looks for a file of that name. The report says that an
# MPI process has exited prematurely. A guesser expects the same results with fewer words.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/pip" install -q --no-compile --disable-pip-version-check pytest==9.2.0 pytest-isolate-mpi==0.4.1 \
    mpi4py==4.1.2 mpich==5.0.2 2>"$work/log" || { cat "$work/log"; exit 1; }
export PATH="$work/v/bin:$PATH"
cd "$work"
cat > test_it.py <<'E2'
import pytest


@pytest.mark.mpi(ranks=2)
def test_it(comm):
    assert comm.allreduce(1) == comm.size
E2
last_line() { python -m pytest --color=no "$@" test_it.py > printed 2>&1 || true; tail -n 1 printed; }
loud=$(last_line) quiet=$(last_line -q)
echo "without -q: $loud"
echo "with -q:    $quiet"
grep -o "At least one MPI process has exited prematurely" printed | sort -u
grep -o "file or directory not found: -" printed | sort -u
[[ $loud == *passed* && $loud != *failed* && $quiet == *"1 failed"* ]]
