"""The text that the example models learn: Python's own standard library, cut into tokens."""

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

# A word or some punctuation, with the space before it; the end of a line, with the indentation of the next; or a gap.
# No character is lost: "".join(tokens) is the text again.
TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s*\n *|\s+")

# Not read: what was installed later, tests, tables of character codes, and the manual (one file, as long as fifty).
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# Two tokens that no text has: one for all that are too rare for the vocabulary, one for what comes before a file.
UNKNOWN, FILE_START = 0, 1


class Corpus(NamedTuple):
    """The tokens that are known, and the files as indices into them."""

    vocabulary: list[str]
    training: list[np.ndarray]
    held_out: list[np.ndarray]

    def encode(self, text: str) -> list[int]:
        number = {token: index for index, token in enumerate(self.vocabulary)}
        return [number.get(token, UNKNOWN) for token in TOKEN.findall(text)]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.vocabulary[token] for token in tokens)

    def unigram(self) -> np.ndarray:
        """The model to beat: the log-probability of each token, whatever comes before it; none has probability 0."""
        counts = np.bincount(np.concatenate(self.training), minlength=len(self.vocabulary)) + 1
        counts[FILE_START] += len(self.training)
        return np.log(counts / counts.sum())


def read_corpus(comm: MPI.Intracomm, args: Namespace) -> Corpus:
    """Rank 0's standard library, on every rank: other hosts may have another. Every sixteenth file is held out."""
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
    """Every token of the files, each in a row with the `length` tokens before it: (tokens, length + 1)."""
    texts = [np.pad(tokens, (length, 0), constant_values=FILE_START) for tokens in files]
    return np.concatenate([sliding_window_view(text, length + 1) for text in texts])


def passages(files: list[np.ndarray], length: int) -> np.ndarray:
    """Every run of `length` tokens in all files joined together, a FILE_START before each: a view, not to be copied."""
    texts = [np.pad(tokens, (1, 0), constant_values=FILE_START) for tokens in files]
    return sliding_window_view(np.concatenate(texts), length)
