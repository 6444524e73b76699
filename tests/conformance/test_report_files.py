"""A report reaches its readers: whatever it holds, and although one of its files cannot be written."""

import json
import os
import shlex
import signal
import stat
from xml.etree import ElementTree

import pytest

from conformance.command import CONFORMANCE, conformance
from conformance.test_reports import FAIL, PASS, outcome, report
from jobs.launch import complete
from pce_mpi.cli import main
from pce_mpi.conformance.judging.outcomes import Finding, Verdict
from pce_mpi.conformance.reports import json_file
from pce_mpi.conformance.text import error_text
from pce_mpi.temporary_files import replace_file

SURROGATE = outcome("nan/row", Verdict.REFUSED, ("raised", "ValueError: half a pair \udcff \x1b]0;title\x07 \x9b2J"))
SENTENCE = "2 of 3 cases failed"


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """A report on file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "earlier").write_text(json.dumps(json.loads(json_file.render(report(PASS, FAIL, SURROGATE)))))
    return tmp_path


def status_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *map(str, arguments)])
    return ended.value.code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("path", ["/dev/full", "/proc/none.html"])
def test_file_that_cannot_be_written_is_said(earlier, path, capsys):
    assert status_of("--report", "earlier", "--html", path, "--junit", "junit.xml") == 2
    printed = capsys.readouterr()
    assert SENTENCE in printed.out
    assert f"error: the report could not be written to {path}: " in printed.err
    assert len(ElementTree.parse("junit.xml").getroot()[0].findall("testcase")) == 3


def test_renderer_that_raises_loses_no_other_file(earlier, monkeypatch, capsys):
    monkeypatch.setattr("pce_mpi.conformance.reports.html.render", lambda report: 1 / 0)
    assert status_of("--report", "earlier", "--html", "it.html", "--markdown", "it.md") == 2
    printed = capsys.readouterr()
    assert SENTENCE in printed.out and "it.html: ZeroDivisionError" in printed.err
    assert SENTENCE in (earlier / "it.md").read_text() and not (earlier / "it.html").exists()


def test_file_is_replaced_by_complete_ones_only(earlier):
    (earlier / "it.json").write_text("older")
    command = shlex.join([*CONFORMANCE, "--report", "earlier", "--json", "it.json"])
    run = complete(["sh", "-c", f"ulimit -f 1; export PYTHONDONTWRITEBYTECODE=1; exec {command}"], cwd=earlier)
    assert run.returncode == 2
    assert SENTENCE in run.stdout and "it.json: File too large" in run.stderr
    assert (earlier / "it.json").read_text() == "older"
    assert sorted(path.name for path in earlier.iterdir()) == ["earlier", "it.json"]


def test_text_that_cannot_be_encoded_is_escaped(earlier):
    written = [word for form in ("json", "html", "markdown", "junit") for word in (f"--{form}", f"it.{form}")]
    run = conformance("--report", "earlier", *written, folder=earlier, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert run.returncode == 1, run.stderr
    assert r"half a pair \udcff \ufffd]0;title" in run.stdout and SENTENCE in run.stdout
    texts = {form: (earlier / f"it.{form}").read_text(encoding="utf-8") for form in ("json", "html", "markdown")}
    assert json_file.parse(texts["json"]).outcomes[2] == SURROGATE
    assert r"half a pair \udcff" in texts["html"] and r"half a pair \udcff" in texts["markdown"]
    message = ElementTree.parse(earlier / "it.junit").find(".//testcase[last()]/failure").get("message")
    assert "half a pair \N{REPLACEMENT CHARACTER}" in message


def test_links_modes_and_pipes_stay(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("older")
    target.chmod(0o640)
    link.symlink_to(target)
    replace_file(link, "newer")
    assert link.is_symlink() and target.read_text() == "newer"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, "newer")
    assert os.read(reader, 10) == b"newer" and pipe.is_fifo()
    os.close(reader)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_full_standard_output_is_said(earlier):
    command = shlex.join([*CONFORMANCE, "--report", "earlier", "--json", "it.json"])
    run = complete(["sh", "-c", f"{command} > /dev/full"], cwd=earlier)
    assert run.returncode == 2
    assert run.stderr == "error: standard output: No space left on device\n"
    assert len(json_file.parse((earlier / "it.json").read_text()).outcomes) == 3
    run = complete(["sh", "-c", f"{shlex.join([*CONFORMANCE, '--list'])} > /dev/full"])
    assert (run.returncode, run.stderr) == (2, "error: standard output: No space left on device\n")


def test_unread_output_loses_no_file(earlier):
    command = shlex.join([*CONFORMANCE, "--report", "earlier", "--json", "it.json"])
    run = complete(["sh", "-c", f"({command}; echo $? > status) | true"], cwd=earlier)
    assert (run.returncode, run.stderr) == (0, "")
    assert int((earlier / "status").read_text()) == 128 + signal.SIGPIPE
    assert len(json_file.parse((earlier / "it.json").read_text()).outcomes) == 3


def test_long_texts_are_bounded():
    text = "y" * 5_000_000
    assert len(Finding("raised", text).text) < 21_000
    assert len(error_text(ValueError(text))) < 1100
    shown = Finding("raised", "begin" + text + "end").text
    assert shown.startswith("begin") and shown.endswith("end") and "characters ...]" in shown

    class Mute(Exception):
        def __str__(self):
            raise KeyError("no")

    assert error_text(Mute()) == "Mute: no text, as its __str__ raised KeyError"


CRASH = """
import os, signal
import pce_mpi as pce


def candidate(logits, targets, *, class_start, num_classes, comm, **options):
    if options:
        print("\\x1b]0;title\\x07" + "y" * 4_000_000)
        os.kill(os.getpid(), signal.SIGSEGV)
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)
"""


def test_output_of_crashed_candidate_is_bounded_and_escaped(tmp_path):
    (tmp_path / "it.py").write_text(CRASH)
    selection = ["--case", "random-logits/float32", "--case", "weight/float32"]
    run = conformance("-n", 1, "it.py:candidate", *selection, "--json", "it.json", "--html", "it.html", folder=tmp_path)
    assert run.returncode == 1, run.stderr
    outcomes = json_file.parse((tmp_path / "it.json").read_text()).outcomes
    assert [each.verdict for each in outcomes] == ["pass", "crashed"], outcomes[0].findings
    assert "yyyy [... " in outcomes[1].findings[1].text
    for text in (run.stdout, run.stderr):
        assert "died of SIGSEGV" in text and len(text) < 10_000 and "\x1b" not in text
    assert (tmp_path / "it.html").stat().st_size < 50_000
