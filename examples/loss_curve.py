"""Plot the loss during training."""

from pathlib import Path

import numpy as np

from pce_mpi.conformance.reports.files import write_figure

WINDOW = 50  # steps that the smooth curve averages over


def plot(path: Path, history: list[dict[str, float]], unigram_loss: float, ranks: int) -> None:
    """Draw the loss of each step, its running mean, and the unigram model's loss on all of the training text."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, losses = (np.array([entry[name] for entry in history]) for name in ("step", "loss"))
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    mean = (sums[ends] - sums[starts]) / (ends - starts)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="training step", ylabel="loss on training text (nats a token)")
    axes.set_title(f"Loss of each training step, on {ranks} rank{'s' * (ranks > 1)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.plot(steps, losses, ".", color="C0", markersize=4, alpha=0.4, label="this model, one batch")
    axes.plot(steps, mean, color="C0", linewidth=2, label=f"this model, mean of the last {WINDOW} batches")
    axes.axhline(unigram_loss, color="C1", linewidth=2, linestyle="--", label="unigram model, all training text")
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(path, figure)
