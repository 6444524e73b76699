"""A program: plants random faults of one token in modules of the package, and says which tests see each."""

import argparse
import ast
from collections.abc import Iterator
import os
from pathlib import Path
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ROOT = Path(__file__).parents[1]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd},
}


def sites(tree: ast.Module) -> Iterator[ast.expr | ast.If]:
    """Yield what may be changed, in the bodies of functions."""
    seen = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in (found for statement in function.body for found in ast.walk(statement)):
                if isinstance(node, ast.expr | ast.If) and node not in seen and mutated(node, dry=True):
                    seen.add(node)
                    yield node


def mutated(node: ast.AST, dry: bool = False) -> bool:
    """Change the node, unless dry; False if there is nothing to change."""
    change: dict[str, Any]
    match node:
        case ast.Compare(ops=[kind]) if type(kind) in SWAPS:
            change = {"ops": [SWAPS[type(kind)]()]}
        case ast.BoolOp(op=kind) | ast.BinOp(op=kind) if type(kind) in SWAPS:
            operands = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
            if any(isinstance(x, ast.JoinedStr | ast.List | ast.Tuple | ast.Constant) for x in operands):
                return False
            change = {"op": SWAPS[type(kind)]()}
        case ast.If(test=test) | ast.IfExp(test=test):
            change = {"test": ast.UnaryOp(ast.Not(), test)}
        case ast.Constant(value=bool(value)):
            change = {"value": not value}
        case ast.Constant(value=int(value) | float(value)):
            change = {"value": value + 1}
        case _:
            return False
    for name, value in {} if dry else change.items():
        setattr(node, name, value)
    return True


def failures(copy: Path, group: str, seconds: float) -> list[str]:
    """Run tests up to the first failure and return its name, or how they ended."""
    ranks, *tests = shlex.split(group)
    pytest = [
        sys.executable,
        "-m",
        "mpi4py",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--ranks",
        ranks,
        *tests,
    ]
    variables = {"PCE_MPI_TIMEOUT": "10", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ["timeout", "-k", "5", f"{seconds}", "mpiexec", "-n", ranks, *pytest]
    done = subprocess.run(command, cwd=copy, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode == 5:
        raise SystemExit(f"no test at this number of ranks: {group}")
    said = done.stdout + done.stderr
    found = sorted({*re.findall(r"(?:FAILED|ERROR) \S*?::(\w+)", said), *re.findall(r"::(\w+)\S* .*failed here", said)})
    return found or ([] if done.returncode == 0 else [f"ended with {done.returncode}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__} A mutant goes from group to group until one sees it. The tree is copied, and stays as "
        "it is. Each line of the table: file:line, code, who saw it and by which tests."
    )
    parser.add_argument("files", nargs="+", help="modules, such as loss/divergence.py, below pce_mpi")
    parser.add_argument(
        "--group", action="append", required=True, metavar="NAME=RANKS ARGUMENTS", help="tests, as arguments of pytest"
    )
    parser.add_argument("--count", type=int, default=12, help="mutants (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default: 0)")
    parser.add_argument("--seconds", type=float, default=120, help="limit on a group (default: 120)")
    options = parser.parse_args()
    groups = [group.partition("=") for group in options.group]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(
            shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
        )
        drawn = []
        for file in options.files:
            tree = ast.parse((copy / "pce_mpi" / file).read_text(encoding="utf-8"))
            drawn += [(file, number) for number, _ in enumerate(sites(tree))]
        random.Random(options.seed).shuffle(drawn)
        for file, number in drawn[: options.count]:
            path = copy / "pce_mpi" / file
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            node = list(sites(tree))[number]
            code = (ast.get_source_segment(text, node) or "").partition("\n")[0]
            mutated(node)
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
            tried = ((name, failures(copy, tests, options.seconds)) for name, _, tests in groups)
            who = next((f"{name} | {', '.join(seen)}" for name, seen in tried if seen), "nobody |")
            path.write_text(text, encoding="utf-8")
            print(f"| {file}:{node.lineno} | `{code}` | {who} |", flush=True)


if __name__ == "__main__":
    main()
