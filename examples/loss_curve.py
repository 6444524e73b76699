"""A picture of how training went."""

from pathlib import Path


def plot(path: Path, history: list[dict[str, float]], unigram_loss: float) -> None:
    """Draw the loss of each step, and that of the unigram model on all of the training text."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss on training text (nats a token)")
    axes.plot(
        [entry["step"] for entry in history], [entry["loss"] for entry in history], linewidth=0.5, label="this model"
    )
    axes.axhline(unigram_loss, color="C1", linestyle="--", label="unigram model")
    axes.legend()
    figure.savefig(path)
