"""Limits on how much a call grows the process, measured by the kernel and not by ourselves."""

import json
import sys

import pytest

from jobs.launch import launch_source

MEBIBYTE = 2**20


OPTIONS = [
    {},
    {"softcap": 30.0},
    {"label_smoothing": 0.1, "weight": True},
    {"probabilities": True, "label_smoothing": 0.1, "weight": True, "softcap": 30.0},
]


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read and reset in Linux's /proc")
def test_value_and_grad_into_logits_takes_8_mebibytes():
    job = launch_source(
        2,
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

        def step(rows, options):
            logits = np.tile(np.random.default_rng(comm.rank).standard_normal((2, 16000), np.float32), (rows // 2, 1))
            options = dict(options)
            targets = np.zeros(rows, np.int64)
            if options.pop("probabilities", False):
                targets = np.full_like(logits, 1 / 16000 / comm.size)
            if "weight" in options:
                options["weight"] = np.ones(16000)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
            before = kibibytes("VmRSS")
            pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=logits, **options)
            return kibibytes("VmHWM") - before

        def growth(options):
            step(2, options)  # loads what is loaded only once
            return step(2048, options)

        told = comm.gather([growth(options) for options in json.loads(sys.argv[1])])
        if comm.rank == 0:
            print(json.dumps(told))
        """,
        json.dumps(OPTIONS),
        # Memory that is freed goes back to the system: the next options cannot use what the last ones had.
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    assert job.returncode == 0, job.stderr
    told = json.loads(job.stdout)
    assert len(told) == 2
    for growth in told:
        assert {str(o): n for o, n in zip(OPTIONS, growth, strict=True) if n * 1024 > 8 * MEBIBYTE} == {}
