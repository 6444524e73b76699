"""Lines of code by folder, and the limits that they must keep: `make lint` fails above one.

A line counts if it holds a token of code, imports among them; docstrings, comments and blank lines do not. What takes
lines away lowers a limit. One is raised only with a word in CHANGELOG.md that says why.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
import re
import sys
import tokenize

ROOT = Path(__file__).parents[1]

LIMITS = {
    "package, Python": 25_830,
    "package, C++ and CUDA": 5_424,
    "package, lines of docstrings": 8_800,
    "package, files of Python": 194,
    "tests, Python": 39_800,
}

SUFFIXES = {
    ".py": "Python",
    ".h": "C++ and CUDA",
    ".cpp": "C++ and CUDA",
    ".cu": "C++ and CUDA",
    ".cuh": "C++ and CUDA",
}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
COMMENT_IN_CPP = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def lines_of_python(path: Path) -> tuple[int, int]:
    """Return the lines of code and those of docstrings, which are statements that begin with a string."""
    code, docstrings, begins = set[int](), set[int](), True
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in LAYOUT | {tokenize.COMMENT}:
                lines = docstrings if token.type == tokenize.STRING and begins else code
                lines |= set(range(token.start[0], token.end[0] + 1))
                begins = False
            elif token.type == tokenize.NEWLINE:
                begins = True
    return len(code), len(docstrings)


def lines_of_cpp(path: Path) -> int:
    return sum(bool(line.strip()) for line in COMMENT_IN_CPP.sub("", path.read_text(encoding="utf-8")).splitlines())


def counted(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield folder, name among the limits, and number, for each file of the package and of the tests."""
    for top, name in (("pce_mpi", "package"), ("tests", "tests")):
        for path in sorted(root.glob(f"{top}/**/*")):
            folder = "/".join(path.relative_to(root).parts[:-1][:2])
            if path.suffix == ".py":
                code, docstrings = lines_of_python(path)
                yield folder, f"{name}, Python", code
                yield folder, f"{name}, lines of docstrings", docstrings
                yield folder, f"{name}, files of Python", 1
            elif path.suffix in SUFFIXES:
                yield folder, f"{name}, {SUFFIXES[path.suffix]}", lines_of_cpp(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the repository (default: this one)")
    folders, totals = dict[str, Counter[str]](), Counter[str]()
    for folder, name, number in counted(parser.parse_args().root):
        folders.setdefault(folder, Counter())[name.partition(", ")[2]] += number
        totals[name] += number
    kinds = ["files of Python", "Python", "lines of docstrings", "C++ and CUDA"]
    print(f"{'':24}", *(f"{kind:>20}" for kind in kinds))
    for folder, numbers in folders.items():
        print(f"{folder:24}", *(f"{numbers[kind]:20,}" for kind in kinds))
    print()
    for name, limit in LIMITS.items():
        print(f"{name:32}{totals[name]:8,} of {limit:,}")
    above = [name for name, limit in LIMITS.items() if totals[name] > limit]
    if above:
        sys.exit(f"above the limit in tests/lines.py: {'; '.join(above)}")


if __name__ == "__main__":
    main()
