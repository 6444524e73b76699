"""Vectors: read as their own page explains, without the kit, and results of every quality judged by them."""

import inspect
import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pce_mpi import dense
from pce_mpi.conformance import cases, judging
from pce_mpi.conformance.candidates.offers import EVERYTHING
from pce_mpi.conformance.judging.outcomes import Verdict
from pce_mpi.conformance.offline import vectors

# A few of each kind: every dtype, weights, upstream gradients, probabilities, other axes, nan, refusals, no rows.
PATTERNS = [
    "random-logits",
    "weight",
    "upstream",
    "probabilities",
    "axis",
    "nan",
    "target-out-of-range",
    "zero-rows",
    "uneven-shards",
    "masked-target*",
]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors")
    assert vectors.export(path, ranks=(1, 3), pattern=PATTERNS) == len(entries(path)) > 20
    return path


def entries(folder):
    return json.loads((folder / "index.json").read_text())["vectors"]


def read(path):
    """Read a file as the page explains, without safetensors or ml_dtypes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, start = json.loads(data[8 : 8 + length]), 8 + length
    found = {}
    for name, tensor in header.items():
        content = data[start + tensor["data_offsets"][0] : start + tensor["data_offsets"][1]]
        if tensor["dtype"] == "BF16":
            array = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(content, DTYPES[tensor["dtype"]])
        found[name] = array.reshape(tensor["shape"])
    return found


def right_results(folder):
    """Write the results of a perfect implementation: the exact values, rounded once."""
    results = {}
    for entry in entries(folder):
        name, tensors = entry["name"], read(folder / entry["file"])
        if entry["expects"] == "a refusal":
            results[f"{name}/refused"] = np.ones(1, np.uint8)
            continue
        dtype = np.dtype(ml_dtypes.bfloat16 if entry["dtype"] == "bfloat16" else entry["dtype"])
        results[f"{name}/loss"] = tensors["expected_loss"].astype("f8" if dtype == np.float64 else "f4")
        results[f"{name}/dlogits"] = tensors["expected_dlogits"].astype(dtype)
    return results


@pytest.fixture
def judged(folder, tmp_path):
    """Judge results; return the report, and its outcomes by name."""

    def judge(results, **options):
        save_file({name: np.array(array, order="C") for name, array in results.items()}, tmp_path / "results")
        report = vectors.judged(folder, tmp_path / "results", **options)
        return report, {outcome.case: outcome for outcome in report.outcomes}

    return judge


def test_vector_suffices_to_compute_its_answer(folder):
    for entry in entries(folder):
        tensors = read(folder / entry["file"])
        arguments = {**entry["options"], "axis": entry["axis"], "reduction": entry["reduction"]}
        arguments |= {name: tensors[name] for name in ("weight",) if name in tensors}
        if entry["expects"] == "a refusal":
            with pytest.raises(IndexError):
                dense.softmax_cross_entropy(tensors["logits"], tensors["targets"], **arguments)
            assert "expected_loss" not in tensors
            continue
        loss, dlogits = dense.softmax_cross_entropy_value_and_grad(tensors["logits"], tensors["targets"], **arguments)
        dloss = tensors.get("dloss", np.ones(())).astype(np.float64)
        dlogits = dlogits * (np.expand_dims(dloss, entry["axis"]) if dloss.ndim else dloss)
        np.testing.assert_array_equal(tensors["expected_loss"], loss)
        np.testing.assert_array_equal(tensors["expected_dlogits"], dlogits)


def test_index_lists_every_file_and_split(folder):
    listed = {entry["file"] for entry in entries(folder)}
    assert listed == {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}
    for entry in entries(folder):
        splits, logits = entry["splits"], read(folder / entry["file"])["logits"]
        assert len(splits) - 1 == int(re.search(r"/(\d)-ranks$", entry["name"])[1])
        assert splits == sorted(splits) and (splits[0], splits[-1]) == (0, logits.shape[entry["axis"]])


def test_page_explains_every_field_and_tensor(folder):
    page = (folder / "README.md").read_text()
    for entry in entries(folder):
        for word in (*entry, *entry["options"], *read(folder / entry["file"])):
            assert f"`{word}`" in page
    assert inspect.cleandoc(judging.__doc__) in page


@pytest.mark.parametrize("strict", [False, True])
def test_best_possible_results_pass(folder, judged, strict):
    report, outcomes = judged(right_results(folder), strict=strict)
    assert report.failed == []
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.PASS}
    assert list(outcomes) == [entry["name"] for entry in entries(folder)]


def test_tolerance_changes_what_passes(folder, judged):
    results, name = right_results(folder), "random-logits/float32/1-ranks"
    results[f"{name}/loss"] *= np.float32(1 + 2**-20)  # 8 to 16 ulp
    (failure,) = judged(results, tolerance=0.3)[0].failed
    assert failure.case == name
    assert "--tolerance 0.3" in failure.rerun
    assert judged(results, tolerance=10.0)[0].failed == []


def test_missing_results_are_not_offered(folder, judged):
    results = right_results(folder)
    del results["random-logits/float32/1-ranks/loss"], results["upstream/scalar/1-ranks/dlogits"]
    del results["random-logits/float64/1-ranks/dlogits"]
    report, outcomes = judged(results)
    assert report.failed == []
    missing = {name for name, outcome in outcomes.items() if outcome.verdict is Verdict.NOT_OFFERED}
    # Random logits are judged without a gradient too.
    assert missing == {"random-logits/float32/1-ranks", "upstream/scalar/1-ranks"}


def test_refusals_pass_only_if_expected(folder, judged):
    results = right_results(folder)
    refused = next(name for name in results if name.endswith("/refused"))
    due = refused.removesuffix("/refused")
    results[f"{due}/loss"] = results.pop(refused).astype(np.float32)
    answered = "random-logits/float32/1-ranks"
    del results[f"{answered}/loss"], results[f"{answered}/dlogits"]
    results[f"{answered}/refused"] = np.ones(0, np.uint8)
    report, outcomes = judged(results)
    assert {outcome.case: outcome.verdict for outcome in report.failed} == {
        due: Verdict.FAIL,
        answered: Verdict.REFUSED,
    }
    assert "a refusal was due" in outcomes[due].findings[0].text


def test_results_of_unknown_vector_raise(folder, judged):
    with pytest.raises(ValueError, match="'random/loss', which is the result of no vector"):
        judged(right_results(folder) | {"random/loss": np.zeros(())})


@pytest.fixture
def one(tmp_path):
    """A folder of one vector, its results, and what changes the tensors of the vector."""
    vectors.export(tmp_path, ranks=(1,), pattern="random-logits/float32")
    save_file(right_results(tmp_path), tmp_path / "results")
    (entry,) = entries(tmp_path)

    def change(**tensors):
        kept = {name: np.array(each) for name, each in read(tmp_path / entry["file"]).items()} | tensors
        save_file({name: each for name, each in kept.items() if each is not None}, tmp_path / entry["file"])

    return tmp_path, change


def test_files_count_rather_than_the_seed(one):
    folder, change = one
    assert vectors.judged(folder, folder / "results").failed == []
    change(logits=-read(folder / entries(folder)[0]["file"])["logits"])
    assert len(vectors.judged(folder, folder / "results").failed) == 1


@pytest.mark.parametrize(
    ("key", "array", "words"),
    [
        ("loss", np.zeros((), np.int64), "int64"),
        ("loss", np.zeros(5, np.float32), "(5,)"),
        ("dlogits", np.zeros((2, 2), np.float32), "(2, 2)"),
        ("dlogits", np.zeros((6, 24), np.float64), "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_array_of_wrong_shape_or_dtype_is_named(folder, judged, key, array, words):
    name = "random-logits/float32/3-ranks"
    (failure,) = judged(right_results(folder) | {f"{name}/{key}": array})[0].failed
    assert (failure.case, failure.verdict) == (name, Verdict.FAIL)
    assert any(words in finding.text for finding in failure.findings)


def test_what_is_no_file_of_vectors_raises(one):
    folder, _ = one
    for path in ("results", entries(folder)[0]["file"]):
        content = (folder / path).read_bytes()
        (folder / path).write_text("not at all")
        with pytest.raises(ValueError, match="not a safetensors file"):
            vectors.judged(folder, folder / "results")
        (folder / path).unlink()
        with pytest.raises(FileNotFoundError):
            vectors.judged(folder, folder / "results")
        (folder / path).write_bytes(content)
    save_file({"n" * 100_000: np.zeros(())}, folder / "results")
    with pytest.raises(ValueError, match="is the result of no vector") as raised:
        vectors.judged(folder, folder / "results")
    assert len(str(raised.value)) < 1000


WRONG_INDEX = [
    *({"version": 1}, {"format": "another"}, {"seed": None}, {"vectors": {}}, {"vectors": [3]}),
    *({"vectors": [{field: value}]} for field, value in (("name", None), ("expects", "an error"), ("splits", 24))),
    *({"vectors": [{field: value}]} for field, value in (("axis", "1"), ("options", []), ("gradient", 1), ("bits", 1))),
    *({"vectors": [{"options": each}]} for each in ({"n" * 100_000: 1}, {"label_smoothing": 2}, {"z_loss": "a"})),
    *({"vectors": [{field: value}]} for field, value in (("dtype", "float64"), ("axis", 2), ("reduction", "average"))),
    *({"vectors": [{"splits": each}]} for each in ([], [0, 23])),
]


@pytest.mark.parametrize("wrong", WRONG_INDEX, ids=lambda each: str(each)[:40])
def test_malformed_index_is_a_short_value_error(one, wrong):
    folder, _ = one
    index = json.loads((folder / "index.json").read_text())
    if isinstance(wrong.get("vectors"), list) and isinstance(wrong["vectors"][0], dict):
        wrong = {"vectors": [index["vectors"][0] | wrong["vectors"][0]]}
    (folder / "index.json").write_text(json.dumps(index | wrong))
    with pytest.raises(ValueError, match=re.escape(str(folder))) as raised:
        vectors.judged(folder, folder / "results")
    assert len(str(raised.value)) < 1000 + len(str(folder))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"targets": None, "logits": None}, "no logits and no targets"),
        ({"logits": np.zeros((6, 0), np.float32)}, "0 classes"),
        ({"logits": np.zeros((6, 24))}, "the index says 24 classes in float32"),
        ({"targets": np.zeros(5, np.int64)}, "(5,)"),
        ({"targets": np.full(6, 24)}, "outside [0, 24)"),
        ({"weight": np.zeros(6)}, "weight"),
        ({"dloss": np.zeros(5)}, "(5,"),
        ({"may_be_nan": np.zeros(5, np.bool_)}, "is no problem"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_tensors_of_no_problem_raise(one, tensors, words):
    folder, change = one
    change(**tensors)
    with pytest.raises(ValueError, match=re.escape(words)):
        vectors.judged(folder, folder / "results")


def test_export_has_only_cases_about_numbers(tmp_path):
    quick = [case.name for case in cases(EVERYTHING) if case.dtype == "float32" and case.rows * case.classes < 10_000]
    vectors.export(tmp_path, ranks=[2], pattern=quick)
    exported = {entry["name"].removesuffix("/2-ranks") for entry in entries(tmp_path)}
    left_out = {name.partition("/")[0] for name in set(quick) - exported}
    assert left_out == {
        "backward-twice",
        "gathered-logits",
        "inputs-unmodified",
        "one-after-the-other",
        "padded-columns",
        "result-form",
        "results-not-aliased",
        "rows-sharded",
        "same-in-every-run",
        "same-on-every-rank",
        "strides",
        "targets",
        "two-losses-alive",
        "upstream",
    }


def test_export_of_unknown_pattern_raises(tmp_path):
    with pytest.raises(ValueError, match="no case is called 'nothing'"):
        vectors.export(tmp_path, pattern="nothing")
