"""benchmarks/growth.py: the model, and the program on a few ranks."""

import re
import sys

import numpy as np
import pytest

from jobs.launch import ROOT, complete, job_environment

SIZES = [(rows, classes) for rows in (512, 2048) for classes in (2000, 32000)]
PROGRAM = [sys.executable, "benchmarks/growth.py", "--rows", "4", "16", "--classes", "50", "--repeat", "1"]


@pytest.fixture
def growth(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import growth

    monkeypatch.setattr(growth, "number_of_cores", lambda: 2)
    return growth


def seconds_of(ranks, rows, classes, *, a=2e-4, b=1e-7, c=1e-9, d=2e-7, e=3e-4):
    """The seconds of the docstring's formula, on 2 cores."""
    shared = max(1, ranks // 2)
    work = a + b * rows + c * rows * classes / ranks + d * rows * np.log2(ranks)
    return shared * (work + e * (shared - 1))


def test_model_finds_what_times_were_made_of(growth):
    sizes = [growth.Size(ranks, *size) for ranks in (1, 2, 4, 8, 16) for size in SIZES]
    model = growth.fitted({size: seconds_of(*size) for size in sizes})
    np.testing.assert_allclose(model.coefficients, [2e-4, 1e-7, 1e-9, 2e-7, 3e-4], rtol=1e-6)
    unseen = growth.Size(32, 4096, 64000)
    assert model.seconds(unseen) == pytest.approx(seconds_of(*unseen))


@pytest.mark.parametrize(("factor", "off"), [(1.14, False), (1.16, True), (0.84, True)])
def test_prediction_off_by_more_is_told(growth, capsys, factor, off):
    sizes = [growth.Size(ranks, *size) for ranks in (1, 2, 4) for size in SIZES]
    unseen = growth.Size(4, 1024, 8000)
    times = {size: seconds_of(*size) for size in sizes}
    found = {size: growth.Measured({"forward": taken}, 0) for size, taken in times.items()}
    found[unseen] = growth.Measured({"forward": factor * seconds_of(*unseen)}, 0)
    models = {"forward": growth.fitted(times)}
    assert growth.report(found, models, [unseen[1:]], 1) == off
    assert ("OFF" in capsys.readouterr().out) == off


def test_growth_measures_predicts_and_draws(tmp_path):
    picture = tmp_path / "growth.svg"
    done = complete([*PROGRAM, "--ranks", "1", "3", "--plot", str(picture)], env=job_environment(3))
    text = done.stdout
    assert done.returncode == ("OFF" in text), done.stderr
    for function in ("forward", "value_and_grad"):
        for ranks in (1, 3):
            for rows, classes in ((8, 50), (32, 25)):
                assert re.search(rf"^{function} +{ranks} +{rows} +{classes} ", text, re.MULTILINE)
    assert re.search(r"^ +3 +32 +25 +1280 +384 +1152$", text, re.MULTILINE)  # 40 and 12 bytes a row; 9 classes
    assert "predicted" in picture.read_text(encoding="utf-8")
