"""CIFAR-10 as tensors that live on the training device, and batches cut from them there."""

import os
from pathlib import Path
from random import Random
from urllib.error import URLError

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import find_classes

Split = tuple[Tensor, Tensor]
"""Images, uint8 of shape (N, 3, 32, 32), and their labels, int64 of shape (N,)."""

CLASSES = 10
SIZE = 32
"""Height and width of an image, in pixels."""
PADDING = 4


def download_if_absent(root: Path) -> None:
    """Fetch CIFAR-10 into ``root`` unless that holds it, or an image folder, already.

    Raises:
        ValueError: it can be neither found nor downloaded.
    """
    if (root / "train").exists():
        return
    try:
        CIFAR10(root)
    except (RuntimeError, OSError):  # RuntimeError: not there, or other files than the MD5 sums say
        try:
            CIFAR10(root, download=True)
        except (RuntimeError, URLError, OSError) as error:
            raise ValueError(
                f"no CIFAR-10 in {root.absolute()}, and it cannot be downloaded ({error}): set DATA to a folder that "
                "holds it or train/<class>/ and test/<class>/ with its images, or try --dummy"
            ) from error


def load_split(root: Path, split: str) -> Split:
    """Read the ``split`` ("train" or "test") of the data set in ``root``.

    That is an image folder where ``root/train`` exists, else torchvision's CIFAR-10, checked by its MD5 sums.

    Raises:
        ValueError: it is not there or not as expected; the message names the folder or file.
    """
    if (root / "train").exists():
        return _load_image_folder(root, split)
    try:
        data = CIFAR10(root, train=split == "train")
    except RuntimeError as error:
        raise ValueError(f"no CIFAR-10 in {root.absolute()}: {error}") from error
    return _channels_first(data.data), torch.tensor(data.targets)


def _load_image_folder(root: Path, split: str) -> Split:
    try:
        folders = {name: ImageFolder(str(root / name)) for name in ("train", "test")}
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


def class_names(root: Path) -> list[str]:
    """The names of the classes of the data set in ``root``, which :func:`load_split` has read, in the labels' order."""
    if (root / "train").exists():
        names, _ = find_classes(str(root / "test"))
        return [os.fsencode(name).decode(errors="replace") for name in names]
    return "airplane automobile bird cat deer dog frog horse ship truck".split()


def _channels_first(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def generate_split(split: str, seed: int = 0) -> Split:
    """Make up a split ("train": 10,000 images, "test": 2,000) of ten classes, the same for the same ``seed``.

    A class is a pattern of 4x4 coloured tiles; an image is its class's pattern, faint under much noise.
    """
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    patterns = F.interpolate(patterns, size=(SIZE, SIZE), mode="nearest")
    size, noise_seed = (10_000, seed + 1) if split == "train" else (2_000, seed + 2)
    labels = torch.arange(size) % CLASSES
    noise = torch.randn(size, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(noise_seed))
    return (128 + 16 * patterns[labels] + 48 * noise).clamp_(0, 255).to(torch.uint8), labels


def to_float(images: Tensor) -> Tensor:
    """uint8 pixels to float32 in [0, 1], as torchvision's ``ToTensor`` does."""
    return images.to(torch.float32).div(255)


def flip_and_crop(padded: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Gather images and augment each by its own draw.

    Equal to the last bit to torchvision's ``Pad(4)``, ``RandomHorizontalFlip``, ``RandomCrop(32)``, ``ToTensor`` for
    the same flips and offsets.

    Args:
        padded: all images with their padding, uint8 of shape (N, 3, 40, 40).
        index: which images, int64 of shape (B,).
        top, left: offsets of the crop in the padded, perhaps flipped, image, int64 of shape (B,), from 0 to 8.
        flip: which images to flip, bool of shape (B,).

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
    """Training images on a device. Its loader gives the indices of a batch, and :meth:`batch` gathers and augments it.

    Each epoch draws a flip and a crop for every image from ``seed`` and the epoch alone, so that any epoch can be
    repeated, by any number of processes. :meth:`set_epoch` must be called before the first batch of each.
    """

    def __init__(self, images: Tensor, labels: Tensor, seed: int, device: torch.device) -> None:
        self.padded = F.pad(images, (PADDING,) * 4).to(device)
        self.labels = labels.to(device)
        self.seed = seed
        # Their addresses stay the same, for graphs to read
        self.offsets = torch.zeros(2, len(labels), dtype=torch.int64, device=device)
        self.flip = torch.zeros(len(labels), dtype=torch.bool, device=device)

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch's flips and crops."""
        generator = torch.Generator().manual_seed(Random(f"{self.seed} {epoch}").getrandbits(63))
        self.offsets.copy_(torch.randint(0, 2 * PADDING + 1, self.offsets.shape, generator=generator))
        self.flip.copy_(torch.rand(len(self), generator=generator) < 0.5)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> Tensor:
        """The indices as int64 of shape (B,), in memory from which a copy to a GPU need not be waited for."""
        return torch.tensor(indices, pin_memory=self.labels.is_cuda)

    def batch(self, index: Tensor) -> Split:
        """The augmented images, float32 of shape (B, 3, 32, 32) in [0, 1], and their labels, int64 of shape (B,)."""
        index = index.to(self.labels.device, non_blocking=True)
        top, left = self.offsets[:, index]
        return flip_and_crop(self.padded, index, top, left, self.flip[index]), self.labels[index]
