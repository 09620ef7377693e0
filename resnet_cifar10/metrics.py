"""What a run reports of its epochs: a line each, a summary, and the log: metrics.jsonl and TensorBoard's curves.

An epoch's metrics are a dict of numbers by name, of which "epoch" counts from 1, "loss" is the mean one, "accuracy" is
in [0, 1], "seconds" are those of the training steps, and "peak_memory" is that of the first process's GPU in MiB. What
was not measured, or does not exist, is None.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from resnet_cifar10.failure import fail_together
from resnet_cifar10.files import replacement

FILE = "metrics.jsonl"


def epoch_line(metrics: dict, epochs: int) -> str:
    """An epoch's metrics, for the terminal."""
    line = (
        f"Epoch [{metrics['epoch']}/{epochs}]: mean loss {metrics['loss']:.4f}, "
        f"learning rate {metrics['learning_rate']:.3g}, {metrics['images_per_second']:,.0f} images/s, "
        f"{metrics['seconds']:.1f} s"
    )
    return line if metrics["accuracy"] is None else f"{line}, accuracy {100 * metrics['accuracy']:.2f} %"


def summary_line(history: list[dict], seconds: float, checkpoints: int) -> str:
    """A run's epochs in one line; ``seconds`` are those of the whole run."""
    training = sum(metrics["seconds"] for metrics in history)
    images = sum(metrics["images_per_second"] * metrics["seconds"] for metrics in history)
    memory = history[-1]["peak_memory"] if history else None
    parts = [
        f"Trained {len(history)} epoch(s) in {seconds:.1f} s",
        f"{images / training:,.0f} images/s while training" if history else None,
        f"peak device memory {memory:,.0f} MiB" if memory is not None else None,
        f"{checkpoints} checkpoint(s) written",
    ]
    return ", ".join(filter(None, parts))


def read(folder: Path) -> list[dict]:
    """The metrics logged in ``folder``, an epoch after the other; none where there is no log.

    Raises:
        ValueError: the log is not as :func:`open_log` writes it.
    """
    path = folder / FILE
    try:
        history = [json.loads(line) for line in path.read_text().splitlines()]
        if not all(type(metrics["epoch"]) is int for metrics in history):
            raise ValueError
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not a log of train.py: move it away, or log elsewhere") from error
    return history


def open_log(folder: Path | None, epoch: int) -> Callable[[dict], None]:
    """Go on with the log in ``folder`` after ``epoch``, or begin one; what it holds of later epochs is dropped.

    All processes call this and what it returns; the first one writes. A failure to do so ends the run with one line.

    Returns:
        A function that logs an epoch's metrics; without a ``folder`` it does nothing.
    """
    if folder is None:
        return lambda metrics: None
    is_master = dist.get_rank() == 0
    history, curves = [], None
    with fail_together():
        if is_master:
            history = [metrics for metrics in read(folder) if metrics["epoch"] <= epoch]
            curves = _open_curves(folder, epoch)

    def log(metrics: dict) -> None:
        with fail_together():
            if is_master:
                history.append(metrics)
                with replacement(folder / FILE) as path:
                    path.write_text("".join(json.dumps(metrics) + "\n" for metrics in history))
                if curves is not None:
                    for name, value in metrics.items():
                        if name != "epoch" and value is not None:
                            curves.add_scalar(name, value, metrics["epoch"])
                    curves.flush()

    return log


def _open_curves(folder: Path, epoch: int):
    """TensorBoard's writer, or, without TensorBoard, None and a line that says how to get it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(f"TensorBoard is not installed: {folder / FILE} alone is written; pip install tensorboard adds curves")
        return None
    return SummaryWriter(str(folder), purge_step=epoch + 1)  # from there on, TensorBoard forgets what it has seen
