"""benchmarks/drift.py: meshes part by rounding, and inside `reproducible` not at all."""

import pytest

from jobs.launch import launch

SIZES = ["--steps", "5", "--width", "8", "--heads", "2", "--layers", "1", "--max-files", "6", "--test", "8"]


@pytest.mark.parametrize("exact", [False, True])
def test_meshes_part_by_rounding_alone(tmp_path, exact):
    picture = tmp_path / "drift.svg"
    done = launch(
        2, "benchmarks/drift.py", *SIZES, "--plot", str(picture), env={"PCE_MPI_REPRODUCIBLE": str(int(exact))}
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[4:]]
    assert [line[0] for line in lines] == ["1", "2", "5"]
    for _, way, *apart in ([float(each) for each in line[:4]] for line in lines):
        assert 0 < way < 1
        assert all(each == 0 if exact else 0 < each < 1e-6 for each in apart)
    assert "way from the start" in picture.read_text(encoding="utf-8")
