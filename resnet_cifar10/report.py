"""Tables and a plot of confusion matrices.

``confusions`` has a matrix of :func:`resnet_cifar10.evaluation.confusion_matrix` for each epoch.
"""

import os
import sys
from pathlib import Path

from resnet_cifar10.evaluation import accuracy_of
from resnet_cifar10.runtime import replacement

from torch import Tensor

CONFUSED_PAIRS = 5


def best_epoch(confusions: dict[int, Tensor]) -> int:
    """The first epoch with the highest accuracy."""
    return max(confusions, key=lambda epoch: (accuracy_of(confusions[epoch]), -epoch))


def accuracy_table(confusions: dict[int, Tensor]) -> str:
    """One line per epoch, with a mark at the best."""
    best = best_epoch(confusions)
    rows = [
        f"{epoch:5}  {100 * accuracy_of(confusion):6.2f} %{'  best' if epoch == best else ''}"
        for epoch, confusion in confusions.items()
    ]
    return "\n".join(["epoch  accuracy", *rows])


def class_table(confusion: Tensor, names: list[str]) -> str:
    """One line per class, and one for each of the most confused pairs of classes."""
    width = max(map(len, ["class", *names]))
    lines = [f"{'class':{width}}  accuracy  images"]
    for name, row, right in zip(names, confusion, confusion.diagonal().tolist()):
        images = row.sum().item()
        lines.append(f"{name:{width}}  {100 * right / images:6.2f} %  {images:6}")
    mistakes = confusion.clone().fill_diagonal_(0)
    pairs = [divmod(pair, len(names)) for pair in mistakes.flatten().argsort(descending=True, stable=True).tolist()]
    for i, j in pairs[:CONFUSED_PAIRS]:
        if mistakes[i, j]:
            lines.append(f"{names[i]} predicted as {names[j]}: {mistakes[i, j]}")
    return "\n".join(lines)


def can_plot() -> bool:
    """Whether matplotlib can be imported; if not, print a warning."""
    os.environ.pop("MPLBACKEND", None)  # of a notebook, it may not exist here
    try:
        import matplotlib  # noqa: F401

        return True
    except Exception as error:  # whatever an old or broken package raises
        print(f"warning: no plot: pip install matplotlib first ({error})", file=sys.stderr)
        return False


def plot(path: Path, confusions: dict[int, Tensor], names: list[str]) -> None:
    """Write a PNG file with the confusion matrix of the best epoch and, for several epochs, their accuracies.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.rcdefaults()
    best = best_epoch(confusions)
    confusion = confusions[best]
    several = len(confusions) > 1
    figure = Figure(figsize=(11 if several else 6, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if several else 1, squeeze=False)[0]

    names = [name.replace("$", r"\$") for name in names]  # $ would start a formula
    shares = confusion / confusion.sum(dim=1, keepdim=True)
    axes[0].imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes[0].set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(title=f"Epoch {best}: {100 * accuracy_of(confusion):.2f} %", xlabel="predicted", ylabel="class")
    for i, row in enumerate(confusion.tolist()):
        for j, count in enumerate(row):
            axes[0].text(
                j, i, count, ha="center", va="center", size=8, color="white" if shares[i, j] > 0.5 else "black"
            )

    if several:
        axes[1].plot(list(confusions), [100 * accuracy_of(confusion) for confusion in confusions.values()], marker="o")
        axes[1].set(title="Test images", xlabel="epoch", ylabel="accuracy in %")
        axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[1].grid(alpha=0.3)

    with replacement(path) as new:
        figure.savefig(new, format="png", dpi=100)
