"""Threads of a rank, each with a communicator of its own; two that share one are told so."""

import json

from jobs.launch import launch_source

PROGRAM = """
    import json
    import threading
    import time
    from mpi4py import MPI
    import numpy as np
    import pce_mpi as pce
    from pce_mpi.exact.arithmetic import current

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(comm.rank)
    logits, targets = rng.normal(size=(4, 5, 7)), np.arange(5)
    comms = [comm.Dup() for _ in logits]
    meshes = [pce.Mesh(each, data=comm.size) for each in comms]
    said = {}

    def together(work):
        def run(thread):
            try:
                found[thread] = work(thread)
            except Exception as error:
                found[thread] = f"{type(error).__name__}: {error}"

        found = {}
        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(len(comms))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return [found[thread] for thread in sorted(found)]

    def losses(thread):
        return [float(pce.softmax_cross_entropy(logits[thread], targets, comm=comms[thread])) for _ in range(50)]

    def steps(thread):
        start = np.arange(12.0).reshape(4, 3) + thread
        w = pce.distribute(start, meshes[thread], data=pce.Shard(0), requires_grad=True)
        for _ in range(20):
            pce.cross_entropy(w, np.array([0, 1, 2, 0])).backward()
            optimizer = pce.SGD([w], 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return w.full().tolist()

    said["losses"] = together(losses) == [losses(thread) for thread in range(len(comms))]
    said["steps"] = together(steps) == [steps(thread) for thread in range(len(comms))]

    def modes(thread):
        inside = thread % 2 == 0
        with pce.reproducible(inside), pce.trace() as trace:
            x = pce.distribute(np.arange(6.0), meshes[thread], data=pce.Shard(0))
            for _ in range(thread + 1):
                pce.sum(x).item()
            return (current().name == "reproducible") == inside and len(trace.events)

    with pce.reproducible(), pce.trace() as outer:
        counts = together(modes)
    said["modes"] = [outer.events == [], counts == [modes(thread) for thread in range(len(comms))], counts]

    # One communicator for two threads: rank 0 alone calls, so that the first thread waits.
    if comm.rank == 0:
        found = []

        def loss():
            try:
                found.append(float(pce.softmax_cross_entropy(logits[0], targets, comm=comms[0])))
            except pce.CollectiveTimeout as error:
                found.append(str(error))

        thread = threading.Thread(target=loss)
        thread.start()
        time.sleep(0.3)
        loss()
        thread.join()
        said["same"] = found
    print(json.dumps(said), flush=True)
    MPI.COMM_WORLD.Barrier()
    MPI.COMM_WORLD.Abort(0)  # a collective that was left waiting may keep Finalize
"""


def test_threads_agree_unless_they_share_communicator():
    job = launch_source(2, PROGRAM)
    ranks = [json.loads(line) for line in job.stdout.splitlines()]
    assert len(ranks) == 2, job.stderr
    for said in ranks:
        assert said["losses"] is True
        assert said["steps"] is True
        assert said["modes"][:2] == [True, True] and all(said["modes"][2]), said["modes"]
    (same,) = (said["same"] for said in ranks if "same" in said)
    assert len(same) == 2
    assert all("two threads were in calls over it at once" in text for text in same)
