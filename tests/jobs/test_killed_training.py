"""A training that is killed again and again, and goes on each time on another mesh, has the bits of one left alone."""

from jobs.launch import launch_source

PROGRAM = """
import os, signal, sys
from mpi4py import MPI
import numpy as np
import pce_mpi as pce
from pce_mpi import Shard
from pce_mpi.distributed.checkpoint import TensorWriter

STEPS = 5


def main(path, data, classes, where, when):
    mesh = pce.Mesh(MPI.COMM_WORLD, data=data, classes=classes)
    p = {
        "w": pce.normal((5, 6), mesh, seed=(0, 1), requires_grad=True, data=Shard(1)),
        "b": pce.uniform(6, mesh, seed=(0, 2), requires_grad=True),
        "u": pce.normal((6, 7), mesh, seed=(0, 3), requires_grad=True, classes=Shard(1)),
        "c": pce.normal(7, mesh, seed=(0, 4), dtype=np.float64, requires_grad=True, classes=Shard(0)),
    }
    groups = [{"params": [p["w"], p["u"]], "weight_decay": 0.1}, {"params": [p["b"], p["c"]], "lr": 0.02}]
    optimizer = pce.AdamW(groups, lr=0.05, weight_decay=0.0)

    def everything():
        return p | {f"optimizer.{name}": array for name, array in optimizer.state().items()}

    done = 0
    if os.path.exists(path):
        saved = pce.load(path, mesh, everything() | {"steps": {}})
        for name, array in p.items():
            array.local[...] = saved[name].local
        names = [name for name in saved if name.startswith("optimizer.")]
        optimizer.load_state({name.removeprefix("optimizer."): saved[name] for name in names})
        done = saved["steps"].item()
    sys.stdout.write(f"begins after {done}\\n")  # at once: the lines of ranks must not mix
    sys.stdout.flush()
    for step in range(done + 1, STEPS + 1):
        rng = np.random.default_rng([5, step])
        x = pce.distribute(rng.standard_normal((9, 5), np.float32), mesh, data=Shard(0))
        logits = pce.tanh(x @ p["w"] + p["b"]) @ p["u"] + p["c"]
        loss = pce.cross_entropy(logits, pce.distribute(rng.integers(7, size=9), mesh, data=Shard(0)))
        optimizer.zero_grad()
        loss.backward()
        kill_at(where if step == when else None)
        pce.clip_grad_norm(p.values(), 1.0)
        optimizer.lr = pce.cosine_schedule(step - 1, lr=0.05, steps=STEPS)
        optimizer.step()
        pce.save(path, everything() | {"steps": pce.distribute(step, mesh)})
    sys.stdout.write(f"ends with {pce.fingerprint(everything())}\\n")
    sys.stdout.flush()


def kill_at(where):
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "writing":
        write = TensorWriter.write
        TensorWriter.write = lambda self, name, *rest: killed() if name == "optimizer.1.exp_avg" else write(
            self, name, *rest
        )
    if where == "before the rename":
        os.replace = killed
    if where == "after the rename":
        replace = os.replace
        os.replace = lambda *paths: (replace(*paths), killed())


with pce.reproducible():
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
"""


def run(path, data, classes, where="", when=0):
    """The steps that were done before, the fingerprint at the end or None, and what was left in the folder."""
    job = launch_source(data * classes, PROGRAM, *map(str, (path, data, classes, where, when)))
    assert (job.returncode == 0) == (not where), job.stderr
    begin, end = (
        {line.rpartition(" ")[2] for line in job.stdout.splitlines() if line.startswith(words)}
        for words in ("begins after", "ends with")
    )
    assert len(begin) == 1 and len(end) == (not where), job.stdout
    return int(begin.pop()), end.pop() if end else None, sorted(each.name for each in path.parent.iterdir())


def test_killed_training_goes_on_with_its_bits(tmp_path):
    (tmp_path / "alone").mkdir()
    _, expected, left = run(tmp_path / "alone" / "kept", 1, 1)
    assert left == ["kept"]
    (tmp_path / "killed").mkdir()
    kept = tmp_path / "killed" / "kept"
    # The mesh, where and in which step it is killed, the steps that have been saved by then.
    killed = [
        (2, 1, "writing", 2, 1),
        (1, 3, "before the rename", 3, 2),
        (1, 1, "after the rename", 3, 3),
    ]
    saved = 0
    for data, classes, where, when, after in killed:
        begun, fingerprint, left = run(kept, data, classes, where, when)
        assert (begun, fingerprint) == (saved, None)
        assert len(left) == (1 if where == "after the rename" else 2)
        saved = after
    begun, fingerprint, left = run(kept, 1, 2)
    assert (begun, fingerprint, left) == (3, expected, ["kept"])
