"""A job on two hosts, which are network namespaces: equal bits, and an end in words if a host or the link is lost."""

from pathlib import Path
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from jobs.launch import complete, job_environment
from pce_mpi.jobs.mpiexec import mpiexec

SCRIPT = Path(__file__).with_name("hosts.sh")

COMMON = """
    import os, pathlib, sys, time
    from mpi4py import MPI
    import numpy as np
    import pce_mpi as pce

    comm, folder = MPI.COMM_WORLD, pathlib.Path(sys.argv[1])
    other_host = comm.Split_type(MPI.COMM_TYPE_SHARED).size < comm.size

    def sent():
        return sum(int(line.split()[9]) for line in open("/proc/net/dev") if line.strip().startswith("wire"))

    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((512, 600), np.float32), rng.integers(0, 600, 512)
    mine = slice(*pce.shard_range(600, comm.size, comm.rank))
    def loss(**options):
        return pce.softmax_cross_entropy_value_and_grad(logits[:, mine], targets, comm=comm, num_classes=600, **options)
"""

UNTIL_LOST = """
    loss()
    comm.Barrier()
    if comm.rank == 0:
        (folder / "{event}").touch()
    while True:
        loss()
"""


def hosts_are_refused():
    """The reason why there can be no network namespaces here; empty if there can."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} must be installed (util-linux and iproute2)"
    if b"HYDRA" not in subprocess.run([*mpiexec(), "--version"], capture_output=True).stdout:
        return "the launcher must be MPICH's: make test runs it"
    trial = "mount -t tmpfs tmpfs /run && mkdir /run/netns && ip netns add host1"
    found = subprocess.run(["unshare", "--mount", "--net", "bash", "-c", trial], capture_output=True, text=True)
    return f"network namespaces are not allowed: {found.stderr.strip()}" if found.returncode else ""


REFUSED = hosts_are_refused()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)


def run(tmp_path, program, **environment):
    """Run a program on two hosts, with a rank on each."""
    source = tmp_path / "program.py"
    source.write_text(textwrap.dedent(COMMON) + textwrap.dedent(program), encoding="utf-8")
    mpi = [*mpiexec(), sys.executable, "-m", "mpi4py", str(source), str(tmp_path)]
    command = ["unshare", "--mount", "--net", "bash", str(SCRIPT), str(tmp_path), "1", *mpi]
    return complete(command, env=job_environment(2) | {"UCX_TLS": "tcp,self"} | environment, limit=60.0)


def test_two_hosts_have_bits_of_one_process(tmp_path):
    job = run(
        tmp_path,
        """
        before = sent()
        value, gradient = loss()
        alone, whole = pce.softmax_cross_entropy_value_and_grad(logits, targets)
        equal = value.tobytes() == alone.tobytes() and gradient.tobytes() == whole[:, mine].tobytes()
        facts = os.uname().nodename, other_host, equal, sent() - before > 512 * 28
        print("{}: other host {}, equal bits {}, over the wire {}\\n".format(*facts), end="", flush=True)
        """,
    )
    assert job.returncode == 0, job
    lines = sorted(job.stdout.splitlines())
    assert lines == [f"host{host}: other host True, equal bits True, over the wire True" for host in (1, 2)], job


def test_killed_host_ends_the_job_in_words(tmp_path):
    job = run(tmp_path, UNTIL_LOST.format(event="kill"))
    assert job.returncode != 0 and job.seconds < 30, job
    assert re.search("BAD TERMINATION|process manager error", job.stdout + job.stderr), job  # the launcher's words


def test_lost_link_ends_the_job_in_words(tmp_path):
    job = run(tmp_path, UNTIL_LOST.format(event="unplug"), PCE_MPI_TIMEOUT="2")
    assert job.returncode != 0 and job.seconds < 30, job
    assert "waited 2 s (PCE_MPI_TIMEOUT)" in job.stderr, job
