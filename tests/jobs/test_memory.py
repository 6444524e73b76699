"""How much a call may grow the process, measured by the kernel and not by ourselves."""

import json
import sys

import pytest

from jobs.launch import launch_source

MEBIBYTE = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read and reset in Linux's /proc")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 30.0},
        {"label_smoothing": 0.1, "weight": True},
        {"probabilities": True, "label_smoothing": 0.1, "weight": True, "softcap": 30.0},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_value_and_grad_into_the_logits_grows_the_process_by_at_most_8_mebibytes(ranks, options):
    job = launch_source(
        ranks,
        """
        import json
        from pathlib import Path
        import sys
        import numpy as np
        from mpi4py import MPI
        import pce_mpi as pce

        comm = MPI.COMM_WORLD

        def kibibytes(name):
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
            return int(line.split()[1])

        def step(rows):
            logits = np.random.default_rng(comm.rank).standard_normal((rows, 16000), np.float32)
            options = json.loads(sys.argv[1])
            targets = np.zeros(rows, np.int64)
            if options.pop("probabilities", False):
                targets = np.full_like(logits, 1 / 16000 / comm.size)
            if "weight" in options:
                options["weight"] = np.ones(16000)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
            before = kibibytes("VmRSS")
            pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=logits, **options)
            return kibibytes("VmHWM") - before

        step(2)  # loads what is loaded only once
        growth = comm.gather(step(2048))
        if comm.rank == 0:
            print(json.dumps(growth))
        """,
        json.dumps(options),
    )
    assert job.returncode == 0, job.stderr
    growth = json.loads(job.stdout)
    assert len(growth) == ranks
    assert max(growth) * 1024 <= 8 * MEBIBYTE
