"""The options of the training programs: those that they share, and further numbers of each program."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from functools import partial
from pathlib import Path

# Name, least value, default, meaning. A number is whole if its default is.
Number = tuple[str, float, float, str]


def number(text: str, least: float, whole: bool) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not least <= value <= 1e9:
        raise ArgumentTypeError(f"expected a {'whole ' * whole}number from {least} up to 1e9, got {text!r}")
    return value


def file(text: str, mode: str) -> Path:
    try:
        Path(text).open(mode).close()
    except OSError as error:
        verb = "read" if mode == "rb" else "write"
        raise ArgumentTypeError(f"cannot {verb} {text!r}: {error.strerror}") from None
    return Path(text)


def picture(text: str) -> Path:
    if Path(text).suffix not in (".png", ".pdf", ".svg"):
        raise ArgumentTypeError(f"expected a name that ends in .png, .pdf or .svg, got {text!r}")
    return file(text, "ab")


def replaceable(text: str) -> Path:
    """Check that `pce.save` will be able to write this file after the training."""
    if Path(text).exists() and not Path(text).is_file():
        raise ArgumentTypeError(f"cannot write {text!r}: only a regular file is replaced")
    return file(text, "ab")


def training_parser(docstring: str | None, numbers: Iterable[Number], **defaults: float) -> ArgumentParser:
    """Return a parser of `numbers` and of the shared options, with this program's `defaults`."""
    parser = ArgumentParser(description=(docstring or "").partition("\n")[0])
    common = [
        ("steps", 1, 100, "training steps"),
        ("batch", 1, 1, "rows of tokens in one step"),
        ("stop", 0, 0, "leave off after this step, to --resume later; 0: after the last"),
        ("rate", 0, 1.0, "learning rate"),
        ("max-norm", 0, 0.0, "longest gradient: a longer one is scaled down; 0: none is"),
        ("min-count", 1, 2, "tokens that occur less often in the training text are unknown"),
        ("test-tokens", 1, 20_000, "held-out tokens to test on, at most"),
        ("write", 0, 24, "tokens to write after each prompt, in the end"),
        ("max-files", 2, 100_000, "files to read, at most"),
        ("seed", 0, 0, "decides which files are held out, the initial values, and the order of training"),
    ]
    for name, least, default, meaning in [*numbers, *common]:
        kind, text = partial(number, least=least, whole=isinstance(default, int)), f"{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind, metavar="N", default=default, help=text)
    writable, readable = partial(file, mode="ab"), partial(file, mode="rb")
    for name, checked, meaning in (
        ("plot", picture, "draw the loss curve (needs matplotlib)"),
        ("log", writable, "write step, loss and seconds as lines of JSON"),
        ("save", replaceable, "keep parameters and optimizers, when training has ended"),
        ("resume", readable, "go on with what was kept, from any number of ranks, up to --steps"),
    ):
        parser.add_argument(f"--{name}", type=checked, metavar="FILE", help=meaning)
    parser.add_argument("--fingerprint", action="store_true", help="print the parameters' fingerprint after each step")
    parser.set_defaults(**defaults)
    return parser
