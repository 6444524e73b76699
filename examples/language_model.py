"""A small neural language model of Python's own standard library, its vocabulary sharded over the ranks of MPI.

    mpiexec -n 2 python -m mpi4py examples/language_model.py

The model (Bengio et al., A Neural Probabilistic Language Model, 2003) predicts a token from the few before it:

    x = the embeddings of those tokens, side by side    (rows, context * embed)
    h = tanh(x @ w + b)                                 (rows, hidden)
    logits = h @ u + c                                  (rows, vocabulary)
    loss = mean of -log softmax(logits)[target]

With tens of thousands of different tokens nearly all work is in the last two lines. So each rank holds the columns of
u, c and the logits that belong to its shard of the vocabulary, and none ever holds all logits. The rest (embeddings, w,
b, x, h) is the same on every rank: computed alike, never sent. A training step communicates twice: 24 bytes a row for
the softmax, inside pce_mpi, and the gradient of h, which is a sum over all classes and hence over all ranks.

The same seed gives the same losses on any number of ranks, but for the rounding of those sums.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from functools import partial
from itertools import chain
import json
from pathlib import Path
import random
import re
import sysconfig
import time

from mpi4py import MPI
import numpy as np
from tqdm import tqdm

import pce_mpi

# A word or some punctuation, with the space before it; the end of a line, with the indentation of the next; or a gap.
# No character is lost: "".join(tokens) is the text again.
TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s*\n *|\s+")

# Not read: what was installed later, tests, tables of character codes, and the manual (one file, as long as fifty).
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# Two tokens that no text has: one for all that are too rare for the vocabulary, one for what comes before a file.
UNKNOWN, FILE_START = 0, 1

PROMPTS = ["import", "    def __init__(self", "for i in range(", "raise ValueError(", "if not isinstance("]


def read_corpus(args: Namespace) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Read the standard library of the Python that runs this. Every sixteenth file is held out.

    Returns the vocabulary and, as (tokens, context + 1) arrays of its indices, every token of the training and of the
    held-out text, each in a row with the tokens before it: the last column is to be predicted from the others.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if path.stat().st_size]
    files = [path for path in files if not SKIPPED_FOLDERS & set(path.relative_to(library).parts)]
    random.Random(args.seed).shuffle(files)
    texts = [TOKEN.findall(path.read_text(encoding="utf-8", errors="replace")) for path in files[: args.max_files]]
    if len(texts) < 2:
        raise FileNotFoundError(f"found {len(texts)} files of Python in {library}; it takes one to train, one to test")
    held_out, training = texts[::16], [text for index, text in enumerate(texts) if index % 16]

    counts = Counter(chain.from_iterable(training))
    vocabulary = ["<unknown>", "<file>", *sorted(token for token, count in counts.items() if count >= args.min_count)]
    number = {token: index for index, token in enumerate(vocabulary)}

    def windows(texts: list[list[str]]) -> np.ndarray:
        start = [FILE_START] * args.context
        indices = [i for text in texts for i in chain(start, (number.get(token, UNKNOWN) for token in text))]
        rows = np.lib.stride_tricks.sliding_window_view(np.array(indices, np.int32), args.context + 1)
        return rows[rows[:, -1] != FILE_START]

    return vocabulary, windows(training), windows(held_out)


class Model:
    """The parameters, a step of training, and what can be asked of them. Every rank calls every method alike."""

    def __init__(self, comm: MPI.Intracomm, unigram: np.ndarray, args: Namespace) -> None:
        """`unigram`: the log-probability of each token of the vocabulary, whatever comes before it."""
        self.comm, self.context = comm, args.context
        self.classes = slice(*pce_mpi.shard_range(len(unigram), comm.size, comm.rank))
        rng = np.random.default_rng(args.seed)
        inputs = args.context * args.embed
        # The same on every rank:
        self.embedding = 0.1 * rng.standard_normal((len(unigram), args.embed), np.float32)
        self.w = rng.standard_normal((inputs, args.hidden), np.float32) / np.float32(inputs**0.5)
        self.b = np.zeros(args.hidden, np.float32)
        # This rank's classes. While u is 0, the model is the unigram model: training starts from there.
        self.c = unigram[self.classes].astype(np.float32)
        self.u = np.zeros((args.hidden, len(self.c)), np.float32)
        self.du = np.empty_like(self.u)
        self.logits = np.empty((args.batch, len(self.c)), np.float32)

    def forward(self, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x and h, the same on every rank, and the logits of this rank's classes, in a buffer that is used again."""
        x = self.embedding[contexts].reshape(len(contexts), -1)
        h = np.tanh(x @ self.w + self.b)
        logits = np.matmul(h, self.u, out=self.logits[: len(contexts)])
        logits += self.c
        return x, h, logits

    def train(self, contexts: np.ndarray, targets: np.ndarray, rate: float, embedding_rate: float) -> float:
        """One step of gradient descent. Returns the loss before it.

        `dh` stands for the derivative of the loss by h, and so on. Where y = x @ w, dw = x.T @ dy and dx = dy @ w.T.
        """
        x, h, logits = self.forward(contexts)

        # dlogits = (softmax(logits) - onehot(targets)) / rows, written over the logits.
        loss, dlogits = pce_mpi.softmax_cross_entropy_value_and_grad(logits, targets, comm=self.comm, out=logits)

        # dh is a sum over classes: each rank has the sum over its own, and together they have it all.
        dh = dlogits @ self.u.T
        self.comm.Allreduce(MPI.IN_PLACE, dh, op=MPI.SUM)

        # u and c stay where their classes are, and so do their derivatives: nothing is sent.
        np.matmul(h.T, dlogits, out=self.du)
        self.du *= rate
        self.u -= self.du
        self.c -= rate * dlogits.sum(axis=0)

        # Below h every rank computes the same from the same.
        da = dh * (1 - h * h)  # a = x @ w + b, and tanh' = 1 - tanh**2
        dx = (da @ self.w.T).reshape(contexts.size, -1)
        self.w -= rate * (x.T @ da)
        self.b -= rate * da.sum(axis=0)

        # The embedding of a token gets the sum of dx over its places in the batch: sorting brings these together. They
        # are few, and dx is divided by all rows, as the loss is a mean: without that, rare tokens would hardly move.
        order = np.argsort(contexts, axis=None, kind="stable")
        tokens, first = np.unique(contexts.ravel()[order], return_index=True)
        self.embedding[tokens] -= embedding_rate * len(contexts) * np.add.reduceat(dx[order], first)
        return float(loss)

    def loss(self, contexts: np.ndarray, targets: np.ndarray) -> float:
        """The mean loss, in nats, of any number of rows."""
        total = 0.0
        for first in range(0, len(targets), len(self.logits)):
            part = slice(first, first + len(self.logits))
            _, _, logits = self.forward(contexts[part])
            total += float(pce_mpi.softmax_cross_entropy(logits, targets[part], comm=self.comm, reduction="sum"))
        return total / len(targets)

    def complete(self, prompt: list[int], length: int, temperature: float, rng: np.random.Generator) -> list[int]:
        """The next `length` tokens after `prompt`, drawn at random.

        The argmax of logits / temperature + Gumbel noise is a draw from softmax(logits / temperature), so no rank has
        to see all logits. Each draws the noise of all classes, the same everywhere, and uses that of its own.
        """
        tokens = [FILE_START] * self.context + prompt
        for _ in range(length):
            _, _, logits = self.forward(np.array([tokens[-self.context :]]))
            noise = rng.gumbel(size=len(self.embedding))
            noise[[UNKNOWN, FILE_START]] = -np.inf
            logits += temperature * noise[self.classes]
            tokens += pce_mpi.class_statistics(logits, comm=self.comm).argmax.tolist()
        return tokens[-length:]


def train(model: Model, windows: np.ndarray, args: Namespace) -> list[dict[str, float]]:
    """Train on batches drawn at random, the same on every rank. Returns the history, step by step."""
    rng = np.random.default_rng(args.seed)
    history: list[dict[str, float]] = []
    start = time.perf_counter()
    with tqdm(range(1, args.steps + 1), unit="step", disable=model.comm.rank > 0) as progress:
        for step in progress:
            # Rates rise during the first twentieth of the steps, then fall to zero.
            schedule = min(20 * step / args.steps, 1 - (step - 1) / args.steps)
            batch = windows[rng.integers(len(windows), size=args.batch)]
            loss = model.train(batch[:, :-1], batch[:, -1], args.rate * schedule, args.embedding_rate * schedule)
            history.append({"step": step, "loss": loss, "seconds": round(time.perf_counter() - start, 3)})
            progress.set_postfix(loss=f"{np.mean([entry['loss'] for entry in history[-50:]]):.3f}", refresh=False)
    return history


def plot(path: Path, losses: list[float], unigram_loss: float) -> None:
    """Draw the loss of each step, and that of the unigram model on all of the training text."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss on training text (nats a token)")
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=0.5, label="this model")
    axes.axhline(unigram_loss, color="C1", linestyle="--", label="unigram model")
    axes.legend()
    figure.savefig(path)


def parse_arguments(comm: MPI.Intracomm) -> Namespace:
    """The command line. Rank 0 reads it for all, so that what there is to say about it is said once."""

    def whole_number(text: str, least: int) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")
        return int(text)

    def writable(text: str) -> Path:
        try:
            Path(text).open("ab").close()
        except OSError as error:
            raise ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
        return Path(text)

    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, least, default, meaning in (
        ("steps", 1, 800, "training steps"),
        ("batch", 1, 256, "tokens to predict in one step"),
        ("context", 1, 4, "tokens that a prediction is made from"),
        ("embed", 1, 128, "length of the vector that stands for a token of the context"),
        ("hidden", 1, 128, "width of the hidden layer"),
        ("min-count", 1, 2, "tokens that occur less often in the training text are unknown"),
        ("test-tokens", 1, 20_000, "held-out tokens to test on, at most"),
        ("max-files", 2, 100_000, "files to read, at most"),
        ("seed", 0, 0, "decides which files are held out, the initial values, and the order of training"),
    ):
        kind, text = partial(whole_number, least=least), f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, metavar="N", default=default, help=text)
    parser.add_argument("--rate", type=float, default=3.0, help="learning rate (default: 3)")
    parser.add_argument("--embedding-rate", type=float, default=1.0, help="that of the embeddings (default: 1)")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw the loss curve (needs matplotlib)")
    parser.add_argument("--log", type=writable, metavar="FILE", help="write step, loss and seconds as lines of JSON")
    outcome: Namespace | SystemExit | None = None
    if comm.rank == 0:
        try:
            outcome = parser.parse_args()
        except SystemExit as end:
            outcome = end
    outcome = comm.bcast(outcome)
    if isinstance(outcome, SystemExit):
        MPI.Finalize()  # Else mpi4py takes the status for a failure and aborts the job, with a message of its own.
        raise outcome
    return outcome


def main() -> None:
    start = time.perf_counter()
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm)
    # Read once and sent: on another host, Python may have another standard library.
    vocabulary, training, held_out = comm.bcast(read_corpus(args) if comm.rank == 0 else None)

    rng = np.random.default_rng(args.seed)
    held_out = rng.permutation(held_out)[: args.test_tokens]

    # The model to beat: how often each token occurs, plus one, so that none has probability 0.
    counts = np.bincount(training[:, -1], minlength=len(vocabulary)) + 1
    unigram = np.log(counts / counts.sum())

    model = Model(comm, unigram, args)
    if comm.rank == 0:
        share = f"{len(model.c):,} of {len(vocabulary):,} tokens of the vocabulary"
        print(f"training on {len(training):,} tokens; rank 0 of {comm.size} holds {share}", flush=True)
    history = train(model, training, args)
    model_loss = model.loss(held_out[:, :-1], held_out[:, -1])
    number = {token: index for index, token in enumerate(vocabulary)}
    prompts = [[number.get(token, UNKNOWN) for token in TOKEN.findall(prompt)] for prompt in PROMPTS]
    completions = [model.complete(prompt, length=24, temperature=0.7, rng=rng) for prompt in prompts]
    if comm.rank > 0:
        return

    unknown = np.mean(held_out[:, -1] == UNKNOWN)
    print(f"\n{len(held_out):,} held-out tokens, {unknown:.1%} of them not in the vocabulary")
    print(f"{'':<15}{'nats a token':>14}{'perplexity':>12}")
    # Less than on training text: rare tokens, the hardest to predict, here are mostly unknown, and those count as one.
    for name, loss in (("unigram model", -unigram[held_out[:, -1]].mean()), ("this model", model_loss)):
        print(f"{name:<15}{loss:14.3f}{np.exp(loss):12.1f}")
    print("\nCompletions, from the bar on:")
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"\n{prompt}|{''.join(vocabulary[token] for token in completion)}")
    if args.log:
        args.log.write_text("".join(json.dumps(entry) + "\n" for entry in history), encoding="utf-8")
    if args.plot:
        plot(args.plot, [entry["loss"] for entry in history], -unigram[training[:, -1]].mean())
    print(f"\n{time.perf_counter() - start:.0f} s in all; ranks: {comm.size}")


if __name__ == "__main__":
    main()
