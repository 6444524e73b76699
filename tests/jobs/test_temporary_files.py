"""A process removes what a killed one of its kind has left, and nothing else."""

import fcntl
import os
from pathlib import Path
import sys
import textwrap
import time

import pytest

from jobs.launch import ROOT, complete
from pce_mpi import temporary_files
from pce_mpi.temporary_files import abandoned, new_file, new_folder

DAYS = 24 * 3600


def found(folder, stem="it."):
    return sorted(path.name for path in abandoned(folder, stem))


@pytest.fixture(params=["file", "folder"])
def make(request, tmp_path):
    """Makes one of the two in `tmp_path`; its path, and the descriptor that holds it."""
    return lambda: new_file(tmp_path, "it.", 0o666) if request.param == "file" else new_folder(tmp_path, "it.")


@pytest.fixture
def elsewhere(monkeypatch):
    """For what is made, or looked for, on another machine."""

    def move(number):
        monkeypatch.setattr(temporary_files, "_machine", lambda: f"{number:08x}")

    return move


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_leftovers_are_what_nobody_holds(make, tmp_path):
    (held, _), (first, descriptor) = make(), make()
    os.close(descriptor)
    age(held, 100 * DAYS)
    assert found(tmp_path) == [first.name]


def test_leftovers_of_other_machines_stay_week(make, tmp_path, elsewhere):
    elsewhere(1)
    path, descriptor = make()
    os.close(descriptor)
    elsewhere(2)
    new = found(tmp_path)
    age(path, 6 * DAYS)
    young = found(tmp_path)
    age(path, 8 * DAYS)
    assert (new, young, found(tmp_path)) == ([], [], [path.name])


def test_new_entry_keeps_its_folder_young(tmp_path, elsewhere):
    elsewhere(1)
    path, descriptor = new_folder(tmp_path, "it.")
    os.close(descriptor)
    (path / "log").touch()
    age(path, 8 * DAYS)
    elsewhere(2)
    assert found(tmp_path) == []


def test_leftovers_without_locks_are_told_by_time(make, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path, descriptor = make()
    os.close(descriptor)
    young = found(tmp_path)
    age(path, 8 * DAYS)
    assert (young, found(tmp_path)) == ([], [path.name])


def test_maker_taken_for_gone_makes_another(make, tmp_path, monkeypatch):
    """Between what is made and its lock, another process may come."""
    flock = fcntl.flock
    removed = []

    def late(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        for path in abandoned(tmp_path, "it."):
            removed.append(path)
            path.rmdir() if path.is_dir() else path.unlink()
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    path, _ = make()
    assert path.exists()
    assert len(removed) == 1
    assert found(tmp_path) == []


def test_other_names_kinds_and_links_stay(tmp_path):
    path, descriptor = new_file(tmp_path, "it.", 0o666)
    os.close(descriptor)
    machine_and_number = path.name.removeprefix("it.")
    others = ["that.", "xit.", "it.it.", ""]
    for other in others:
        (tmp_path / f"{other}{machine_and_number}").touch()
    (tmp_path / f"it.{machine_and_number}x").touch()
    victim = tmp_path / "victim"
    victim.touch()
    (tmp_path / f"it.{machine_and_number[:-8]}00000000").symlink_to(victim)
    os.mkfifo(tmp_path / f"it.{machine_and_number[:-8]}00000001")
    assert found(tmp_path) == [path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away: run this as root")
def test_leftovers_of_another_user_stay(make, tmp_path):
    path, descriptor = make()
    os.close(descriptor)
    os.chown(path, 1234, 1234)
    assert found(tmp_path) == []


def test_missing_folder_holds_and_takes_nothing(tmp_path):
    assert found(tmp_path / "missing") == []
    for make in (lambda: new_file(tmp_path / "missing", "it.", 0o666), lambda: new_folder(tmp_path / "missing", "it.")):
        with pytest.raises(FileNotFoundError):
            make()


def test_file_of_killed_save_is_removed(tmp_path):
    program = """
        import os, signal, sys
        from mpi4py import MPI
        import pce_mpi as pce
        from pce_mpi.distributed import checkpoint

        if "killed" in sys.argv:
            checkpoint.TensorWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        pce.save("weights", {"step": pce.distribute(len(sys.argv), pce.Mesh(MPI.COMM_SELF, data=1))})
        """

    def save(*arguments):
        command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return complete(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}).returncode

    def files():
        return sorted(path.name for path in Path(tmp_path).iterdir())

    (tmp_path / "notes").touch()
    statuses = [save("killed"), save("killed")]
    left = files()
    statuses.append(save())
    assert statuses == [-9, -9, 0]
    assert left[1:] == ["notes"] and left[0].startswith(".weights.")  # the second one has removed the first one's
    assert files() == ["notes", "weights"]
