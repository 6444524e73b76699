#!/usr/bin/env bash
# pytest 9.0.2, CPython 3.11 to 3.13: a test whose parameters are a set of numbers, collected twice.
# Numbers have the same hash in every process, and PYTHONHASHSEED is fixed besides. All the same the first session, which
# compiles the file, has another order of the tests than the second, which reads what the first has compiled: the
# compiler fills the constant set in the order of the source, and the reader in that of the file, where elements are
# sorted by their bytes; 0.0 and 0.5 collide in the table. So processes that share a cache, such as the ranks of an MPI
# job, may find other tests than each other. A guesser expects that of strings alone.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check pytest==9.0.2 2>"$work/log" || { cat "$work/log"; exit 1; }
cat > "$work/test_numbers.py" <<'E2'
import pytest


@pytest.mark.parametrize("x", {1.0, 0.5, 0.0})
def test_number(x):
    assert x < 2
E2
unset PYTHONDONTWRITEBYTECODE
export PYTHONHASHSEED=0
collected() {
    (cd "$work" && venv/bin/python -m pytest -q --collect-only -p no:cacheprovider test_numbers.py) | grep -o '\[.*\]' | xargs
}
first=$(collected) second=$(collected) third=$(collected)
python3 --version
printf 'session %s: %s\n' 1 "$first" 2 "$second" 3 "$third"
[[ $first == "[0.5] [1.0] [0.0]" && $second == "[0.0] [0.5] [1.0]" && $third == "$second" ]] ||
    { echo "the behaviour has changed"; exit 1; }
# Seen:
# session 1: [0.5] [1.0] [0.0]
# session 2: [0.0] [0.5] [1.0]
# session 3: [0.0] [0.5] [1.0]
