"""The documents are true: programs print the text below them; commands, files and the targets of links exist.

The programs that want the same number of ranks run in one job, one after the other.
"""

from functools import cache
from inspect import signature
from itertools import pairwise
import json
import os
from pathlib import Path
import re
import runpy
import shlex
import sys
import tempfile
from types import SimpleNamespace

import pygments
from pygments.lexers import get_lexer_by_name
from pygments.token import Generic
import pytest

from jobs.launch import ROOT, complete, job_environment, launch, launch_source
from jobs.test_house import FOLDERS
import pce_mpi
from pce_mpi.cli import _parser
from pce_mpi.conformance.candidates.loading import FUNCTION_ADAPTERS, NAMED_CANDIDATES
from pce_mpi.jobs.mpiexec import mpiexec

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
}
BLOCKS = {name: re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for name, text in PAGES.items()}
# A program, and the block of text below it.
PROGRAMS = [
    (name, text, below[1] if below[0] == "text" else None)
    for name, blocks in BLOCKS.items()
    for (language, text), below in zip(blocks, [*blocks[1:], ("", "")], strict=False)
    if language == "python"
]
COMMANDS = sorted(
    {
        line.removeprefix("$ ").partition(" #")[0].strip()
        for blocks in BLOCKS.values()
        for language, text in blocks
        if language == "console"
        for line in text.splitlines()
        if line.startswith("$ ")
    }
)
RULES = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
TARGETS = [target for rule in RULES for target in rule.split()]
EXTRAS = re.findall(
    r"^([a-z0-9]+) =", (ROOT / "setup.cfg").read_text(encoding="utf-8").split("extras_require]")[1], re.MULTILINE
)
START = re.compile(r"# (\S+\.py): mpiexec -n (\d+) python -m mpi4py \1\n")

# Runs the files that it is given, one after the other; for each a line of JSON: what all ranks printed, in their order.
# Files that they write stay beside them.
RUN_ALL = """
import contextlib, io, json, os, runpy, sys
from mpi4py import MPI

os.chdir(os.path.dirname(__file__))
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    texts = MPI.COMM_WORLD.gather(printed.getvalue())
    if texts is not None:
        print(json.dumps("".join(texts)), flush=True)
"""


def name_of(source):
    return source.partition(":")[0].removeprefix("# ")


def start_of(source):
    start = START.match(source)
    assert start, "the first line says how to start the program"
    return start


@cache
def run_of_programs(ranks):
    """Return what each program for so many ranks printed, as far as they came, and the job that ran them."""
    sources = [source for _, source, _ in PROGRAMS if int(start_of(source)[2]) == ranks]
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            Path(folder, name_of(source)).write_text(source, encoding="utf-8")
        runner = Path(folder, "run_all.py")
        runner.write_text(RUN_ALL, encoding="utf-8")
        job = launch(ranks, str(runner), *(str(Path(folder, name_of(source))) for source in sources))
    return dict(zip(sources, map(json.loads, job.stdout.splitlines()), strict=False)), job


def test_pages_have_programs_and_commands():
    assert len(PROGRAMS) >= 8
    assert len(COMMANDS) >= 20
    assert len({name_of(source) for _, source, _ in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.parametrize(("source", "output"), [each[1:] for each in PROGRAMS], ids=[name_of(p[1]) for p in PROGRAMS])
def test_program_prints_text_below_it(source, output):
    assert output is not None, "a block of text below the program shows its output"
    printed, job = run_of_programs(int(start_of(source)[2]))
    assert source in printed, job.stderr
    assert printed[source].rstrip() == output.rstrip()


def test_walk_to_fault_prints_what_page_shows(tmp_path):
    """The commands are one session of a shell, as far as blocks show what they print."""
    blocks = BLOCKS["docs/equal-means-equal.md"]
    shown = "".join(text for language, text in blocks if language == "console" and re.search("^(?!\\$ )", text, re.M))
    commands = [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    folders = [str(Path(program).parent) for program in (sys.executable, mpiexec()[0])]
    env = job_environment(4) | {"PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    script = "".join(f"echo {shlex.quote('$ ' + command)}\n{command}\n" for command in commands)
    job = complete(["sh", "-c", script], cwd=tmp_path, env=env)
    assert job.stdout == shown, job.stderr
    program = {line.strip() for line in (ROOT / "examples/first_difference.py").read_text().splitlines()}
    quoted = [line.strip() for language, text in blocks if language == "py" for line in text.splitlines()]
    assert quoted and set(quoted) <= program


def test_readme_begins_with_commands_and_ends_with_gpt():
    parts = ["$ make run", "$ make test", "It is for", "docs/logits.svg", "sharded.py", "in_one_file.py", "step.py"]
    parts += ["examples/verify_your_loss.py", "--fingerprint"]
    places = [PAGES["README.md"].index(part) for part in parts]
    assert places == sorted(places)
    assert PAGES["README.md"][: places[1]].count("\n") < 10


def test_ci_calls_test_command_of_readme():
    (command,) = {command for command in COMMANDS if f"$ {command} " in PAGES["README.md"] and "make test" in command}
    assert f"run_step {command}\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_readme_has_last_line_of_check():
    """The package as README installs it has no bfloat16."""
    program = """
        import sys
        from pce_mpi.cli import main

        sys.modules["ml_dtypes"] = None
        sys.exit(main(["check"]))
        """
    job = launch_source(4, program)
    assert job.returncode == 0, job.stderr
    assert f"`{job.stdout.splitlines()[-1]}`" in PAGES["README.md"]


# The digits on the page follow from the library of one version of Python, so only their form is tested.
SMALL = ["--max-files=5", "--layers=1", "--width=24", "--batch=3", "--test-tokens=1", "--write=1"]


def test_gpt_of_readme_has_one_fingerprint():
    export, *lines = next(text for _, text in BLOCKS["README.md"] if "--fingerprint" in text).splitlines()
    commands, shown = [line.removeprefix("$ ").split() for line in lines[::2]], lines[1::2]
    assert export == "$ export PCE_MPI_REPRODUCIBLE=1 OMP_NUM_THREADS=1"
    jobs = [launch(int(words[2]), *words[6:], *SMALL, env={"PCE_MPI_REPRODUCIBLE": "1"}) for words in commands]
    found = [line for job in jobs for line in re.findall("^step 3  .*$", job.stdout, re.MULTILINE)]
    for each in (found, shown):
        assert len(each) == 4 and len(set(each)) == 1, [job.stderr for job in jobs]
        assert re.fullmatch(r"step 3  loss \d\.\d+  parameters [0-9a-f]{64}", each[0])


@pytest.mark.parametrize("name", ["distribute", "from_local", "load"])
def test_table_shows_every_option_of_call(name):
    shown = re.search(rf"^\|.*`{name}\((.*?)\)` *[|,]", PAGES["docs/arrays.md"], re.MULTILINE)[1]
    for option in signature(getattr(pce_mpi, name)).parameters.values():
        if option.kind is not option.VAR_KEYWORD:
            default = "" if option.default is option.empty else f"={option.default}"
            assert f"{option.name}{default}" in shown.split(", ")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command):
    words = shlex.split(command)
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= set(TARGETS)
    elif words[:2] == ["pip", "install"]:
        assert set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", command)))) <= set(EXTRAS)
    elif words[:3] == ["python", "-m", "pce_mpi"]:
        check_command_line(words[3:])
    elif words[0] == "python":
        assert (ROOT / words[1]).exists()
    elif words[:2] == ["mpiexec", "-n"] and words[2].isdecimal() and words[3] == "python":
        arguments = words[4:]
        if arguments[:2] == ["-m", "pce_mpi"]:
            check_command_line(arguments[2:])
        elif arguments[:4] == ["-m", "mpi4py", "-m", "pytest"]:
            assert (ROOT / arguments[-1]).exists()
        else:
            assert arguments[:2] == ["-m", "mpi4py"]
            check_program(*arguments[2:])
    elif words[0] == "torchrun":  # peers/test_torch_groups.py starts it
        assert (ROOT / words[-1]).exists()
    elif words[0] in ("mpiexec", "srun", "sbatch"):
        # Several machines, which a test on one cannot start: at least the program is started as all others are.
        assert words[0] == "sbatch" or re.search(r"python -m (mpi4py|pce_mpi) ", command)
    else:
        assert words[0] in ("git", ".", "export", "module", "diff", "tail", "pytest")


def check_command_line(arguments):
    """The command line of the package takes these arguments, and knows or finds what they name."""
    options = _parser().parse_args(arguments)
    candidate = getattr(options, "candidate", None)
    if candidate is not None and candidate not in NAMED_CANDIDATES:
        path = candidate.partition(":")[0]
        assert (ROOT / path).exists() or path in {name_of(source) for _, source, _ in PROGRAMS}
    assert getattr(options, "adapter", None) in {None, *FUNCTION_ADAPTERS}


def check_program(path, *arguments):
    """The program exists, and an example or a benchmark takes these arguments; test_examples.py starts it without."""
    assert (ROOT / path).exists()
    if not path.startswith("benchmarks/") and not (path.startswith("examples/") and arguments):
        return
    with tempfile.TemporaryDirectory() as folder:
        for option, name in pairwise(arguments):
            if option in ("--features", "--labels", "--resume"):
                Path(folder, name).touch()
        command = [sys.executable, str(ROOT / path), *arguments, "--help"]
        shown = complete(command, cwd=Path(folder), env=job_environment(1))
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("name", PAGES)
def test_link_leads_to_file(name):
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]+)", re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.M | re.S))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_named_file_of_repository_exists(name):
    tops = "|".join(["benchmarks", "docs", "examples", "pce_mpi", "tests", *FOLDERS])
    named = set(re.findall(rf"`((?:{tops})/[\w/.-]*)`", PAGES[name]))
    assert [path for path in sorted(named) if not any((top / path).exists() for top in (ROOT, ROOT / "pce_mpi"))] == []


def test_architecture_pictures_every_folder():
    picture = PAGES["docs/architecture.md"].split("```")[1]
    assert sorted(re.findall(r"\b(\w+)/", picture)) == FOLDERS


def test_reference_has_every_public_name():
    documented = re.findall(r"^::: pce_mpi\.([\w.]+)$", PAGES["docs/reference.md"], re.MULTILINE)
    assert {name for name in documented if "." not in name} == set(pce_mpi.__all__)


def test_menu_of_site_has_every_page():
    pages = runpy.run_path(str(ROOT / "docs/pages.py"))["PAGES"].values()
    menu = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted({page for page in pages if page.endswith(".md")})


@pytest.fixture
def site(monkeypatch):
    """The names of docs/pages.py, without the package for its formulas."""
    convert = SimpleNamespace(convert=lambda formula, display="inline": "")
    for name in ("latex2mathml", "latex2mathml.converter"):
        monkeypatch.setitem(sys.modules, name, convert)
    return runpy.run_path(str(ROOT / "docs/pages.py"))


def test_site_links_functions_to_reference(site):
    page = site["page_of"](PAGES["docs/loss.md"], "docs/loss.md")
    cells = re.findall(r"^\| (.*?) \| ", page.partition("\n| call |")[2].partition("\n\n")[0], re.MULTILINE)
    assert len(cells) > 20
    for cell in cells:
        for name in re.findall(r"`([\w.]+)", cell):
            assert re.search(rf"\[`{name}[(`].*?\]\(reference\.md#pce_mpi\.{name}\)", cell)
    assert "`cross_entropy` |" in site["page_of"]("| torch 2.13.0, `cross_entropy` |", "docs/gallery.md")


def test_examples_page_begins_with_picture_and_links_all(site):
    page = site["page_of"](PAGES["docs/examples.md"], "docs/examples.md")
    assert re.match(r"# Examples\n\n!\[.*\]\(\w+\.svg\)\n", page)
    programs = {target for source, target in site["PAGES"].items() if source.startswith("examples/")}
    assert set(re.findall(r"\]\((examples/\w+\.md)\)", page)) == programs


def test_copy_button_takes_commands_alone():
    """It takes what the browser shows meanwhile, and the site's style hides prompts and lines of outputs."""
    assert "[data-md-copying] :is(.gp, :has(> .go)) {\n  display: none;\n}" in (ROOT / "docs/site.css").read_text()
    assert "pymdownx.highlight:\n      line_spans: __span\n" in (ROOT / "mkdocs.yml").read_text()
    lexer = get_lexer_by_name("console")
    for text in [text for blocks in BLOCKS.values() for language, text in blocks if language == "console"]:
        shown = [word for kind, word in pygments.lex(text, lexer) if kind not in (Generic.Prompt, Generic.Output)]
        commands = [line.removeprefix("$ ") for line in text.splitlines(keepends=True) if line.startswith("$ ")]
        assert "".join(shown) == "".join(commands)


def test_changelog_begins_with_this_version():
    assert re.findall(r"^## (\S+)", PAGES["CHANGELOG.md"], re.MULTILINE)[0] == pce_mpi.__version__


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        (".ci/recipe.yaml", r'^  version: "(\S+)"$'),
        ("docs/conformance.md", r"uses: OWNER/pce_mpi@v(\S+)$"),
    ],
)
def test_file_names_this_version(name, form):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(form, text, re.MULTILINE) == [pce_mpi.__version__]


def test_workflows_call_targets_and_test_versions_of_classifiers():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").iterdir()]
    called = re.findall(r"(?:run: make |target: \[)([a-z, -]+)", "".join(texts))
    targets = {target for words in called for target in words.split(", ") if target}
    assert {"test", "test-openmpi", "check", "dist", "wheels"} <= targets <= set(TARGETS)
    classified = re.findall(r"Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    (tested,) = re.findall(r"python: (\[.*\])", "".join(texts))
    assert json.loads(tested) == classified
