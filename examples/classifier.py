"""Train a classifier with very many classes: on features and labels in files of your own, or on generated ones.

    mpiexec -n 2 python -m mpi4py examples/classifier.py --plot curves.png

    hidden = relu(features @ w1 + b1)       (rows, hidden)
    logits = hidden @ w2                    (rows, classes)

With --margin both factors are normalized, so that logits are cosines, and the loss is that of ArcFace: the logit of the
label becomes 16 cos(t + margin), with t its angle, and that of any other class 16 cos t.

The ranks share the rows of a batch: each reads those of its own from the file (a sparse one it reads whole). They share
the classes too: each holds the columns of w2, and the moments of AdamW, for its own. The loss takes a chunk of rows at
a time, so that no rank ever holds all logits of its classes. A run can leave off, and go on with another number of
ranks:

    mpiexec -n 2 python -m mpi4py examples/classifier.py --features x.npy --labels y.npy --stop 50 --save half
    mpiexec -n 3 python -m mpi4py examples/classifier.py --features x.npy --labels y.npy --resume half
"""

from argparse import ArgumentParser, ArgumentTypeError
from functools import partial
import os
from pathlib import Path
import sys
from zipfile import BadZipFile

from mpi4py import MPI
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import pce_mpi as pce
from pce_mpi import Replicate, Shard

NUMBERS = (
    ("classes", 1, 1_000_000, "classes; with --labels at least the largest label + 1"),
    ("hidden", 1, 32, "length of the hidden vector"),
    ("steps", 1, 100, "training steps"),
    ("stop", 0, 0, "leave off after this step, to --resume later; 0: after the last"),
    ("batch", 1, 128, "rows of a step, of all ranks together"),
    ("chunk", 1, 64, "rows whose logits are held at a time"),
    ("rate", 0, 0.01, "highest learning rate"),
    ("decay", 0, 0.01, "weight decay of w1 and w2"),
    ("margin", 0, 0.0, "angle that is added to that of the label, in radians; 0: logits are no cosines"),
    ("every", 1, 25, "steps between two validations"),
    ("validation", 1, 1024, "the last rows, which are not trained on"),
    ("seed", 0, 0, "decides the initial values and the order of training"),
)
FILES = (
    ("features", "rb", "rows of features: an array in a .npy, or a sparse matrix of SciPy in a .npz"),
    ("labels", "rb", "the class of each row: whole numbers in a .npy"),
    ("save", "ab", "keep everything at each validation"),
    ("resume", "rb", "go on with what was saved, by any number of ranks"),
    ("plot", "ab", "draw both curves (needs matplotlib)"),
)


def read(args):
    """Return features and labels; of files only the rows that are asked for are read, where they allow it."""
    if not args.features:
        rng = np.random.default_rng(args.seed)
        # Few classes are frequent and most are rare; a class is a point on a curve, and a row of it is near that point.
        labels = (args.classes ** rng.random(20_000)).astype(np.int64) - 1
        points = np.sin(np.outer(labels + 1, rng.uniform(0, 2 * np.pi, 64)))
        return np.float32(points + 0.3 * rng.standard_normal(points.shape)), labels
    if args.features.suffix == ".npz":
        from scipy.sparse import load_npz

        features = load_npz(args.features).tocsr()
    else:
        features = np.load(args.features, mmap_mode="r")
    labels = np.load(args.labels, mmap_mode="r")
    if not isinstance(labels, np.ndarray) or not hasattr(features, "shape"):
        raise ValueError("arrays are saved as .npy, by np.save; a .npz is for the sparse features of SciPy alone")
    fit = features.ndim == 2 and labels.shape == features.shape[:1]
    if not fit or features.dtype.kind not in "fiub" or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{args.features} must be numbers (rows, features), and {args.labels} one whole number a row, "
            f"got {features.shape} of {features.dtype}, and {labels.shape} of {labels.dtype}"
        )
    for row in np.flatnonzero((labels < 0) | (labels >= args.classes))[:1]:
        raise ValueError(
            f"{args.labels}: label {labels[row]} of row {row} is outside [0, {args.classes}): see --classes"
        )
    return features, labels


def read_everywhere(comm, args):
    """Return what `read` does; where it fails on some rank, all of them end."""
    data, error = None, ""
    try:
        data = read(args)
        if len(data[1]) <= args.validation:
            raise ValueError(f"{len(data[1])} rows leave none to train on beside {args.validation} for validation")
    except (BadZipFile, EOFError, ImportError, OSError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if wrong := [error for error in comm.allgather(error) if error]:
        stop(comm, f"classifier.py: error: {wrong[0]}")
    return data


class Classifier:
    def __init__(self, mesh, features, args):
        self.mesh, self.args = mesh, args
        start, stop = pce.shard_range(args.classes, mesh.size, mesh.rank)
        own = np.zeros((args.hidden, stop - start), np.float32)  # no rank makes the columns of all classes
        self.parameters = {
            "w1": pce.normal((features, args.hidden), mesh, seed=args.seed, scale=features**-0.5, requires_grad=True),
            "b1": pce.distribute(np.zeros(args.hidden, np.float32), mesh, requires_grad=True),
            "w2": pce.from_local(own, mesh, shape=(args.hidden, args.classes), ranks=Shard(1), requires_grad=True),
        }
        if args.margin:  # columns of zeros have no angles
            whole = {"scale": args.hidden**-0.5, "requires_grad": True, "ranks": Shard(1)}
            self.parameters["w2"] = pce.normal((args.hidden, args.classes), mesh, seed=(args.seed, 1), **whole)
        self.scale = {"logit_scale": 16.0} if args.margin else {}
        w1, b1, w2 = self.parameters.values()
        groups = [{"params": [w1, w2]}, {"params": [b1], "weight_decay": 0.0}]
        self.optimizer = pce.AdamW(groups, lr=args.rate, weight_decay=args.decay)

    def hidden(self, features, rows):
        """Read this rank's share of the rows and return the hidden vectors of all of them, on every rank."""
        own = features[rows[slice(*pce.shard_range(len(rows), self.mesh.size, self.mesh.rank))]]
        own = np.asarray(own.toarray() if hasattr(own, "toarray") else own, np.float32)
        x = pce.from_local(own, self.mesh, shape=(len(rows), own.shape[1]), ranks=Shard(0))
        hidden = pce.relu(x @ self.parameters["w1"] + self.parameters["b1"])
        return self.normalized(hidden, 1).redistribute(ranks=Replicate())

    def normalized(self, x, axis):
        """Return vectors of length 1 along an axis, if the logits are to be cosines; otherwise x."""
        return x / pce.sqrt(pce.sum(x * x, axis=axis, keepdims=True) + 1e-12) if self.args.margin else x

    def step(self, features, labels, number):
        """Take training step `number`, from 0, on random rows, and return the loss before it."""
        rng, training = np.random.default_rng([self.args.seed, number]), len(labels) - self.args.validation
        rows = rng.integers(training, size=self.args.batch)
        hidden, w2 = self.hidden(features, rows), self.normalized(self.parameters["w2"], 0)
        margin = (1.0, self.args.margin, 0.0) if self.args.margin else None
        options = {"chunk": self.args.chunk, "margin": margin, **self.scale}
        loss = pce.linear_cross_entropy(hidden, w2, labels[rows], **options)
        loss.backward()
        steps = self.args.steps
        self.optimizer.lr = pce.cosine_schedule(number, lr=self.args.rate, steps=steps, warmup=min(10, steps - 1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(rehearsed=0.0)

    def validate(self, features, labels):
        """Return the mean loss of the validation rows, and how many have their class first and among the first five."""
        rows, sums = np.arange(len(labels) - self.args.validation, len(labels)), np.zeros(3)
        k = min(5, self.args.classes)
        with pce.no_grad():
            w2 = self.normalized(self.parameters["w2"], 0)
            for first in range(0, len(rows), self.args.chunk):
                part = rows[first : first + self.args.chunk]
                logits = self.hidden(features, part) @ w2
                found = pce.top_k(logits, k)[1].full() == labels[part][:, None]
                loss = pce.cross_entropy(logits, labels[part], reduction="sum", **self.scale).item()
                sums += loss, found[:, 0].sum(), found.sum()
        return sums / len(rows)

    def state(self):
        """The parameters and the state of the optimizer, by the names that they are saved under."""
        return self.parameters | {f"optimizer.{name}": array for name, array in self.optimizer.state().items()}

    def save(self, path, steps):
        pce.save(path, self.state() | {"steps": pce.distribute(steps, self.mesh)})

    def resume(self, path):
        """Load what was saved, by any number of ranks, and return after how many steps."""
        saved = pce.load(path, self.mesh, self.state() | {"steps": {}})  # placed as what is there already
        for name, array in self.parameters.items():
            array.local[...] = saved[name].local
        names = [name for name in saved if name.startswith("optimizer.")]
        self.optimizer.load_state({name.removeprefix("optimizer."): saved[name] for name in names})
        return int(saved["steps"].item())


def train(model, features, labels, args):
    """Take all steps; rank 0 shows what each validation finds. Return both curves: (step, loss) of each point."""
    try:
        first, last = model.resume(args.resume) if args.resume else 0, args.stop or args.steps
        if first >= last:
            raise ValueError(f"{first} steps are taken already, of {last}")
    except (KeyError, OSError, ValueError) as problem:  # which every rank raises
        stop(model.mesh.comm(*model.mesh.dims), f"classifier.py: error: {problem}")
    here, curves = model.mesh.rank == 0, {"training": list[tuple[int, float]](), "validation": []}
    with tqdm(range(first, last), "training", last, initial=first, disable=not here, mininterval=10) as bar:
        for step in bar:
            curves["training"].append((step, loss := model.step(features, labels, step)))
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if (step + 1) % args.every == 0 or step + 1 == last:
                loss, top1, top5 = model.validate(features, labels)
                curves["validation"].append((step + 1, loss))
                if here:
                    tqdm.write(f"step {step + 1:5}: validation loss {loss:.4f}, top-1 {top1:.1%}, top-5 {top5:.1%}")
                if args.save:
                    model.save(args.save, step + 1)
    return curves


def plot(path, curves, classes):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="training step", ylabel="loss (nats a row)", title=f"{classes:,} classes")
    for (name, points), style in zip(curves.items(), ("-", "o-"), strict=True):
        axes.plot(*np.transpose(points), style, label=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def stop(comm, message):
    """End the job with status 1; rank 0 prints why."""
    if comm.rank == 0:
        print(message, file=sys.stderr, flush=True)
    comm.Barrier()
    MPI.Finalize()  # otherwise mpi4py takes the status for a crash and aborts the job
    sys.exit(1)


def number(text, least, whole):
    """Return the value of an option."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not least <= value <= 1e9:
        raise ArgumentTypeError(f"expected a {'whole ' * whole}number from {least} up to 1e9, got {text!r}")
    return value


def file(text, mode):
    """Return the path of a file that can be opened, so that no training is lost for want of it."""
    try:
        Path(text).open(mode).close()
    except OSError as error:
        verb = "read" if mode == "rb" else "write"
        raise ArgumentTypeError(f"cannot {verb} {text!r}: {error.strerror}") from None
    return Path(text)


def parse_arguments(comm, parser):
    """Parse the command line on rank 0, so that messages come once; every rank gets the result."""
    outcome = None
    if comm.rank == 0:
        try:
            outcome = parser.parse_args()
        except SystemExit as end:
            outcome = end
    outcome = comm.bcast(outcome)
    if isinstance(outcome, SystemExit):
        MPI.Finalize()  # otherwise mpi4py takes the status for a crash and aborts the job
        raise outcome
    return outcome


def share_cores(comm):
    """Give the ranks of a host as many BLAS threads together as it has cores, unless the environment says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = comm.Split_type(MPI.COMM_TYPE_SHARED).size
    if "OMP_NUM_THREADS" not in os.environ:
        threadpool_limits(max(1, cores // ranks), user_api="blas")


def parser():
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    for name, least, default, meaning in NUMBERS:
        kind, text = partial(number, least=least, whole=isinstance(default, int)), f"{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind, metavar="N", default=default, help=text)
    for name, mode, meaning in FILES:
        parser.add_argument(f"--{name}", type=partial(file, mode=mode), metavar="FILE", help=meaning)
    return parser


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm, parser())
    share_cores(comm)
    if bool(args.features) != bool(args.labels):
        stop(comm, "classifier.py: error: --features and --labels belong together")
    mesh = pce.Mesh(comm, ranks=comm.size)
    features, labels = read_everywhere(comm, args)
    model = Classifier(mesh, features.shape[1], args)
    if comm.rank == 0:
        rows, megabytes = len(labels) - args.validation, model.parameters["w2"].local.nbytes / 1e6
        print(
            f"{rows:,} rows, {args.classes:,} classes; rank 0 of {comm.size} holds {megabytes:.0f} MB of w2", flush=True
        )
    curves = train(model, features, labels, args)
    if comm.rank == 0 and args.plot:
        plot(args.plot, curves, args.classes)
