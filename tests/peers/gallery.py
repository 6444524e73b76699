"""make gallery PEER=NAME: judge a public implementation by the kit, as docs/gallery.md records it.

Its packages, those of tests/peers/versions.txt, are installed in a folder of their own.
Reports are printed, and kept as Markdown in build/gallery. Without a name, list the peers.
"""

import argparse
from configparser import ConfigParser
import os
from pathlib import Path
import shutil
import subprocess
import sys

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def peers() -> ConfigParser:
    """The table of versions: a section for each peer, with every key."""
    table = ConfigParser(defaults={"packages": "", "alone": "", "adapter": "", "python": "3.11"})
    table.read(FOLDER / "versions.txt", encoding="utf-8")
    return table


def installed(name: str, packages: list[str], alone: list[str]) -> Path:
    """Return a folder with a peer's packages, which comes on Python's path before those of this environment."""
    folder = Path(sys.prefix) / "gallery" / name.replace(":", "-")
    complete, pins = folder / "complete", " ".join(packages + alone)
    if not complete.exists() or complete.read_text() != pins:
        print(f"pip installs {pins} in {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        for wanted, more in ((packages, []), (alone, ["--no-deps"])):
            if wanted:
                subprocess.run([*pip, *more, *wanted], check=True)
        complete.write_text(pins)
    return folder


def main() -> int:
    table = peers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", choices=table.sections(), metavar="PEER", help="a section of versions.txt")
    parser.add_argument("--pins", choices=["packages", "alone"], help="print what pip installs for it, and do nothing")
    parser.add_argument("-n", type=int, default=3, help="how many ranks (default: %(default)s)")
    options = parser.parse_args()
    if options.peer is None:
        for name, row in table.items():
            if name != table.default_section:
                print(f"{name:24} {row['packages']} {row['alone']}")
        return 0
    row = table[options.peer]
    if options.pins:
        print(row[options.pins])
        return 0
    if sys.version_info < tuple(map(int, row["python"].split("."))):
        newer = f"make gallery PEER={options.peer} PYTHON=python3.13 VENV=/tmp/newer"
        print(f"skipped: {options.peer} needs Python {row['python']}: name one that is newer, as in {newer}")
        return 0
    path = installed(options.peer, row["packages"].split(), row["alone"].split())
    reports = ROOT / "build" / "gallery"
    reports.mkdir(parents=True, exist_ok=True)
    file = ROOT / "tests" / "candidates" / "gallery" / f"{options.peer.partition(':')[0]}.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    for candidate in row["candidates"].split():
        report = reports / f"{options.peer.replace(':', '-')}-{candidate}.md"
        adapter = ["--adapter", row["adapter"]] if row["adapter"] else []
        judge = [sys.executable, "-m", "pce_mpi", "conformance", "-n", str(options.n), "--markdown", str(report)]
        print(f"===== {options.peer}: {candidate}", flush=True)
        # A report of faults ends with exit status 1, which is a result here.
        if subprocess.run([*judge, *adapter, f"{file}:{candidate}"], env=environment).returncode not in (0, 1):
            return 1
    print(f"reports: {reports}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
