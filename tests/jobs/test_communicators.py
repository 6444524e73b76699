"""No communicator left, and MPI before it begins and after it has ended: Python exceptions that say what to do."""

import json

import pytest

from jobs.launch import launch_source

# More than MPICH has. Open MPI has 65,532, and a process ends if one rank alone has used them up.
MANY = 3000


def test_exhausted_communicators_raise_until_some_are_freed():
    job = launch_source(
        2,
        f"""
        import json
        from mpi4py import MPI
        import numpy as np
        import pce_mpi as pce

        comm = MPI.COMM_WORLD
        mesh = pce.Mesh(comm, data=1, model=comm.size)
        pce.distribute(np.ones(3), mesh, data=pce.Shard(0))
        mesh.comm("data")
        unused = comm.Dup()
        made = []
        try:
            while len(made) < {MANY}:
                made.append(comm.Dup())
        except MPI.Exception:
            pass

        def loss():
            pce.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(2, int), comm=unused)

        def outcomes():
            found = []
            for call in (loss, loss, lambda: pce.Mesh(comm, data=comm.size), lambda: mesh.comm("model")):
                try:
                    call()
                    found.append("")
                except Exception as error:
                    found.append(f"{{type(error).__name__}}: {{error}}")
            return found

        without = outcomes()
        for each in made[-9:]:
            each.Free()
        told = comm.gather([len(made), without, outcomes()])
        if comm.rank == 0:
            print(json.dumps(told))
        """,
    )
    assert job.returncode == 0, job.stderr
    told = json.loads(job.stdout)
    if told[0][0] == MANY:
        pytest.skip(f"this MPI library has more than {MANY} communicators: MPICH has fewer")
    for _, without, afterwards in told:
        for text in without:
            assert text.startswith("RuntimeError: ")
            assert "MPI could not make another communicator" in text
            assert "Free()" in text
        assert [text.partition(":")[2].split()[0] for text in without] == [
            *["softmax_cross_entropy:"] * 2,
            "Mesh:",
            "Mesh.comm:",
        ]
        assert afterwards == [""] * 4


@pytest.mark.parametrize("when", ["before Init", "after Finalize"])
def test_mpi_that_is_not_running_raises_everywhere(tmp_path, when):
    job = launch_source(
        1,
        """
        import json
        import sys
        import mpi4py
        when, folder = sys.argv[1:]
        mpi4py.rc.initialize = when == "after Finalize"
        from mpi4py import MPI
        import numpy as np
        import pce_mpi as pce
        from pce_mpi import cli
        from pce_mpi.comm import collectives, tracing

        comm = MPI.COMM_WORLD
        arrays = np.zeros((2, 3)), np.zeros(2, int)
        calls = {
            function.__name__: lambda function=function: function(*arrays, comm=comm)
            for function in (
                pce.softmax_cross_entropy,
                pce.softmax_cross_entropy_forward,
                pce.softmax_cross_entropy_value_and_grad,
                pce.class_statistics,
            )
        }
        calls["batch_comm"] = lambda: pce.softmax_cross_entropy(*arrays, batch_comm=comm)
        calls["Mesh"] = lambda: pce.Mesh(comm, data=1, model=1)
        def all_reduce():
            with tracing.cause("it", reason="a test"):
                collectives.all_reduce(np.ones(1), comm, "sum")

        calls["all_reduce"] = all_reduce
        for command in ("info", "check", "bench"):
            calls[command] = lambda command=command: cli.main([command])
        if when == "after Finalize":
            mesh = pce.Mesh(comm, data=1, model=1)
            x = pce.distribute(np.ones((4, 3)), mesh, data=pce.Shard(0), requires_grad=True)
            y = pce.distribute(np.ones((4, 3)), mesh, data=pce.Shard(0), requires_grad=True)
            loss = pce.cross_entropy(x, arrays[1].repeat(2))
            loss.backward()
            moved = pce.sum(pce.square(y.redistribute(data=pce.Shard(1))))
            optimizer = pce.SGD([x], lr=0.1)
            pce.save(f"{folder}/x.safetensors", {"x": x})
            calls |= {
                "Mesh.comm": lambda: mesh.comm("model"),
                "distribute": lambda: pce.distribute(np.ones(3), mesh, data=pce.Shard(0), src_rank=0),
                "from_local": lambda: pce.from_local(np.ones(3), mesh, data=pce.Shard(0)),
                "redistribute": lambda: x.redistribute(data=pce.Shard(1)),
                "full": lambda: y.full(),
                "check_replicas": lambda: pce.check_replicas(loss),
                "fingerprint": lambda: pce.fingerprint(loss),
                "cross_entropy": lambda: pce.cross_entropy(y, arrays[1].repeat(2)),
                "softmax": lambda: pce.softmax(y, axis=0),
                "backward": lambda: moved.backward(),
                "step": lambda: optimizer.step(),
                "clip_grad_norm": lambda: pce.clip_grad_norm([x], 1.0),
                "save": lambda: pce.save(f"{folder}/y.safetensors", {"y": y}),
                "load": lambda: pce.load(f"{folder}/x.safetensors", mesh),
            }
            MPI.Finalize()
        told = {}
        for name, call in calls.items():
            try:
                call()
                told[name] = "returned"
            except (Exception, SystemExit) as error:
                told[name] = f"{type(error).__name__}: {error}"
        told["comm=None"] = float(pce.softmax_cross_entropy(*arrays))
        print(json.dumps(told))
        """,
        when,
        str(tmp_path),
    )
    assert job.returncode == 0, job.stderr + job.stdout
    told = json.loads(job.stdout)
    assert told.pop("comm=None") == pytest.approx(1.0986122886681098)
    expected = {
        "before Init": "RuntimeError: MPI has not been initialized",
        "after Finalize": "RuntimeError: MPI has been finalized",
    }[when]
    assert len(told) > 9
    assert {name: text for name, text in told.items() if not text.startswith(expected)} == {}


def test_forked_process_is_no_rank():
    job = launch_source(
        2,
        """
        import multiprocessing
        import os
        from mpi4py import MPI
        import numpy as np
        import pce_mpi as pce

        comm = MPI.COMM_WORLD
        mesh = pce.Mesh(comm, data=comm.size)
        x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
        logits, targets = np.ones((2, 3)), np.array([0, 1])
        expected = x.full()

        def child():
            calls = {
                "full": x.full,
                "loss": lambda: pce.softmax_cross_entropy(logits, targets, comm=comm),
                "Mesh": lambda: pce.Mesh(MPI.COMM_SELF, data=1),
            }
            for name, call in calls.items():
                try:
                    call()
                except RuntimeError as error:
                    assert "this process was forked from a rank" in str(error), name
                else:
                    raise AssertionError(f"{name} communicated")
            assert pce.softmax_cross_entropy(logits, targets) > 0

        if comm.rank == 0:
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join()
            assert process.exitcode == 0, process.exitcode
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
        assert (x.full() == expected).all()
        print(f"rank {comm.rank}: sound\\n", end="")  # in one write, or another rank's comes between
        """,
    )
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")) == ["", "rank 0: sound", "rank 1: sound"]


def test_operators_of_mpi_are_freed_at_exit():
    job = launch_source(
        2,
        """
        import atexit

        atexit.register(lambda: print(f"{len(known)} left\\n", end=""))  # runs after what the package registers
        from mpi4py import MPI
        import numpy as np
        import pce_mpi as pce
        from pce_mpi.comm.collectives import _operators as known

        mesh = pce.Mesh(MPI.COMM_WORLD, data=2)
        x = pce.from_local(np.ones((1, 3)), mesh, data=pce.Shard(0))
        pce.softmax_cross_entropy(np.ones((1, 3)), np.zeros(1, int), comm=MPI.COMM_WORLD)
        x.max(axis=0).full()
        assert len(known) == 2
        """,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["0 left"] * 2
