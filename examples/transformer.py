"""Train a small GPT on Python's standard library, with the batch, the sequences and the layers sharded as you choose.

    mpiexec -n 4 python -m mpi4py examples/transformer.py --data 2 --model 2 --sequence-parallel

One forward pass serves every mesh with the dims `data`, `context` and `model`. The placements of the parameters (PLAN),
of the batch (`loss`) and of the calls of `redistribute` determine what is sent. `data` ranks share the batch. `context`
ranks share each sequence; all of them need all keys and values. `model` ranks share heads, hidden units and vocabulary;
between two blocks they share the sequence (sequence parallelism), or all of them compute the same.

On any mesh and any number of ranks the losses are those of one process, up to rounding, and a mesh can go on with the
parameters and the moments of AdamW that another mesh saved:

    mpiexec -n 2 python -m mpi4py examples/transformer.py --model 2 --stop 500 --save half.safetensors
    mpiexec -n 3 python -m mpi4py examples/transformer.py --context 3 --resume half.safetensors
"""

from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from functools import partial
from itertools import chain
import json
import os
from pathlib import Path
import random
import re
import sys
import sysconfig
import time
from typing import NamedTuple

from mpi4py import MPI
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import pce_mpi as pce
from pce_mpi import Colwise, Replicate, Replicated, Rowwise, SequenceParallel, Shard, VocabParallel

NUMBERS = (
    ("layers", 1, 2, "layers, each of attention and hidden units"),
    ("heads", 1, 12, "attention heads in a layer"),
    ("width", 1, 96, "length of the vector that stands for a token, a multiple of the heads"),
    ("length", 1, 32, "tokens of a sequence"),
    ("decay", 0, 0.1, "weight decay of matrices"),
    ("data", 0, 0, "ranks that share the batch; 0: as many as the others leave"),
    ("context", 1, 1, "ranks that share each sequence"),
    ("model", 1, 1, "ranks that share heads, hidden units and vocabulary"),
    ("steps", 1, 1000, "training steps"),
    ("stop", 0, 0, "leave off after this step, to --resume later; 0: after the last"),
    ("batch", 1, 16, "sequences of a step"),
    ("rate", 0, 0.01, "highest learning rate"),
    ("max-norm", 0, 1.0, "longest gradient: a longer one is scaled down; 0: none is"),
    ("min-count", 1, 10, "tokens that occur less often in the training text are unknown"),
    ("test-tokens", 1, 20_000, "held-out tokens to test on, at most"),
    ("write", 0, 24, "tokens to write after each prompt, in the end"),
    ("max-files", 2, 100_000, "files to read, at most"),
    ("seed", 0, 0, "decides which files are held out, the initial values, and the order of training"),
)
FILES = (
    ("log", "ab", "write step, loss and seconds as lines of JSON"),
    ("save", "ab", "keep parameters and optimizers, when training has ended"),
    ("resume", "rb", "go on with what was kept, from any number of ranks, up to --steps"),
)
# EPS is well above the rounding of a gradient of norm 1. Otherwise an element that is nothing but rounding would take a
# step of the whole learning rate, and on another mesh perhaps the opposite one.
BETAS, EPS = (0.9, 0.95), 1e-6
SHARDS = {"data": Shard(0), "context": Shard(1)}  # of a batch
PLAN = {
    "tokens": VocabParallel(),
    "unigram": VocabParallel(),
    "positions": Replicated(),
    "*norm": SequenceParallel(),
    "*.qkv": Colwise(),
    "*.out": Rowwise(),
    "*.up": Colwise(),
    "*.down": Rowwise(),
}
PROMPTS = ["import", "    def __init__(self", "for i in range(", "raise ValueError(", "if not isinstance("]

# A word or punctuation with the space before it, the end of a line with the indentation of the next, or white space.
# No character is lost: "".join(tokens) is the text.
TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s*\n *|\s+")

# Installed packages, tests, tables of character codes, and the manual, which is one file as long as fifty others.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# Two tokens that no text has: one for tokens that are too rare for the vocabulary, one that precedes each file.
UNKNOWN, FILE_START = 0, 1


class GPT:
    def __init__(self, mesh, unigram, args):
        """Start with logits close to `unigram`, the log-probability of each token without any context."""
        self.mesh, self.args = mesh, args
        self.between_blocks = Shard(1) if args.sequence_parallel else Replicate()
        rng, width, ones = np.random.default_rng(args.seed), args.width, np.ones(args.width, np.float32)

        def matrix(rows, columns, scale=None):
            if mesh.is_hollow:  # in a rehearsal no number is drawn
                return np.broadcast_to(np.float32(0), (rows, columns))
            return rng.standard_normal((rows, columns), np.float32) * (scale or rows**-0.5)

        arrays = {"unigram": unigram.astype(np.float32), "norm": ones}
        arrays |= {"tokens": matrix(len(unigram), width, 0.02), "positions": matrix(args.length, width, 0.02)}
        for layer in range(args.layers):
            arrays |= {f"{layer}.qkv": matrix(width, 3 * width), f"{layer}.out": matrix(width, width)}
            arrays |= {f"{layer}.up": matrix(width, 4 * width), f"{layer}.down": matrix(4 * width, width)}
            arrays |= {f"{layer}.attention_norm": ones, f"{layer}.hidden_norm": ones}
        self.parameters = pce.shard_parameters(arrays, mesh, PLAN, dim="model")
        matrices, vectors = ([p for p in self.parameters.values() if p.ndim == ndim] for ndim in (2, 1))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = pce.AdamW(groups, args.rate, BETAS, EPS, weight_decay=args.decay)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def logits(self, ids):
        p = self.parameters
        x = (pce.embedding(ids, p["tokens"]) + p["positions"][: ids.shape[1]]).redistribute(model=self.between_blocks)
        for layer in range(self.args.layers):
            for block in (self.attention, self.hidden):
                y = pce.layer_norm(x, p[f"{layer}.{block.__name__}_norm"]).redistribute(model=Replicate())
                x = x + block(y, layer).redistribute(model=self.between_blocks)
        return pce.layer_norm(x, p["norm"]).redistribute(model=Replicate()) @ p["tokens"].T + p["unigram"]

    def attention(self, x, layer):
        batch, length, width = x.shape
        # The columns of qkv are grouped by head, so that a shard has whole heads with their queries, keys and values.
        heads = (x @ self.parameters[f"{layer}.qkv"]).reshape(batch, length, self.args.heads, -1).swapaxes(1, 2)
        q, k, v = pce.split(heads, 3, axis=-1)
        whole = {"context": Replicate()} if "context" in self.mesh.dims else {}
        k, v = (each.redistribute(**whole) for each in (k, v))
        attended = pce.scaled_dot_product_attention(q, k, v, causal=True)
        return attended.swapaxes(1, 2).reshape(batch, length, width) @ self.parameters[f"{layer}.out"]

    def hidden(self, x, layer):
        return pce.gelu(x @ self.parameters[f"{layer}.up"]) @ self.parameters[f"{layer}.down"]

    def loss(self, rows):
        shards = {dim: shard for dim, shard in SHARDS.items() if dim in self.mesh.dims}
        ids, targets = (pce.distribute(part, self.mesh, **shards) for part in (rows[:, :-1], rows[:, 1:]))
        return pce.cross_entropy(self.logits(ids), targets)

    def next_logits(self, tokens):
        ids = pce.distribute(np.array([tokens[-self.args.length :]]), self.mesh)
        return self.logits(ids)[0, -1]


def step(model, rows, number, args):
    """Take training step `number`, from 1, on random rows, the same on every rank, and return the loss before it."""
    drawn = np.random.default_rng([args.seed, number]).integers(len(rows), size=args.batch)
    loss = model.loss(rows[drawn])
    loss.backward()
    if args.max_norm:
        pce.clip_grad_norm(model.parameters, args.max_norm)
    for rate, group in zip(model.rates, model.optimizer.param_groups, strict=True):
        group["lr"] = pce.cosine_schedule(number - 1, lr=rate, steps=args.steps, warmup=args.steps // 20)
    model.optimizer.step()
    model.optimizer.zero_grad()
    return loss.item(rehearsed=0.0)


def state(model):
    """The parameters and the state of the optimizer, by the names that they are saved under."""
    return model.parameters | {f"optimizer.{name}": array for name, array in model.optimizer.state().items()}


def save(model, path, steps):
    """Save the parameters, the state of the optimizer, and after how many steps they are such."""
    pce.save(path, state(model) | {"steps": pce.distribute(steps, model.mesh)})


def resume(model, path):
    """Load what any mesh saved, and return after how many steps."""
    saved = pce.load(path, model.mesh, state(model) | {"steps": {}})  # placed as what is there already
    for name, array in model.parameters.items():
        if saved[name].shape != array.shape:
            raise ValueError(f"{path} has {name} of shape {saved[name].shape}, these options make it {array.shape}")
    for name, array in model.parameters.items():
        array.local[...] = saved[name].local
    names = [name for name in saved if name.startswith("optimizer.")]
    model.optimizer.load_state({name.removeprefix("optimizer."): saved[name] for name in names})
    return int(saved["steps"].item())


def train(start, mesh, rows, args):
    """Make a model on `mesh` by `start` and train it; rank 0 shows the progress and writes the log."""
    compare_steps(mesh, start, lambda model, number: step(model, rows, number, args), range(1, min(3, args.steps) + 1))
    model, here = start(mesh), mesh.rank == 0
    if here:
        own, whole = np.sum([(array.local.size, array.size) for array in model.parameters.values()], axis=0)
        share = f"{own:,} of {whole:,} parameters"
        print(f"training on {len(rows):,} tokens; rank 0 of {mesh.size} holds {share}", flush=True)
    try:
        done = resume(model, args.resume) if args.resume else 0
    except (KeyError, OSError, ValueError) as problem:  # which every rank raises
        stop(mesh.comm(*mesh.dims), f"error: cannot resume {str(args.resume)!r}: {problem}")
    last, log, begin = max(done, args.stop or args.steps), "", time.perf_counter()
    numbers = range(done + 1, last + 1)
    with tqdm(numbers, "training", last, initial=done, disable=not here, mininterval=10) as bar:
        for number in bar:
            loss = step(model, rows, number, args)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if args.fingerprint:
                digits = pce.fingerprint(model.parameters)
                if here:
                    tqdm.write(f"step {number}  loss {loss}  parameters {digits}")
            log += json.dumps({"step": number, "loss": loss, "seconds": time.perf_counter() - begin}) + "\n"
    if args.save:
        save(model, args.save, last)
    if here and args.log:
        args.log.write_text(log)
    return model


class Corpus(NamedTuple):
    """The vocabulary, and the files as indices into it."""

    vocabulary: list[str]
    training: list[np.ndarray]
    held_out: list[np.ndarray]

    def encode(self, text):
        number = {token: index for index, token in enumerate(self.vocabulary)}
        return [number.get(token, UNKNOWN) for token in TOKEN.findall(text)]

    def decode(self, tokens):
        return "".join(self.vocabulary[token] for token in tokens)

    def unigram(self):
        """Return the log-probability of each token without any context, which the models have to beat."""
        counts = np.bincount(np.concatenate(self.training), minlength=len(self.vocabulary)) + 1
        counts[FILE_START] += len(self.training)
        return np.log(counts / counts.sum())


def read_corpus(comm, args):
    """Read the standard library of rank 0 and return it on every rank; every sixteenth file is held out."""
    if comm.rank > 0:
        return comm.bcast(None)
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if path.stat().st_size]
    files = [path for path in files if not SKIPPED_FOLDERS & set(path.relative_to(library).parts)]
    random.Random(args.seed).shuffle(files)
    texts = [TOKEN.findall(path.read_text(encoding="utf-8", errors="replace")) for path in files[: args.max_files]]
    if len(texts) < 2:
        raise FileNotFoundError(f"found {len(texts)} files of Python in {library}; it takes one to train, one to test")
    training, held_out = [text for index, text in enumerate(texts) if index % 16], texts[::16]
    counts = Counter(chain.from_iterable(training))
    vocabulary = ["<unknown>", "<file>", *sorted(token for token, count in counts.items() if count >= args.min_count)]
    number = {token: index for index, token in enumerate(vocabulary)}

    def indices(text):
        return np.array([number.get(token, UNKNOWN) for token in text], np.int32)

    return comm.bcast(Corpus(vocabulary, [*map(indices, training)], [*map(indices, held_out)]))


def passages(files, length):
    """Return each run of `length` tokens of all files, FILE_START before each file, as a view: copies are large."""
    texts = [np.pad(tokens, (1, 0), constant_values=FILE_START) for tokens in files]
    return sliding_window_view(np.concatenate(texts), length)


def compare_steps(mesh, start, step, numbers):
    """Train for some steps on all ranks together, then on each rank alone: losses and parameters must agree.

    `start` makes a model on a mesh; `step` takes the training step of a given number and returns the loss before it.
    """
    results = []
    for ranks in mesh, pce.Mesh(MPI.COMM_SELF, **dict.fromkeys(mesh.dims, 1)):
        model = start(ranks)
        losses = {f"the loss of step {number}": step(model, number) for number in numbers}
        results.append(losses | {f"{name} after that": array.full() for name, array in model.parameters.items()})
    together, alone = results
    # The limit is loose because the gradient of a bias is a sum whose terms nearly cancel, and a bias that starts at 0
    # consists of that gradient alone.
    difference = compare(mesh.comm(*mesh.dims), together, alone, limit=1e-4)
    if mesh.rank == 0:
        print(f"the first steps are those of one process, but for {difference:.0e}", flush=True)


def compare(comm, ours, one_process, limit=1e-5):
    """Return how far results are from those of one process, by size, on any rank; end the job if that is too far."""
    found = {name: np.abs(ours[name] - x).max() / (np.abs(x).max() or 1.0) for name, x in one_process.items()}
    found = [(name, error, rank) for rank, errors in enumerate(comm.allgather(found)) for name, error in errors.items()]
    wrong = [f"  {name} by {error:.1e} (rank {rank})" for name, error, rank in found if not error <= limit]  # or nan
    if wrong:
        stop(comm, "\n".join([f"further than {limit:.0e} from what one process computes:", *wrong]))
    return max(error for _, error, _ in found)


def stop(comm, message):
    """End the job with status 1; rank 0 prints why."""
    if comm.rank == 0:
        print(message, file=sys.stderr, flush=True)
    comm.Barrier()
    MPI.Finalize()  # otherwise mpi4py takes the status for a crash and aborts the job
    sys.exit(1)


def complete(model, tokens, length, temperature, rng):
    """Draw the next `length` tokens after `tokens` at random.

    The argmax of logits / temperature + Gumbel noise is a draw from softmax(logits / temperature), so no rank needs all
    logits. Each rank draws the same noise for all classes and uses that of its own classes.
    """
    written: list[int] = []
    with pce.no_grad():
        for _ in range(length):
            logits = model.next_logits(tokens + written)
            noise = rng.gumbel(size=logits.size)
            noise[[UNKNOWN, FILE_START]] = -np.inf
            written.append(int(pce.argmax(logits + temperature * noise).item()))
    return written


def evaluate(model, corpus, rows, predicted, args):
    """Print the perplexity of the model on `rows`, whose columns `predicted` are its targets, and some completions."""
    rng = np.random.default_rng(args.seed)
    rows = rows[rng.permutation(len(rows))[: max(1, args.test_tokens // rows[:1, predicted].size)]]
    targets = rows[:, predicted]
    with pce.no_grad():
        parts = [rows[first : first + args.batch] for first in range(0, len(rows), args.batch)]
        loss = sum(len(part) * model.loss(part).item() for part in parts) / len(rows)
    losses = {"unigram model": -corpus.unigram()[targets].mean(), "this model": loss}
    starts = [[FILE_START, *corpus.encode(prompt)] for prompt in PROMPTS]
    completions = [complete(model, start, args.write, temperature=0.7, rng=rng) for start in starts]
    if model.mesh.rank > 0:
        return
    unknown = np.mean(targets == UNKNOWN)
    print(f"\n{targets.size:,} held-out tokens, {unknown:.1%} of them not in the vocabulary")
    print(f"{'':<15}{'nats a token':>14}{'perplexity':>12}")
    # Lower than on training text: rare tokens, which are hard to predict, are mostly one here, the unknown token.
    for name, loss in losses.items():
        print(f"{name:<15}{loss:14.3f}{np.exp(loss):12.1f}")
    print("\nCompletions, from the bar on:")
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"\n{prompt}|{corpus.decode(completion)}")


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


def options():
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, least, default, meaning in NUMBERS:
        kind, text = partial(number, least=least, whole=isinstance(default, int)), f"{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind, metavar="N", default=default, help=text)
    for name, mode, meaning in FILES:
        parser.add_argument(f"--{name}", type=partial(file, mode=mode), metavar="FILE", help=meaning)
    parser.add_argument("--fingerprint", action="store_true", help="print the parameters' fingerprint after each step")
    parser.add_argument("--sequence-parallel", action="store_true", help="`model` ranks share sequences between blocks")
    return parser


def program(mesh):
    """Take one training step, of a vocabulary of any size: python -m pce_mpi rehearse runs this function."""
    parser = options()
    parser.add_argument("--vocabulary", type=int, metavar="N", default=10_000, help="tokens of the vocabulary")
    args = parser.parse_args()
    step(GPT(mesh, np.zeros(args.vocabulary), args), np.zeros((1, args.length + 1), np.int64), 1, args)


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm, options())
    share_cores(comm)
    if args.width % args.heads:
        stop(comm, f"transformer.py: error: a width of {args.width} is no multiple of {args.heads} heads")
    data = args.data or max(1, comm.size // (args.context * args.model))
    try:
        mesh = pce.Mesh(comm, data=data, context=args.context, model=args.model)
    except ValueError as error:
        stop(comm, f"transformer.py: error: {error}")
    corpus = read_corpus(comm, args)
    shortest = min(sum(map(len, files)) + len(files) for files in (corpus.training, corpus.held_out))
    if args.length >= shortest:
        stop(comm, f"transformer.py: error: a length of {args.length} is too long for {shortest} tokens of text")
    training, held_out = (passages(files, args.length + 1) for files in (corpus.training, corpus.held_out))
    model = train(lambda mesh: GPT(mesh, corpus.unigram(), args), mesh, training, args)
    evaluate(model, corpus, held_out[:: args.length], slice(1, None), args)
