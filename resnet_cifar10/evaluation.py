"""One model, one number: an accuracy that does not depend on how many processes measure it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from resnet_cifar10.data import CLASSES, to_float

BATCH_SIZE = 500
"""The most images in a batch; a smaller set is one batch."""


@torch.no_grad()
def average_batch_norm_statistics(model: nn.Module) -> None:
    """Replace the running means and variances of every BatchNorm by their averages over all processes.

    Where BatchNorm is not synchronised, each process gathers its own; one model, to save or to evaluate, needs one set.
    """
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    flat = parameters_to_vector(buffer.float() for buffer in statistics)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, average in zip(statistics, flat.split([buffer.numel() for buffer in statistics])):
        buffer.copy_(average.view_as(buffer))


@torch.no_grad()
def confusion_matrix(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Count, class by class, what ``model`` predicts.

    Each image counts once. With a process group, the processes take turns at the batches, all of them must call this
    with the same images, and all get the same numbers. Rows of padding, labelled -1, make all batches equally large and
    give each process as many: DDP and Gemini communicate in forward, and an image's logits can depend on the shape of
    its batch.

    Args:
        model: gives logits of shape (B, 10) for float32 images of shape (B, 3, 32, 32) in [0, 1]; left in evaluation
            mode.
        images: uint8 of shape (N, 3, 32, 32), on the model's device.
        labels: int64 of shape (N,), there too.

    Returns:
        int64 of shape (10, 10), on the CPU: how many images of each class (row) were predicted as each class (column).
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batch_size = min(BATCH_SIZE, len(labels))  # whatever the number of processes
    padding = -len(labels) % (batch_size * world_size)
    batches = F.pad(images, (0, 0, 0, 0, 0, 0, 0, padding)).split(batch_size)[rank::world_size]
    targets = F.pad(labels, (0, padding), value=-1).split(batch_size)[rank::world_size]

    model.eval()
    counts = torch.zeros(CLASSES + 1, CLASSES, dtype=torch.int64, device=labels.device)  # the last row for the padding
    for batch, target in zip(batches, targets):
        predictions = model(to_float(batch)).argmax(dim=1)
        counts.index_put_((target, predictions), torch.ones_like(target), accumulate=True)
    if world_size > 1:
        dist.all_reduce(counts)
    return counts[:CLASSES].cpu()


def accuracy_of(confusion: Tensor) -> float:
    """The share of images, in [0, 1], that a :func:`confusion_matrix` counts in their own class."""
    return confusion.trace().item() / confusion.sum().item()


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The accuracy of ``model``, in [0, 1]; for the arguments see :func:`confusion_matrix`."""
    return accuracy_of(confusion_matrix(model, images, labels))


def accuracy_line(accuracy: float) -> str:
    """How both scripts print an accuracy in [0, 1]."""
    return f"Accuracy of the model on the test images: {100 * accuracy:.2f} %"
