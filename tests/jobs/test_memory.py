"""How much a call may grow the process, measured by the kernel and not by ourselves."""

import json
import sys

import pytest

from jobs.launch import launch_source

MEBIBYTE = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read and reset in Linux's /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_value_and_grad_into_the_logits_grows_the_process_by_at_most_8_mebibytes(ranks):
    job = launch_source(
        ranks,
        """
        import json
        from pathlib import Path
        import numpy as np
        from mpi4py import MPI
        import pce_mpi as pce

        comm = MPI.COMM_WORLD

        def kibibytes(name):
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
            return int(line.split()[1])

        def step(rows):
            logits = np.random.default_rng(comm.rank).standard_normal((rows, 16000), np.float32)
            targets = np.zeros(rows, np.int64)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
            before = kibibytes("VmRSS")
            pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=logits)
            return kibibytes("VmHWM") - before

        step(2)  # loads what is loaded only once
        growth = comm.gather(step(2048))
        if comm.rank == 0:
            print(json.dumps(growth))
        """,
    )
    assert job.returncode == 0, job.stderr
    growth = json.loads(job.stdout)
    assert len(growth) == ranks
    assert max(growth) * 1024 <= 8 * MEBIBYTE
