"""tests/peers/versions.txt, the table of what the kit has judged: pages, candidates and commands agree with it."""

import ast
import re
import subprocess
import sys

import pytest

from jobs.launch import ROOT
from peers.gallery import peers

TABLE = peers()
PROGRAM = ROOT / "tests" / "peers" / "gallery.py"
PINS = {pin for row in TABLE.values() for key in ("packages", "alone") for pin in row[key].split() if "==" in pin}


@pytest.mark.parametrize("name", TABLE.sections())
def test_candidates_of_a_peer_are_there(name):
    file = ROOT / "tests" / "candidates" / "gallery" / f"{name.partition(':')[0]}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    defined = {getattr(node, "name", "") for node in tree.body}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    members = {str(node.value).replace("-", "_") for node in nodes if isinstance(node, ast.Constant)} | {""}
    candidates = {candidate.partition(".")[::2] for candidate in TABLE[name]["candidates"].split()}
    assert candidates and all(function in defined and member in members for function, member in candidates)


def test_versions_on_pages_are_those_of_the_table():
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    section = page.partition("## From the package registry")[2].partition("\n## ")[0]
    said = {f"{package.lower()}=={version}" for package, version in re.findall(r"^\| ([\w-]+) ([\d.]+)", section, re.M)}
    assert said and said <= PINS


def run(*arguments):
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def test_peers_are_listed():
    assert [line.split()[0] for line in run().stdout.splitlines()] == TABLE.sections()


def test_pins_are_printed():
    assert run("colossalai", "--pins", "alone").stdout == TABLE["colossalai"]["alone"] + "\n"


def test_unknown_peer_is_refused():
    done = run("nobody")
    assert done.returncode == 2 and "torch_losses" in done.stderr


def test_peer_of_newer_python_is_skipped(tmp_path):
    table = (PROGRAM.parent / "versions.txt").read_text().replace("python = 3.12", "python = 4.0")
    for name, text in {"gallery.py": PROGRAM.read_text(), "versions.txt": table}.items():
        (tmp_path / "tests/peers").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests/peers" / name).write_text(text)
    done = subprocess.run(
        [sys.executable, tmp_path / "tests/peers/gallery.py", "megatron_core:newest"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "skipped: megatron_core:newest needs Python 4.0" in done.stdout
