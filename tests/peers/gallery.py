"""make gallery PEER=NAME: judge a public implementation by the kit, as docs/gallery.md records it.

Its packages, those of tests/peers/versions.txt, are installed in an environment of their own beside the usual one.
Reports are printed, and kept as Markdown in build/gallery. Without a name, list the peers.
"""

import argparse
from configparser import ConfigParser
import os
from pathlib import Path
import site
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
    """Return the Python of a peer's environment, which has its packages before those of this one."""
    environment = Path(sys.prefix) / "gallery" / name.replace(":", "-")
    python = environment / "bin" / "python"
    if not (environment / "complete").exists():
        print(f"pip installs {' '.join(packages + alone)} in {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", environment], check=True)
        (folder,) = environment.glob("lib/python*/site-packages")
        (folder / "rest.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--ignore-installed"]
        for command in ([*pip, *packages], [*pip, "--no-deps", *alone]):
            if command[-1] not in pip:
                subprocess.run(command, check=True)
        (environment / "complete").touch()
    return python


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
    python = installed(options.peer, row["packages"].split(), row["alone"].split())
    reports = ROOT / "build" / "gallery"
    reports.mkdir(parents=True, exist_ok=True)
    file = ROOT / "tests" / "candidates" / "gallery" / f"{options.peer.partition(':')[0]}.py"
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for candidate in row["candidates"].split():
        report = reports / f"{options.peer.replace(':', '-')}-{candidate}.md"
        adapter = ["--adapter", row["adapter"]] if row["adapter"] else []
        command = [python, "-m", "pce_mpi", "conformance", "-n", str(options.n), *adapter, f"{file}:{candidate}"]
        print(f"===== {options.peer}: {candidate}", flush=True)
        # A report of faults ends with exit status 1, which is a result here.
        if subprocess.run([*command, "--markdown", report], env=environment).returncode not in (0, 1):
            return 1
    print(f"reports: {reports}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
