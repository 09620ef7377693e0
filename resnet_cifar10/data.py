"""CIFAR-10 as tensors on the training device, and batches made from them on that device."""

import os
import socket
from datetime import timedelta
from http.client import HTTPException
from pathlib import Path
from random import Random

from resnet_cifar10.runtime import fail_together

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

Split = tuple[Tensor, Tensor]
"""Images, uint8 of shape (N, 3, 32, 32), and their labels, int64 of shape (N,)."""

CLASSES = 10
SIZE = 32
"""Height and width of an image, in pixels."""
PADDING = 4
STALLED_SECONDS = 60
"""A download that gets no data for so long has failed."""


def load(root: Path | None, device: torch.device) -> list[Split]:
    """Load the training and the test split to ``device``. Download CIFAR-10 if needed.

    Every process calls this; for ``root`` see :func:`load_split`.

    Raises:
        SystemExit: in every process; reading or downloading them fails.
    """
    # A download can take longer than the collectives of the default process group wait
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    with fail_together(patient):
        if os.environ["LOCAL_RANK"] == "0":
            download_if_absent(root)
    with fail_together(patient):
        return [tuple(tensor.to(device) for tensor in load_split(root, split)) for split in ("train", "test")]


def _cifar10_root(root: Path) -> Path:
    """The folder that torchvision wants: the one above cifar-10-batches-py."""
    return root.absolute().parent if root.absolute().name == CIFAR10.base_folder else root


def download_if_absent(root: Path | None) -> None:
    """Download CIFAR-10 to ``root``. Do nothing if ``root`` is None or has CIFAR-10 or an image folder.

    Raises:
        ValueError: it is not there and cannot be downloaded.
    """
    if root is None or (root / "train").exists():
        return
    root = _cifar10_root(root)
    try:
        CIFAR10(root)
        return
    except (RuntimeError, OSError):  # RuntimeError: not there, or damaged
        print(f"downloading CIFAR-10 (163 MiB) to {root.absolute()}", flush=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALLED_SECONDS)
    try:
        CIFAR10(root, download=True)
    except (RuntimeError, OSError, HTTPException, ValueError) as error:
        raise ValueError(
            f"no undamaged CIFAR-10 in {root.absolute()}, and it cannot be downloaded ({error}): set DATA to a folder "
            "that has cifar-10-batches-py or train/<class>/ and test/<class>/ with images, or use --dummy"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def load_split(root: Path | None, split: str) -> Split:
    """Read a split ("train" or "test") of the data set in ``root``.

    If ``root/train`` exists, that is an image folder, else torchvision's CIFAR-10. None stands for generated images.

    Raises:
        ValueError: it is missing, damaged or of another shape; the message names the folder or file.
    """
    if root is None:
        return generate_split(split)
    if (root / "train").exists():
        return _load_image_folder(root, split)
    try:
        data = CIFAR10(_cifar10_root(root), train=split == "train")
    except RuntimeError as error:
        raise ValueError(f"no CIFAR-10 in {root.absolute()}: {error}") from error
    return _channels_first(data.data), torch.tensor(data.targets)


def _is_image(path: str) -> bool:
    """Whether ``path`` has an image's extension and is not hidden, as are the ._ files of macOS."""
    return path.lower().endswith(IMG_EXTENSIONS) and not os.path.basename(path).startswith(".")


def _open_image(path: str) -> Image.Image:
    with Image.open(path) as image:
        if image.mode.startswith(("I", "F")):  # Pillow would clip these to 0 and 255
            raise ValueError(f"its mode is {image.mode}, which is not 8-bit")
        return image.convert("RGB")


def _load_image_folder(root: Path, split: str) -> Split:
    try:
        options = dict(loader=_open_image, is_valid_file=_is_image)
        folders = {name: ImageFolder(str(root / name), **options) for name in ("train", "test")}
    except OSError as error:
        raise ValueError(f"cannot read the image folder {root.absolute()}: {error}") from error
    for name, folder in folders.items():
        if len(folder.classes) != CLASSES:
            raise ValueError(f"{root / name} has {len(folder.classes)} classes, not ten: {', '.join(folder.classes)}")
    if folders["train"].classes != folders["test"].classes:
        odd = sorted(set(folders["train"].classes) ^ set(folders["test"].classes))
        raise ValueError(f"{root}/train and {root}/test differ in their classes: {', '.join(odd)}")

    folder = folders[split]
    images = []
    for path, _ in folder.samples:
        try:
            image = np.asarray(folder.loader(path))
        except Exception as error:  # Pillow raises many kinds for a broken file
            raise ValueError(f"cannot read the image {path}: {error}") from error
        if image.shape != (SIZE, SIZE, 3):
            raise ValueError(f"the image {path} is {image.shape[1]}x{image.shape[0]} pixels, not {SIZE}x{SIZE}")
        images.append(image)
    return _channels_first(np.stack(images)), torch.tensor(folder.targets)


def class_names(root: Path | None) -> list[str]:
    """The names of the classes of the data set that :func:`load_split` reads, in the order of the labels."""
    if root is None:
        return [str(label) for label in range(CLASSES)]
    if (root / "train").exists():
        # A name that is not UTF-8 could not be plotted
        return [os.fsencode(name).decode(errors="replace") for name in find_classes(str(root / "test"))[0]]
    return "airplane automobile bird cat deer dog frog horse ship truck".split()


def _channels_first(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def generate_split(split: str, seed: int = 0) -> Split:
    """Generate a split of ten classes ("train": 10,000 images, "test": 2,000) from ``seed``.

    A class is a pattern of 4x4 coloured tiles. An image is the pattern of its class and noise.
    """
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    patterns = F.interpolate(patterns, size=(SIZE, SIZE), mode="nearest")
    size, noise_seed = (10_000, seed + 1) if split == "train" else (2_000, seed + 2)
    labels = torch.arange(size) % CLASSES
    noise = torch.randn(size, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(noise_seed))
    return (128 + 16 * patterns[labels] + 48 * noise).clamp_(0, 255).to(torch.uint8), labels


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 pixels to float32 in [0, 1], like torchvision's ``ToTensor``."""
    return images.to(torch.float32).div(255)


def flip_and_crop(padded: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Gather images, and flip and crop each one.

    The result is bit-identical to torchvision's ``Pad(4)``, ``RandomHorizontalFlip``, ``RandomCrop(32)`` and
    ``ToTensor`` with the same flips and offsets.

    Args:
        padded: all images with their padding, uint8 of shape (N, 3, 40, 40).
        index: the images to gather, int64 of shape (B,).
        top, left: offsets of the crop in the padded image, after the flip; int64 of shape (B,), from 0 to 8.
        flip: the images to flip, bool of shape (B,).

    Returns:
        float32 of shape (B, 3, 32, 32), in [0, 1].
    """
    size = padded.shape[-1]
    span = torch.arange(size - 2 * PADDING, device=padded.device)
    rows = top[:, None] + span
    columns = left[:, None] + span
    columns = torch.where(flip[:, None], size - 1 - columns, columns)
    channels = torch.arange(padded.shape[1], device=padded.device)
    crops = padded[
        index[:, None, None, None], channels[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]
    return to_float(crops)


class TrainingSet(Dataset):
    """Training images on a device. Its loader yields the indices of a batch, and :meth:`batch` makes the batch.

    Each epoch has a flip and a crop for every image. They depend on ``seed`` and the epoch, and not on the number of
    processes. Call :meth:`set_epoch` before the first batch of each epoch.
    """

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self.padded = F.pad(images, (PADDING,) * 4)
        self.labels = labels
        self.seed = seed
        # CUDA graphs read these at fixed addresses
        self.offsets = torch.zeros(2, len(labels), dtype=torch.int64, device=labels.device)
        self.flip = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)

    def set_epoch(self, epoch: int) -> None:
        """Draw the flips and crops of an epoch."""
        generator = torch.Generator().manual_seed(Random(f"{self.seed} {epoch}").getrandbits(63))
        self.offsets.copy_(torch.randint(0, 2 * PADDING + 1, self.offsets.shape, generator=generator))
        self.flip.copy_(torch.rand(len(self), generator=generator) < 0.5)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> Tensor:
        """The indices as int64 of shape (B,), in pinned memory if the images are on a GPU."""
        return torch.tensor(indices, pin_memory=self.labels.is_cuda)

    def batch(self, index: Tensor) -> Split:
        """Augmented images, float32 of shape (B, 3, 32, 32) in [0, 1], and labels, int64 of shape (B,)."""
        index = index.to(self.labels.device, non_blocking=True)
        top, left = self.offsets[:, index]
        return flip_and_crop(self.padded, index, top, left, self.flip[index]), self.labels[index]
