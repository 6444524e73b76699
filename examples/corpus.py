"""The text that the example models learn: Python's standard library, as tokens."""

from argparse import Namespace
from collections import Counter
from itertools import chain
from pathlib import Path
import random
import re
import sysconfig
from typing import NamedTuple

from mpi4py import MPI
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# A word or punctuation with the space before it, the end of a line with the indentation of the next, or white space.
# No character is lost: "".join(tokens) is the text.
TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s*\n *|\s+")

# Installed packages, tests, tables of character codes, and the manual, which is one file as long as fifty others.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# Two tokens that no text has: one for tokens that are too rare for the vocabulary, one that precedes each file.
UNKNOWN, FILE_START = 0, 1


class Corpus(NamedTuple):
    """The vocabulary, and the files as indices into it."""

    vocabulary: list[str]
    training: list[np.ndarray]
    held_out: list[np.ndarray]

    def encode(self, text: str) -> list[int]:
        number = {token: index for index, token in enumerate(self.vocabulary)}
        return [number.get(token, UNKNOWN) for token in TOKEN.findall(text)]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.vocabulary[token] for token in tokens)

    def unigram(self) -> np.ndarray:
        """Return the log-probability of each token without any context, which the models have to beat."""
        counts = np.bincount(np.concatenate(self.training), minlength=len(self.vocabulary)) + 1
        counts[FILE_START] += len(self.training)
        return np.log(counts / counts.sum())


def read_corpus(comm: MPI.Intracomm, args: Namespace) -> Corpus:
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

    def indices(text: list[str]) -> np.ndarray:
        return np.array([number.get(token, UNKNOWN) for token in text], np.int32)

    return comm.bcast(Corpus(vocabulary, [*map(indices, training)], [*map(indices, held_out)]))


def contexts(files: list[np.ndarray], length: int) -> np.ndarray:
    """Return a row for each token of the files, with the `length` tokens before it: (tokens, length + 1)."""
    texts = [np.pad(tokens, (length, 0), constant_values=FILE_START) for tokens in files]
    return np.concatenate([sliding_window_view(text, length + 1) for text in texts])


def passages(files: list[np.ndarray], length: int) -> np.ndarray:
    """Return each run of `length` tokens of all files, FILE_START before each file, as a view: copies are large."""
    texts = [np.pad(tokens, (1, 0), constant_values=FILE_START) for tokens in files]
    return sliding_window_view(np.concatenate(texts), length)
