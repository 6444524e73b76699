"""Evaluate a trained model: its perplexity on held-out text, beside the unigram model's, and text that it writes."""

from argparse import Namespace
from typing import Protocol

import numpy as np

from corpus import FILE_START, UNKNOWN, Corpus
import pce_mpi as pce

PROMPTS = ["import", "    def __init__(self", "for i in range(", "raise ValueError(", "if not isinstance("]


class Model(Protocol):
    """A model whose methods are collective over its mesh."""

    mesh: pce.Mesh

    def loss(self, rows: np.ndarray) -> pce.DistArray:
        """Return the mean loss over the targets of each row."""

    def next_logits(self, tokens: list[int]) -> pce.DistArray:
        """Return the logits, (vocabulary,), of the token after `tokens`; the vocabulary may be sharded."""


def mean_loss(model: Model, rows: np.ndarray, batch: int) -> float:
    """Return the mean loss, in nats, of any number of rows."""
    with pce.no_grad():
        parts = [rows[first : first + batch] for first in range(0, len(rows), batch)]
        return sum(len(part) * model.loss(part).item() for part in parts) / len(rows)


def complete(model: Model, tokens: list[int], length: int, temperature: float, rng: np.random.Generator) -> list[int]:
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
            noisy = logits + temperature * noise
            comm = noisy.mesh.comm(*noisy.sharding.dims_of(0))
            written.append(int(pce.class_statistics(noisy.local, comm=comm).argmax))
    return written


def evaluate(model: Model, corpus: Corpus, rows: np.ndarray, predicted: slice, args: Namespace) -> None:
    """Print the perplexity of the model on `rows`, whose columns `predicted` are its targets, and some completions."""
    rng = np.random.default_rng(args.seed)
    targets_a_row = rows[:1, predicted].size
    rows = rows[rng.permutation(len(rows))[: max(1, args.test_tokens // targets_a_row)]]
    targets = rows[:, predicted]
    losses = {"unigram model": -corpus.unigram()[targets].mean(), "this model": mean_loss(model, rows, args.batch)}
    prompts = [[FILE_START, *corpus.encode(prompt)] for prompt in PROMPTS]
    completions = [complete(model, prompt, args.write, temperature=0.7, rng=rng) for prompt in prompts]
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
