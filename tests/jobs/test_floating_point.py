"""Without the compiled kernel nothing sets the floating-point unit: another state is refused, on every rank."""

from jobs.launch import launch_source

PROGRAM = """
    import sys, warnings
    from contextlib import nullcontext
    import numpy as np
    from mpi4py import MPI

    sys.path.insert(0, "tests")
    sys.modules["pce_mpi.kernels._compiled"] = None  # as if it had not been built
    warnings.simplefilter("ignore")
    import pce_mpi as pce
    from floating_point_states import STATES, floating_point

    comm = MPI.COMM_WORLD
    logits, targets = np.linspace(-3, 3, 20).reshape(4, 5) * (1 + comm.rank), np.arange(4)
    loss, residuals = pce.softmax_cross_entropy_forward(logits, targets, comm=comm)
    for state in STATES:
        calls = {
            "loss": lambda: pce.softmax_cross_entropy(logits, targets, comm=comm),
            "statistics": lambda: pce.class_statistics(logits, comm=comm),
            "top_k": lambda: pce.top_k(logits, 2, comm=comm),
        }
        for name, call in calls.items():
            try:
                with floating_point(state) if comm.rank == 1 else nullcontext():
                    call()
            except RuntimeError as error:
                assert "the floating-point unit " in str(error) and "(rank 1)" in str(error), error
            else:
                raise AssertionError(f"{name} in {state} was not refused")
        try:
            with floating_point(state):
                pce.softmax_cross_entropy_backward(1.0, residuals)
        except RuntimeError as error:
            assert "the floating-point unit " in str(error), error
        else:
            raise AssertionError(f"backward in {state} was not refused")
        assert pce.softmax_cross_entropy(logits, targets, comm=comm) == loss
    print(f"rank {comm.rank}: {len(STATES)} states refused", flush=True)
"""


def test_numpy_kernel_refuses_other_states_on_every_rank():
    job = launch_source(2, PROGRAM)
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        assert f"rank {rank}: " in job.stdout
