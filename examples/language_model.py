"""A small neural language model of Python's standard library, with the vocabulary sharded over MPI ranks.

    mpiexec -n 2 python -m mpi4py examples/language_model.py

The model (Bengio et al., A Neural Probabilistic Language Model, 2003) predicts a token from the few before it:

    x = the embeddings of those tokens, concatenated    (rows, context * embed)
    h = tanh(x @ w + b)                                 (rows, hidden)
    logits = h @ u + c                                  (rows, vocabulary)

With tens of thousands of different tokens nearly all parameters and nearly all work belong to one token each. So each
rank holds the embeddings, u, c and the logits of its shard of the vocabulary, and no rank ever holds all. PLAN says so;
what is sent, forward and backward, follows from it. The same seed gives the same losses on any number of ranks.
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
from typing import NamedTuple

from mpi4py import MPI
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import pce_mpi as pce

NUMBERS = (
    ("context", 1, 4, "tokens that a prediction is made from"),
    ("embed", 1, 128, "length of the vector that stands for a token of the context"),
    ("hidden", 1, 128, "width of the hidden layer"),
    ("steps", 1, 800, "training steps"),
    ("batch", 1, 256, "tokens that are predicted in one step"),
    ("rate", 0, 3.0, "learning rate"),
    ("embedding-rate", 0, 1.0, "learning rate of the embeddings"),
    ("min-count", 1, 2, "tokens that occur less often in the training text are unknown"),
    ("test-tokens", 1, 20_000, "held-out tokens to test on, at most"),
    ("write", 0, 24, "tokens to write after each prompt, in the end"),
    ("max-files", 2, 100_000, "files to read, at most"),
    ("seed", 0, 0, "decides which files are held out, the initial values, and the order of training"),
)
PLAN = {"embedding": pce.VocabParallel(), "[wb]": pce.Replicated(), "[uc]": pce.Colwise()}
PROMPTS = ["import", "    def __init__(self", "for i in range(", "raise ValueError(", "if not isinstance("]

# A word or punctuation with the space before it, the end of a line with the indentation of the next, or white space.
# No character is lost: "".join(tokens) is the text.
TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s*\n *|\s+")

# Installed packages, tests, tables of character codes, and the manual, which is one file as long as fifty others.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# Two tokens that no text has: one for tokens that are too rare for the vocabulary, one that precedes each file.
UNKNOWN, FILE_START = 0, 1


class Model:
    def __init__(self, mesh, unigram, args):
        self.mesh, self.args = mesh, args
        rng, tokens, inputs = np.random.default_rng(args.seed), len(unigram), args.context * args.embed
        arrays = {
            "embedding": 0.1 * rng.standard_normal((tokens, args.embed), np.float32),
            "w": rng.standard_normal((inputs, args.hidden), np.float32) / np.float32(inputs**0.5),
            "b": np.zeros(args.hidden, np.float32),
            "u": np.zeros((args.hidden, tokens), np.float32),  # while u is 0 this is the unigram model
            "c": unigram.astype(np.float32),
        }
        self.parameters = pce.shard_parameters(arrays, mesh, PLAN, dim="classes")
        embedding, *others = self.parameters.values()
        # A token is rare in the batch that the loss averages over, so embeddings need a larger rate than the others.
        groups = [{"params": [embedding], "lr": args.embedding_rate * args.batch}, {"params": others}]
        self.optimizer = pce.SGD(groups, lr=args.rate)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def logits(self, contexts):
        embedding, w, b, u, c = self.parameters.values()
        x = pce.embedding(contexts, embedding).reshape(len(contexts), -1)
        return pce.tanh(x @ w + b) @ u + c

    def loss(self, rows):
        return pce.cross_entropy(self.logits(rows[:, :-1]), rows[:, -1])

    def next_logits(self, tokens):
        tokens = [FILE_START] * self.args.context + tokens
        return self.logits(np.array([tokens[-self.args.context :]]))[0]


def step(model, rows, number, args):
    """Take training step `number`, from 1, on random rows, the same on every rank, and return the loss before it."""
    drawn = np.random.default_rng([args.seed, number]).integers(len(rows), size=args.batch)
    loss = model.loss(rows[drawn])
    loss.backward()
    for rate, group in zip(model.rates, model.optimizer.param_groups, strict=True):
        group["lr"] = pce.cosine_schedule(number - 1, lr=rate, steps=args.steps, warmup=args.steps // 20)
    model.optimizer.step()
    model.optimizer.zero_grad()
    return loss.item(rehearsed=0.0)


def train(start, mesh, rows, args):
    """Make a model on `mesh` by `start` and train it; rank 0 shows the progress and writes the log."""
    compare_steps(mesh, start, lambda model, number: step(model, rows, number, args), range(1, min(3, args.steps) + 1))
    model, log = start(mesh), ""
    if mesh.rank == 0:
        own, whole = np.sum([(array.local.size, array.size) for array in model.parameters.values()], axis=0)
        share = f"{own:,} of {whole:,} parameters"
        print(f"training on {len(rows):,} tokens; rank 0 of {mesh.size} holds {share}", flush=True)
    with tqdm(range(1, args.steps + 1), "training", disable=mesh.rank > 0, mininterval=10) as bar:
        for number in bar:
            loss = step(model, rows, number, args)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            log += json.dumps({"step": number, "loss": loss}) + "\n"
    if mesh.rank == 0 and args.log:
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


def contexts(files, length):
    """Return a row for each token of the files, with the `length` tokens before it: (tokens, length + 1)."""
    texts = [np.pad(tokens, (length, 0), constant_values=FILE_START) for tokens in files]
    return np.concatenate([sliding_window_view(text, length + 1) for text in texts])


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
    parser.add_argument("--log", type=partial(file, mode="ab"), metavar="FILE", help="write steps and losses as JSON")
    return parser


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm, options())
    share_cores(comm)
    corpus = read_corpus(comm, args)
    mesh = pce.Mesh(comm, classes=comm.size)
    training, held_out = contexts(corpus.training, args.context), contexts(corpus.held_out, args.context)
    model = train(lambda mesh: Model(mesh, corpus.unigram(), args), mesh, training, args)
    evaluate(model, corpus, held_out, slice(-1, None), args)
