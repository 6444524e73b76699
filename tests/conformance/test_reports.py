"""The reports of the conformance kit, for a run that is written out here."""

import base64
from collections import Counter
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
import io
import json
import math
import re
import sys
from xml.etree import ElementTree

from matplotlib.image import imread
import pytest

from jobs.launch import complete
from pce_mpi.cli.conformance import _Display
from pce_mpi.conformance.candidates.catalogue import cases, catalogue
from pce_mpi.conformance.candidates.fitting import unmet_need
from pce_mpi.conformance.candidates.offers import EVERYTHING, Offer
from pce_mpi.conformance.judging.outcomes import Accuracy, ErrorMap, Finding, Outcome, Report, Verdict
from pce_mpi.conformance.problems.cases import About
from pce_mpi.conformance.reports import html, json_file, junit, markdown, terminal

# Text that would break the page, the table or the terminal, if it were not escaped.
HOSTILE = "</p><script>alert(1)</script> *not* _this_ | `that` $x$ & more"
LAST_WORDS = "[rank 2] \x1b[31mfree(): invalid\x00 pointer\x1b[0m\n[rank 2] <Aborted>"
RERUN = "python -m pce_mpi conformance -n 3 losses:sharded --case 'p(target)*' --rows 2 --classes 6"
SPLITS = (0, 3, 3, 8)
# Rank 0 is right, rank 1 has no classes, rank 2 errs.
ERRORS = [[0.0, 0.5, 0.01, 0.0, 30.0, 0.2, 0.0, 0.0], [0.0, 0.0, 0.9, 2.0, math.inf, 0.0, 0.0, 0.0]]


def outcome(case, verdict, *findings, catches="something", **fields):
    return Outcome(case, catches, verdict, [Finding(kind, text) for kind, text in findings], **fields)


def report(*outcomes, candidate="losses:sharded"):
    offer = Offer(dtypes=("float32", "bfloat16"), options=("weight",), reductions=("mean", "none"))
    return Report(candidate, offer, (3,), {"python": "3.12.3", "numpy": "2.4.6"}, 7, False, 1.0, list(outcomes))


SIZE = {"rows": 2, "classes": 8, "ranks": 3, "splits": SPLITS, "dtype": "float32", "seconds": 0.25}
PASS = outcome(
    "random/float32", Verdict.PASS, **SIZE, accuracies=[Accuracy("loss", "float32", 1.25, 0.5, 16.0, "row 0")]
)
FAIL = outcome(
    "smoothing/float32",
    Verdict.FAIL,
    ("loss", "label smoothing is spread over the 3 local classes, not all 8"),
    ("gradient", "the gradient is wrong on rank 2 only"),
    catches="smoothing over the local classes",
    **SIZE,
    accuracies=[
        Accuracy("loss", "float32", 4321.0, 0.5, 16.0, "row 1"),
        Accuracy("gradient", "float32", math.inf, 0.4, 16.0, "row 1, class 4 (rank 2)"),
    ],
    picture=ErrorMap(ERRORS, [float(split) for split in SPLITS], 2, 8, [(0, 4), (1, 3)]),
    rerun=RERUN,
)
REFUSED = outcome("weight/none", Verdict.REFUSED, ("raised", f"raised ValueError: {HOSTILE}"), **SIZE, rerun=RERUN)
CRASHED = outcome(
    "nan/row", Verdict.CRASHED, ("crashed", "rank 2 died of SIGABRT"), ("crashed", LAST_WORDS), rerun=RERUN
)
DEADLOCKED = outcome("empty-shard/one", Verdict.DEADLOCKED, ("deadlocked", "ranks 1, 3 never returned"), rerun=RERUN)
NOT_OFFERED = outcome("smoothing/float64", Verdict.NOT_OFFERED, note="float64")
KNOWN = outcome("mean/known", Verdict.KNOWN, ("loss", "off"), **SIZE, note="FAIL: off")
ALL = report(PASS, FAIL, REFUSED, CRASHED, DEADLOCKED, NOT_OFFERED, KNOWN)


def row_of(text, start):
    """Return the words of the line that begins with `start`."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.split()


def test_terminal_ends_with_the_number_of_cases():
    assert (
        terminal.render(ALL).splitlines()[-1]
        == "4 of 5 cases failed (1 FAIL, 1 refused, 1 crashed, 1 deadlocked); 1 not offered; 1 known to fail"
    )


def test_terminal_begins_with_causes():
    assert terminal.render(ALL).startswith("FAIL smoothing/float32\n")


def test_open_contracts_of_right_numbers_are_last_line():
    words = (
        "1 is outside [0, 1), and no rank refused it; where that is meant, declare it: @offers(checks_targets=False)"
    )
    case = partial(outcome, "target/far", Verdict.FAIL, ("not refused", words), about=About.CONTRACT)
    right = terminal.render(report(PASS, PASS, case(), case(), NOT_OFFERED))
    assert right.splitlines()[-2:] == [
        "2 of 4 cases failed (2 FAIL); 1 not offered",
        "2 of 2 numbers right; 2 contracts open: declare checks_targets=False",
    ]
    assert "contracts open" not in terminal.render(report(PASS, FAIL, case()))


def test_terminal_has_cause_shape_and_command_of_failure():
    lines = terminal.render(ALL).splitlines()
    at = lines.index("FAIL smoothing/float32")
    assert lines[at + 1 : at + 4] == [
        "  label smoothing is spread over the 3 local classes, not all 8 (also: gradient)",
        "  seen at: 2 rows, 8 classes, float32, on 3 ranks (3 + 0 + 5 classes)",
        f"  rerun: {RERUN}",
    ]
    assert "deadlocked empty-shard/one" in lines
    assert "  ranks 1, 3 never returned" in lines
    assert not any(line.startswith("pass random") for line in lines)


def test_unknown_shape_is_left_out():
    text = terminal.render(report(outcome("nan/row", Verdict.CRASHED, rows=6, classes=24, ranks=3)))
    assert "6 rows" not in text


def test_terminal_escapes_output_of_crashed_process():
    text = terminal.render(ALL)
    assert "  | [rank 2] free(): invalid\N{REPLACEMENT CHARACTER} pointer\n  | [rank 2] <Aborted>\n" in text
    assert "\x1b" not in text and "\x00" not in text


def test_terminal_has_worst_best_and_allowed_errors():
    text = terminal.render(ALL)
    loss = ["float32", "loss", "1.25", "4.3e+03", "0.5", "16", "smoothing/float32", "row", "1"]
    assert row_of(text, "float32  loss ") == loss
    # no case that passes has a gradient
    assert row_of(text, "float32  gradient ")[2:5] == ["inf", "0.4", "16"]


def test_largest_error_includes_passing_cases():
    near = outcome("mean", Verdict.PASS, accuracies=[Accuracy("loss", "float32", 17.5, 0.5, 18.6, "")])
    wrong = outcome("none", Verdict.FAIL, accuracies=[Accuracy("loss", "float32", 16.5, 0.5, 16.0, "row 1")])
    assert row_of(terminal.render(report(near, wrong)), "float32  loss ")[2:] == ["17.5", "17.5", "0.5", "18.6", "mean"]


def test_failures_are_grouped_by_cause():
    local = "label smoothing is spread over the {} local classes, not over all {} (loss is {} where 2 is right: 4 ulp)"
    hangs = "deadlocked in case {}: rank 3 never returned"
    numbers = outcome("z/float32", Verdict.FAIL, ("gradient", "gradient is 1 where 2 is right in row 3: 9 ulp"))
    given = report(
        PASS,
        numbers,
        outcome("smoothing/float32", Verdict.FAIL, ("loss", local.format(6, 24, 4.1))),
        outcome("pair/smoothing", Verdict.FAIL, ("loss", local.format(64, 256, 0.7))),
        outcome("empty/one", Verdict.DEADLOCKED, ("deadlocked", hangs.format("empty/one"))),
        outcome("one-class", Verdict.DEADLOCKED, ("deadlocked", hangs.format("one-class"))),
    )
    shown = """\
FAIL smoothing/float32, pair/smoothing
  label smoothing is spread over the 6 local classes, not over all 24 (loss is 4.1 where 2 is right: 4 ulp)

deadlocked empty/one, one-class
  deadlocked in case empty/one: rank 3 never returned

FAIL z/float32
  gradient is 1 where 2 is right in row 3: 9 ulp

"""
    assert shown in terminal.render(given)
    assert Page(html.render(given)).tags["article"] == 3


def test_cases_of_several_sizes_name_the_ranks():
    given = report(FAIL, replace(FAIL, ranks=2))
    given.ranks = (2, 3)
    assert "FAIL smoothing/float32 on 3 ranks, smoothing/float32 on 2 ranks" in terminal.render(given)
    assert "ranks      2, 3" in terminal.render(given)
    assert "<code>smoothing/float32 on 3 ranks</code> <code>smoothing/float32 on 2 ranks</code>" in html.render(given)
    names = [case.get("name") for case in ElementTree.fromstring(junit.render(given)).iter("testcase")]
    assert names == ["smoothing/float32 on 3 ranks", "smoothing/float32 on 2 ranks"]


def test_most_harmful_cause_comes_first():
    contracts = [
        outcome(f"target-out-of-range/{which}", Verdict.FAIL, ("not refused", "no rank refused it"), about="contracts")
        for which in ("far", "negative", "one-too-many")
    ]
    special = outcome("masked-row", Verdict.FAIL, ("loss", "nan is lost"), about="special values")
    everywhere = [
        replace(FAIL, case="result-form/mean", about="contracts"),
        replace(FAIL, picture=replace(FAIL.picture, errors=[[1e9] * 8] * 2)),
    ]
    given = report(*contracts, special, *everywhere)
    text = terminal.render(given)
    assert re.findall(r"^FAIL (\S+?),?$|^FAIL (\S+),", text, re.MULTILINE) == [
        ("", "result-form/mean"),
        ("masked-row", ""),
        ("", "target-out-of-range/far"),
    ]
    page = html.render(given)
    places = [page.index(f"<code>{each.case}</code>") for each in (*everywhere, special, *contracts)]
    fold, end = page.index("<details>\n<summary><strong>Contracts"), page.index("How accurate")
    assert places == sorted(places) and places[2] < fold < places[3] < page.index("</details>", places[-1]) < end
    assert end < page.index("All cases")
    Page(page)
    assert "<details open>\n<summary><strong>Contracts" in html.render(report(*contracts))


def test_hint_without_declaration_names_offers():
    for offer, words in ((Offer(options=("weight",)), True), (Offer(dtypes=("float32", "float64")), False)):
        for given in (report(PASS, replace(NOT_OFFERED, case="random-logits/float64")), report(PASS)):
            given.offer = offer
            hinted = words and len(given.outcomes) > 1
            for render in (terminal.render, markdown.render, html.render):
                assert ("left out: the signature tells the option weight, and" in render(given)) == hinted


def test_hint_names_dtypes_beside_other_declarations():
    given = report(PASS, replace(NOT_OFFERED, case="random-logits/bfloat16"))
    given.offer = Offer(dims=(3,))
    assert 'All logits were float32: @offers(dtypes=("float32", "bfloat16")) adds' in terminal.render(given)
    given.offer = Offer(dims=(3,), dtypes=("bfloat16",))
    assert "All logits were" not in terminal.render(given)


@pytest.mark.parametrize(
    ("strict", "factor", "said"),
    [(False, 1.0, "usual"), (True, 1.0, "strict"), (False, 2.5, "usual, times 2.5"), (True, 0.5, "strict, times 0.5")],
)
def test_tolerance_is_told_in_words(strict, factor, said):
    given = replace(report(PASS), strict=strict, tolerance=factor)
    assert f"\ntolerance  {said}\n" in terminal.render(given)


def test_progress_tells_verdicts_so_far(capsys):
    display = _Display()
    display.begin(20)
    for number in range(20):
        display.finished(replace(PASS if number % 4 else NOT_OFFERED, case=f"case-{number}"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("conformance 2/20  1 not offered, 1 pass")
    assert lines[-1].startswith("conformance 20/20  5 not offered, 15 pass")


def test_hint_has_three_declarations_that_open_most_cases():
    given = Report("losses:sharded", offer := Offer(options=("weight",)), (3,), {}, 0, False, 1.0)
    for case in catalogue(EVERYTHING):
        lacking = unmet_need(offer, case.needs, case.dtype)
        given.outcomes.append(outcome(case.name, Verdict.NOT_OFFERED if lacking else Verdict.PASS, note=lacking or ""))
    found = re.findall(r"@offers\((.*?)\) opens (\d+) cases?[,.]", " ".join(terminal.render(given).split()))
    declared = eval(f"dict({', '.join(declaration for declaration, _ in found)})")
    assert list(declared) == ["options", "dtypes", "probabilities"]
    opened = offer
    for (_, count), (name, value) in zip(found, declared.items(), strict=True):
        before, opened = opened, replace(opened, **{name: value})
        assert len(cases(opened)) > len(cases(before)) and int(count) > 5


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ([PASS, KNOWN], "1 case passed; 1 known to fail"),
        ([PASS, NOT_OFFERED], "1 case passed; 1 not offered"),
        ([NOT_OFFERED], "no case was run; 1 not offered"),
        ([], "no case was run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_run_without_failures_renders_in_every_form(outcomes, sentence):
    quiet = report(*outcomes)
    assert terminal.render(quiet).endswith(f"{sentence}\n")
    assert sentence in markdown.render(quiet)
    assert f">{sentence}<" in html.render(quiet)
    assert ElementTree.fromstring(junit.render(quiet)).get("tests") == str(len(outcomes))
    assert json.loads(json_file.render(quiet))["failed"] is False


class Page(HTMLParser):
    """Reads a page and fails if tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.ids, self.links, self.words = Counter(), [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags[tag] += 1
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_complete_and_loads_nothing():
    other = replace(FAIL, findings=[Finding("gradient", "the gradient is wrong on rank 2 only")])
    text = html.render(report(FAIL, other, CRASHED))
    page = Page(text)
    assert page.tags["svg"] == 2
    assert page.links and all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text and not page.tags.keys() & {"script", "link", "img", "iframe"}
    assert len(page.ids) == len(set(page.ids))


def test_page_escapes_output_of_candidate():
    text = html.render(report(REFUSED, CRASHED, candidate=HOSTILE))
    page = Page(text)
    assert page.tags["script"] == 0
    shown = "".join(page.words)
    assert shown.count(HOSTILE) >= 3
    assert "[rank 2] <Aborted>" in shown and "\x1b" not in text


def test_page_has_all_findings():
    shown = " ".join("".join(Page(html.render(ALL)).words).split())
    for finding in FAIL.findings:
        assert finding.text in shown
    for text in (FAIL.catches, RERUN, "2 rows, 8 classes, float32, on 3 ranks (3 + 0 + 5 classes)", "not supported"):
        assert text in shown
    assert "Errors are in ulps" in shown  # `judging` says so of them
    assert all(each.case in shown for each in ALL.outcomes)


def test_page_and_pictures_have_dark_and_light_colors():
    text = html.render(ALL)
    assert "prefers-color-scheme: dark" in text
    picture = text[text.index("<svg") : text.index("</svg>")]
    assert "currentColor" in picture
    assert not re.search(r"(fill|stroke): ?#(000000|ffffff|010203)", picture)


def test_picture_has_colored_pixel_for_each_error():
    picture = html.drawn(FAIL.picture, "picture")
    images = re.findall(r"data:image/png;base64,([^\"]*)", picture)
    decoded = [imread(io.BytesIO(base64.b64decode(each))) for each in images]
    image = next(each for each in decoded if each.shape[:2] == (2, 8))
    red, _, blue, opacity = image[..., 0], image[..., 1], image[..., 2], image[..., 3]
    # The order of the rows in the file depends on the image's origin; that of the columns does not.
    wrong = {(row, column) for row in range(2) for column in range(8) if red[row, column] > blue[row, column] > 0}
    assert {column for _, column in wrong} == {3, 4}
    assert (opacity[:, [0, 5, 6, 7]] < 0.6).all()


def test_picture_shows_the_sign_of_errors():
    picture = html.drawn(ErrorMap([[50.0, -50.0, 0.5]], [0.0, 3.0], 1, 3, []), "picture")
    images = re.findall(r"data:image/png;base64,([^\"]*)", picture)
    image = next(each for each in (imread(io.BytesIO(base64.b64decode(one))) for one in images) if each.shape[1] == 3)
    red, blue = image[0, :, 0], image[0, :, 2]
    assert red[0] > blue[0] and red[1] < blue[1] and abs(red[2] - blue[2]) < 0.2


@pytest.mark.parametrize("largest", [3.0, 1e3, 1e9])
def test_scale_of_picture_ends_at_largest_error(largest):
    root = ElementTree.fromstring(html.drawn(ErrorMap([[largest, -1.0, 0.0]], [0.0, 3.0], 1, 3, []), "picture"))
    ticks = [float(word.replace("\N{MINUS SIGN}", "-")) for word in words_in(root) if re.fullmatch(r"[-\d.e+]+", word)]
    assert max(ticks) == max(largest, 10.0)


def test_pass_and_fail_differ_by_more_than_color():
    style = html.render(ALL).partition("</style>")[0]
    signs = dict(re.findall(r"\.(pass|FAIL)(?=[:,]).*?content: \"(\S+)\"", style))
    assert len(set(signs.values())) == 2


def words_in(root):
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_picture_names_ranks_and_marks_targets():
    root = ElementTree.fromstring(html.drawn(FAIL.picture, "picture"))
    words = words_in(root)
    assert "rank 0" in words and "rank 2" in words and "rank 1" not in words
    groups = {each.get("id"): each for each in root.iter("{http://www.w3.org/2000/svg}g")}
    targets = next(group for name, group in groups.items() if name and "PathCollection" in name)
    assert len(list(targets.iter("{http://www.w3.org/2000/svg}use"))) == len(FAIL.picture.targets)


def test_picture_has_title_and_labels():
    words = words_in(ElementTree.fromstring(html.drawn(FAIL.picture, "picture")))
    legend = ["border of two shards", "target of the row"]
    for text in ["Error of the gradient, in units of what is allowed", "class", "row", "error / allowed", *legend]:
        assert words.count(text) == 1, text


def test_picture_of_one_row_numbers_it():
    root = ElementTree.fromstring(html.drawn(ErrorMap([[5.0, 1.0]], [0.0, 2.0], 1, 2, []), "picture"))
    words = words_in(root)
    assert [word for word in words if "." in word] == []


@pytest.mark.parametrize("errors", [[[5.0]], [[0.0]], [[math.nan, math.inf]]], ids=str)
def test_smallest_pictures_can_be_drawn(errors):
    picture = ErrorMap(errors, [0.0, float(len(errors[0]))], 1, len(errors[0]), [])
    assert html.drawn(picture, "picture").startswith("<svg")


def test_junit_distinguishes_failures_errors_and_skipped():
    suites = ElementTree.fromstring(junit.render(ALL))
    (suite,) = suites
    for element in (suites, suite):
        assert [element.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["7", "2", "2", "2"]
    kinds = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert kinds == {
        "random/float32": [],
        "smoothing/float32": ["failure"],
        "weight/none": ["failure"],
        "nan/row": ["error"],
        "empty-shard/one": ["error"],
        "smoothing/float64": ["skipped"],
        "mean/known": ["skipped"],
    }
    failure = suite.find(".//failure")
    assert failure.get("message") == "label smoothing is spread over the 3 local classes, not all 8 (also: gradient)"
    assert failure.get("type") == "FAIL"
    assert "rerun: " + RERUN in failure.text and FAIL.findings[1].text in failure.text
    assert suite.find(".//skipped").get("message") == "not offered: float64"
    assert "free(): invalid" in suite.find(".//error").text


def test_json_report_is_read_back_unchanged():
    text = json_file.render(ALL)
    assert json_file.parse(text) == ALL


@pytest.mark.parametrize("form", [terminal, html, markdown, junit, json_file], ids=lambda form: form.__name__)
def test_case_that_was_not_run_is_no_failure(form):
    unrun = outcome("weight/none", Verdict.NOT_RUN, note="not run, as the first 3 cases ended alike")
    run = report(FAIL, unrun)
    assert run.failed == [FAIL]
    assert "not run" in form.render(run)


def test_json_has_version_and_only_finite_numbers():
    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads(json_file.render(ALL), parse_constant=refuse)
    assert (content["format"], content["version"]) == ("pce_mpi conformance report", 2)
    assert content["failed"] is True
    assert content["counts"] == {verdict: int(verdict not in ("slow", "not run")) for verdict in Verdict}
    documented = set(re.findall(r"^    (\w+(?:, \w+)*)", json_file.__doc__, re.MULTILINE))
    assert {name for names in documented for name in names.split(", ")} == content.keys()


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "pce_mpi conformance report", "version": 1}'])
def test_json_of_something_else_raises(text):
    with pytest.raises(ValueError, match="report"):
        json_file.parse(text)


def test_only_the_page_needs_more_packages():
    program = """
import sys
for name in ("jinja2", "matplotlib", "markupsafe", "safetensors", "mpi4py.MPI"):
    sys.modules[name] = None
import pce_mpi.conformance.offline.vectors
from pce_mpi.conformance.reports import json_file, junit, markdown, terminal
try:
    from pce_mpi.conformance.reports import html
except ImportError as error:
    print(error.name)
"""
    done = complete([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "jinja2\n"), done.stderr
    with_all = "import sys, pce_mpi.conformance.reports.html; print('mpi4py.MPI' in sys.modules)"
    done = complete([sys.executable, "-c", with_all])
    assert done.stdout == "False\n", done.stderr


def test_report_of_interrupted_run_says_so():
    stopped = report(PASS)
    stopped.interrupted = True
    assert json_file.parse(json_file.render(stopped)).interrupted
    for form in (terminal, html, markdown):
        assert "interrupted before the last case" in form.render(stopped)


def test_markdown_has_the_text_below_a_heading():
    given = report(PASS, FAIL, REFUSED, CRASHED, candidate=HOSTILE)
    text = markdown.render(given)
    heading, _, rest = text.partition("\n\n<")
    _, block, end = rest.split("```")
    assert heading.startswith("### \N{CROSS MARK} Conformance of <code>")
    assert "<script>" not in heading and r"\*not\*" in heading and r"\_this\_" in heading
    assert (block, end) == (
        "text\n" + terminal.render(given),
        "\n\n</details>\n",
    )
    assert markdown.render(report(PASS)).startswith("### \N{WHITE HEAVY CHECK MARK} ")
    assert markdown.render(report(PASS, candidate="```` x")).count("`````") == 2


def test_list_has_a_line_for_each_case():
    found = cases(pattern=["random-logits", "zero-rows"])
    text = terminal.listing(found, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == [case.name for case in found]
    assert " ".join(text.split()).count(found[0].catches) == 1
    lines = terminal.listing(found, Offer(reductions=("mean",))).splitlines()
    offered = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if not line.startswith(" ")}
    assert offered["random-logits/float32"] == offered["zero-rows/mean"] == "offered"
    assert offered["random-logits/float64"] == "not offered: float64"
    assert offered["zero-rows/sum"] == "not offered: reduction sum"


def test_list_says_which_cases_compare_bits():
    found = cases(pattern=["random-logits/float32", "target-out-of-range/far", "gathered-logits"])
    lines = terminal.listing(found, Offer(same_bits=True)).splitlines()
    offered = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if not line.startswith(" ")}
    assert offered["random-logits/float32"] == "offered, to the bits of one rank"
    assert offered["target-out-of-range/far"] == offered["gathered-logits"] == "offered"
