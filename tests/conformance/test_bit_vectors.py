"""Vectors with bits: the same on any ranks as in the files, compared to the last one, and refused if they are old."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conformance.command import conformance
from pce_mpi.conformance.judging.outcomes import Verdict
from pce_mpi.conformance.offline import vectors

DIGESTS = Path(__file__).with_suffix(".json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bits")
    assert vectors.export_bits(path) == len(index(path)["vectors"]) > 200
    return path


def index(folder):
    return json.loads((folder / "index.json").read_text())


@pytest.fixture
def results(folder):
    """The results of all vectors, as a perfect implementation has them."""
    return {
        f"{entry['name']}/{name}": load_file(folder / entry["file"])[f"expected_{name}"]
        for entry in index(folder)["vectors"]
        for name in entry["bits"]
    }


def digest_of(arrays):
    """A digest of the bits, also of a nan's."""
    return hashlib.sha256(b"".join(np.array(array).tobytes() for array in arrays)).hexdigest()[:16]


def test_bits_of_vectors_are_the_committed_ones():
    digests = {entry.name: digest_of(tensors.values()) for entry, tensors in vectors.bit_vectors()}
    assert digests == json.loads(DIGESTS.read_text()), "if bits are to change: a new VERSION in elementary.py"


def test_right_bits_pass_and_one_wrong_fails(folder, results, tmp_path):
    wrong = results["float32/plain/ordinary/dlogits"]
    wrong[3, 17] = np.nextafter(wrong[3, 17], np.float32(1))
    results["float64/softcap/special/loss"][np.isnan(results["float64/softcap/special/loss"])] = -np.float64("nan")
    save_file(results, tmp_path / "results")
    report = vectors.judged(folder, tmp_path / "results")
    assert [outcome.case for outcome in report.failed] == ["float32/plain/ordinary"]
    (finding,) = report.failed[0].findings
    assert finding.text.startswith("dlogits at [3, 17]: 0x")
    assert finding.text.endswith("; 1 of 222 differ")


def test_vector_without_bits_is_not_offered(folder, results, tmp_path):
    save_file({"float32/plain/ties/loss": results["float32/plain/ties/loss"]}, tmp_path / "results")
    counts = vectors.judged(folder, tmp_path / "results").counts
    assert (counts[Verdict.PASS], counts[Verdict.FAIL]) == (1, 0)
    assert counts[Verdict.NOT_OFFERED] == len(index(folder)["vectors"]) - 1


def test_bits_of_other_arithmetic_are_refused(folder, results, tmp_path):
    save_file(results, tmp_path / "results")
    others = {2: "bits are those of arithmetic 2, and this package has arithmetic 3", None: "int is due, got NoneType"}
    for number, said in others.items():
        (tmp_path / "index.json").write_text(json.dumps(index(folder) | {"arithmetic": number}))
        with pytest.raises(ValueError, match=said):
            vectors.judged(tmp_path, tmp_path / "results")


def test_command_writes_and_compares_bits(folder, results, tmp_path):
    done = conformance("--export", str(tmp_path / "bits"), "--bits")
    assert (done.returncode, done.stdout) == (0, f"{len(index(folder)['vectors'])} vectors in {tmp_path / 'bits'}\n")
    save_file(results, tmp_path / "results")
    done = conformance("--vectors", str(tmp_path / "bits"), "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout
    results["float32/plain/ordinary/loss"] += np.float32(2.0**-20)
    save_file(results, tmp_path / "results")
    done = conformance("--vectors", str(tmp_path / "bits"), "--results", str(tmp_path / "results"))
    assert (done.returncode, "FAIL" in done.stdout) == (1, True)
    done = conformance("--bits", "pce")
    assert (done.returncode, "--bits says what" in done.stderr) == (2, True)
