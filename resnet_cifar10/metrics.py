"""What a run reports: one line per epoch, a summary, and a log in metrics.jsonl and for TensorBoard.

The metrics of an epoch are a dict. A value that was not measured or does not exist is None.

- epoch: counts from 1;
- loss: mean over all steps and processes;
- lr: learning rate;
- accuracy: on the test images, in [0, 1];
- images_per_second: of all processes, while training;
- seconds: of training;
- loss_scale: at the end of the epoch, in fp16;
- peak_memory_mib: the most memory that the process has allocated on its GPU so far.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from resnet_cifar10.runtime import fail_together, replacement

import torch.distributed as dist

FILE = "metrics.jsonl"


def epoch_line(metrics: dict, epochs: int) -> str:
    """The metrics of an epoch for the terminal."""
    line = (
        f"Epoch [{metrics['epoch']}/{epochs}]: mean loss {metrics['loss']:.4f}, learning rate {metrics['lr']:.3g}, "
        f"{metrics['images_per_second']:,.0f} images/s, {metrics['seconds']:.1f} s"
    )
    return line if metrics["accuracy"] is None else f"{line}, accuracy {100 * metrics['accuracy']:.2f} %"


def summary_line(history: list[dict], seconds: float) -> str:
    """The epochs of a run in one line; ``seconds`` is the time of the whole run."""
    line = f"Trained {len(history)} epoch(s) in {seconds:.1f} s"
    if history:
        images = sum(metrics["images_per_second"] * metrics["seconds"] for metrics in history)
        line += f", {images / sum(metrics['seconds'] for metrics in history):,.0f} images/s while training"
        if memory := history[-1]["peak_memory_mib"]:
            line += f", peak device memory {memory:,.0f} MiB"
    return line


def read(folder: Path) -> list[dict]:
    """Read the log in ``folder``, one dict per epoch; none if there is no log.

    Raises:
        ValueError: the file cannot be read, or is not a log.
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
    """Continue the log in ``folder`` from ``start_epoch``, or start one.

    Returns:
        A function that logs the metrics of an epoch; without a ``folder`` it does nothing. Rank 0 writes, and prints a
        warning if that fails. The first call drops the epochs from ``start_epoch`` on that an earlier run has logged.
    """
    if folder is None:
        return lambda metrics: None
    is_master = dist.get_rank() == 0
    history, SummaryWriter, writer = [], None, None
    with fail_together():
        if is_master:
            history = [metrics for metrics in read(folder) if metrics["epoch"] < start_epoch]
            try:
                from torch.utils.tensorboard import SummaryWriter
            except Exception as error:  # whatever an old or broken package raises
                print(f"warning: no curves in {folder}: pip install tensorboard first ({error})", file=sys.stderr)

    def log(metrics: dict) -> None:
        nonlocal writer
        if not is_master:
            return
        history.append(metrics)
        try:
            with replacement(folder / FILE) as path:
                path.write_text("".join(json.dumps(each) + "\n" for each in history))
            if SummaryWriter is None:
                return
            undrawn = [metrics]
            if writer is None:  # TensorBoard also shows what earlier runs have drawn: start a new file
                for path in folder.glob("events.out.tfevents.*.metrics"):
                    path.unlink()
                writer = SummaryWriter(str(folder), filename_suffix=".metrics")
                undrawn = history
            for each in undrawn:
                for name, value in each.items():
                    if name != "epoch" and value is not None:
                        writer.add_scalar(name, value, each["epoch"])
            writer.flush()
        except Exception as error:  # a run is worth more than its log
            print(f"warning: cannot log epoch {metrics['epoch']}: {error}", file=sys.stderr)

    return log
