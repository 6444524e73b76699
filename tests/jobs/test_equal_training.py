"""Training inside `reproducible` has one fingerprint after each step, on any mesh.

`equal_training.json` has it. A change of it is a change of bits: the changelog says which, and the minor version grows.
The first mesh of `python tests/jobs/equal_training.py 50 FOLDER 1x1x1` gives it anew.
"""

import json
from pathlib import Path

import pytest

from jobs.launch import launch

PROGRAM = Path(__file__).with_name("equal_training.py")
EXPECTED = json.loads(PROGRAM.with_suffix(".json").read_text(encoding="utf-8"))["1x1x1"]
STEPS = len(EXPECTED)
MESHES = {2: ["2x1x1", "1x1x2"], 3: ["3x1x1", "1x3x1-after-3x1x1"], 4: ["1x1x4", "2x1x2s"]}


def trained(ranks, folder, *meshes, steps=STEPS, **env):
    job = launch(ranks, str(PROGRAM), str(steps), str(folder), *meshes, env=env)
    assert job.returncode == 0, job.stderr
    return json.loads(job.stdout)


@pytest.mark.parametrize("ranks", MESHES)
def test_every_mesh_has_the_fingerprints(tmp_path, ranks):
    found = trained(ranks, tmp_path, *MESHES[ranks])
    assert list(found) == MESHES[ranks]
    for mesh, fingerprints in found.items():
        assert fingerprints == EXPECTED[STEPS // 2 if "after" in mesh else 0 :], mesh


@pytest.mark.parametrize("env", [{"OPENBLAS_NUM_THREADS": "2"}, {"PCE_MPI_KERNEL": "numpy"}], ids=str)
def test_libraries_have_the_fingerprints(tmp_path, env):
    assert trained(1, tmp_path, "1x1x1", **env)["1x1x1"] == EXPECTED


def test_faults_change_first_fingerprint(tmp_path):
    names = ["2x1x1", "2x1x1-wrongly_split", "2x1x1-twice_reduced"]
    found = [fingerprints[0] for fingerprints in trained(2, tmp_path, *names, steps=2).values()]
    assert len(set(found)) == len(names)


def test_missing_synchronization_is_found_in_first_step(tmp_path):
    job = launch(2, str(PROGRAM), "2", str(tmp_path), "2x1x1-unsynchronized")
    assert job.returncode != 0
    assert "different arrays" in job.stderr
