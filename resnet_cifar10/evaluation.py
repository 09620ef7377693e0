"""Accuracy that does not depend on the number of processes."""

from resnet_cifar10.data import CLASSES, to_float

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

BATCH_SIZE = 500
"""The maximum batch size."""


@torch.no_grad()
def average_batch_norm_statistics(model: nn.Module) -> None:
    """Replace the running means and variances of every BatchNorm by their averages over all processes.

    Without SyncBatchNorm, each process has its own statistics. To save or evaluate one model, they must be equal.
    """
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not statistics:
        return
    flat = parameters_to_vector(buffer.float() for buffer in statistics)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, average in zip(statistics, flat.split([buffer.numel() for buffer in statistics])):
        buffer.copy_(average.view_as(buffer))


@torch.no_grad()
def confusion_matrix(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Count the predictions of ``model`` for each class. Each image counts once.

    If there is a process group, every process must call this with the same images. They share the batches, and all
    return the same numbers. The images are padded, with the label -1, so that every process has as many batches, and
    all batches have one size: DDP and Gemini communicate in forward, and logits can depend on the batch size.

    Args:
        model: takes float32 images of shape (B, 3, 32, 32) in [0, 1] and returns logits of shape (B, 10). It is left in
            evaluation mode.
        images: uint8 of shape (N, 3, 32, 32), on the device of the model.
        labels: int64 of shape (N,), on the same device.

    Returns:
        int64 of shape (10, 10), on the CPU: the number of images of each class (row) by predicted class (column).
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batch_size = min(BATCH_SIZE, len(labels))
    padding = -len(labels) % (batch_size * world_size)
    batches = F.pad(images, (0, 0, 0, 0, 0, 0, 0, padding)).split(batch_size)[rank::world_size]
    targets = F.pad(labels, (0, padding), value=-1).split(batch_size)[rank::world_size]

    model.eval()
    counts = torch.zeros(CLASSES + 1, CLASSES, dtype=torch.int64, device=labels.device)  # last row: padding
    for batch, target in zip(batches, targets):
        predictions = model(to_float(batch)).argmax(dim=1)
        counts.index_put_((target, predictions), torch.ones_like(target), accumulate=True)
    if world_size > 1:
        dist.all_reduce(counts)
    return counts[:CLASSES].cpu()


def accuracy_of(confusion: Tensor) -> float:
    """The accuracy, in [0, 1], from a :func:`confusion_matrix`."""
    return confusion.trace().item() / confusion.sum().item()


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The accuracy of ``model``, in [0, 1]; for the arguments see :func:`confusion_matrix`."""
    return accuracy_of(confusion_matrix(model, images, labels))


def accuracy_line(accuracy: float) -> str:
    """The line that both scripts print for an accuracy in [0, 1]."""
    return f"Accuracy of the model on the test images: {100 * accuracy:.2f} %"
