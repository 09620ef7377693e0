"""What a run reports of its epochs: a line each, a summary, and the log: metrics.jsonl and TensorBoard's curves.

An epoch's metrics are a dict; what was not measured, or does not exist, is None:

- epoch: counted from 1;
- loss: the mean over all steps and processes;
- lr: the learning rate of its steps;
- accuracy: of the test images, in [0, 1];
- images_per_second: of all processes, while they trained;
- seconds: that the training steps took;
- loss_scale: after them, in fp16;
- peak_memory_mib: the most that the process has allocated on its GPU so far.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from resnet_cifar10.failure import fail_together
from resnet_cifar10.files import replacement

FILE = "metrics.jsonl"


def of_epoch(
    epoch: int, loss: float, lr: float, accuracy: float | None, images: int, seconds: float, loss_scale: float
) -> dict:
    """An epoch's metrics, of as many ``images`` in as many ``seconds``; a ``loss_scale`` of 0 stands for none."""
    import torch

    return {
        "epoch": epoch,
        "loss": loss,
        "lr": lr,
        "accuracy": accuracy,
        "images_per_second": images / seconds,
        "seconds": seconds,
        "loss_scale": loss_scale or None,
        "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
    }


def epoch_line(metrics: dict, epochs: int) -> str:
    """An epoch's metrics, for the terminal."""
    line = (
        f"Epoch [{metrics['epoch']}/{epochs}]: mean loss {metrics['loss']:.4f}, "
        f"learning rate {metrics['lr']:.3g}, {metrics['images_per_second']:,.0f} images/s, "
        f"{metrics['seconds']:.1f} s"
    )
    return line if metrics["accuracy"] is None else f"{line}, accuracy {100 * metrics['accuracy']:.2f} %"


def summary_line(history: list[dict], seconds: float, checkpoints: int) -> str:
    """A run's epochs in one line; ``seconds`` are those of the whole run."""
    training = sum(metrics["seconds"] for metrics in history)
    images = sum(metrics["images_per_second"] * metrics["seconds"] for metrics in history)
    memory = history[-1]["peak_memory_mib"] if history else None
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
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not a log of training: move it away, or log elsewhere") from error
    return history


def open_log(folder: Path | None, start_epoch: int) -> Callable[[dict], None]:
    """Go on with the log in ``folder`` from ``start_epoch``, or begin one.

    All processes call this and what it returns; the first one writes. A failure to do so ends the run with one line.

    Returns:
        A function that logs an epoch's metrics; without a ``folder`` it does nothing. Called for the first time, it
        drops what an earlier run has logged from ``start_epoch`` on.
    """
    import torch.distributed as dist

    if folder is None:
        return lambda metrics: None
    is_master = dist.get_rank() == 0
    history, curves = [], None
    with fail_together():
        if is_master:
            history = [metrics for metrics in read(folder) if metrics["epoch"] < start_epoch]

    def log(metrics: dict) -> None:
        nonlocal curves
        with fail_together():
            if is_master:
                history.append(metrics)
                with replacement(folder / FILE) as path:
                    path.write_text("".join(json.dumps(metrics) + "\n" for metrics in history))
                if curves is None:
                    curves = _draw_curves(folder, history)
                else:
                    curves([metrics])

    return log


def _draw_curves(folder: Path, history: list[dict]) -> Callable[[list[dict]], None]:
    """Draw TensorBoard's curves of ``history``, in place of those there are; return a function that draws more.

    Anew, for TensorBoard shows points that an earlier run has drawn whatever a later one says of them.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(f"warning: no curves in {folder}, only {FILE}: pip install tensorboard adds them", file=sys.stderr)
        return lambda history: None
    suffix = ".metrics"
    for path in folder.glob(f"events.out.tfevents.*{suffix}"):
        path.unlink()
    writer = SummaryWriter(str(folder), filename_suffix=suffix)

    def draw(history: list[dict]) -> None:
        for metrics in history:
            for name, value in metrics.items():
                if name != "epoch" and value is not None:
                    writer.add_scalar(name, value, metrics["epoch"])
        writer.flush()

    draw(history)
    return draw
