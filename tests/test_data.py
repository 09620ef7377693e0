import hashlib
import os
import pickle
import socket
from pathlib import Path

from resnet_cifar10.data import (
    TrainingSet,
    class_names,
    download_if_absent,
    flip_and_crop,
    generate_split,
    load_split,
    to_float,
)
from resnet_cifar10.evaluation import evaluate

import numpy as np
import pytest
import torch
from conftest import CLASSES, launch
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import Pad, ToTensor
from torchvision.transforms import functional as F


def random_images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("flip", [False, True])
def test_augmentation_equals_torchvision_to_the_last_bit(flip):
    images = random_images(4)
    offsets = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    index = torch.arange(len(offsets)) % len(images)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    augmented = flip_and_crop(padded, index, *offsets.T, torch.full((len(offsets),), flip))
    for number, (top, left) in enumerate(offsets.tolist()):
        image = Pad(4)(F.to_pil_image(images[index[number]]))
        image = F.hflip(image) if flip else image
        expected = ToTensor()(F.crop(image, top, left, 32, 32))
        assert torch.equal(augmented[number], expected)


def test_pixels_of_the_test_split_equal_to_tensor():
    images = random_images(3)
    expected = torch.stack([ToTensor()(F.to_pil_image(image)) for image in images])
    assert torch.equal(to_float(images), expected)


def test_draws_depend_on_seed_and_epoch_alone():
    def batch(seed, epoch, indices, visited=()):
        data = TrainingSet(random_images(64), torch.arange(64) % 10, seed)
        for other in visited:
            data.set_epoch(other)
        data.set_epoch(epoch)
        return data.batch(data.__getitems__(indices))

    indices = [5, 60, 7, 0]
    images, labels = batch(1, 3, indices)
    assert images.dtype == torch.float32 and images.shape == (4, 3, 32, 32)
    assert labels.tolist() == [5, 0, 7, 0]
    assert torch.equal(images, batch(1, 3, indices, visited=(1, 2))[0])
    assert torch.equal(images.flip(0), batch(1, 3, indices[::-1])[0])
    assert not torch.equal(images, batch(1, 4, indices)[0])
    assert not torch.equal(images, batch(2, 3, indices)[0])


def test_draws_cover_every_offset_and_flip_about_half():
    data = TrainingSet(torch.zeros(5000, 3, 32, 32, dtype=torch.uint8), torch.zeros(5000), 0)
    data.set_epoch(1)
    for offsets in data.offsets:
        counts = offsets.bincount()
        assert len(counts) == 9 and counts.min() > 400
    assert 0.45 < data.flip.float().mean() < 0.55


def test_generated_images_are_the_same_for_the_same_seed():
    images, labels = generate_split("test")
    assert images.shape == (2000, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.bincount().tolist() == [200] * 10
    assert torch.equal(images, generate_split("test")[0])
    assert not torch.equal(images, generate_split("test", seed=5)[0])
    assert generate_split("train")[0].shape == (10000, 3, 32, 32)


def test_an_untrained_model_guesses_at_generated_images():
    torch.manual_seed(0)
    assert 0.05 < evaluate(resnet18(num_classes=10), *generate_split("test")) < 0.2


def test_image_folder(make_images):
    root = make_images()
    images, labels = load_split(root, "train")
    assert images.shape == (60, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.bincount().tolist() == [6] * 10
    expected = F.pil_to_tensor(Image.open(root / "train" / "bird" / "0001.png"))
    assert torch.equal(images[13], expected)
    assert load_split(root, "test")[0].shape == (30, 3, 32, 32)


def test_image_folder_with_nine_classes(make_images):
    with pytest.raises(ValueError, match="has 9 classes, not ten"):
        load_split(make_images(list("abcdefghi")), "train")


def test_image_folder_whose_splits_differ(make_images):
    with pytest.raises(ValueError, match="differ in their classes: j, k"):
        load_split(make_images(list("abcdefghij"), list("abcdefghik")), "train")


def test_image_folder_without_test_images(make_images):
    import shutil

    root = make_images()
    shutil.rmtree(root / "test")
    with pytest.raises(ValueError, match="cannot read the image folder .*test"):
        load_split(root, "train")


def test_image_of_the_wrong_size(make_images):
    root = make_images()
    Image.new("RGB", (48, 32)).save(root / "train" / "cat" / "0002.png")
    with pytest.raises(ValueError, match=r"cat/0002.png is 48x32 pixels, not 32x32"):
        load_split(root, "train")


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_broken_image(make_images, content):
    root = make_images()
    path = root / "test" / "frog" / "0000.png"
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    with pytest.raises(ValueError, match="cannot read the image .*frog/0000.png"):
        load_split(root, "test")


@pytest.mark.parametrize("mode, suffix", [("I;16", "png"), ("I", "tiff"), ("F", "tiff")])
def test_images_that_are_not_8_bit(make_images, mode, suffix):
    root = make_images()
    dtype = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    Image.fromarray(np.full((32, 32), 0.5 if mode == "F" else 300, dtype)).save(root / "train" / "cat" / f"0.{suffix}")
    with pytest.raises(
        ValueError, match=rf"cannot read the image .*cat/0.{suffix}: its mode is I|F.*, which is not 8-bit"
    ):
        load_split(root, "train")


def test_hidden_files_are_skipped(make_images):
    root = make_images()
    for name in ("._0001.png", ".DS_Store"):
        (root / "train" / "cat" / name).write_bytes(b"no image")
    assert load_split(root, "train")[0].shape == (60, 3, 32, 32)


def test_a_dangling_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "link", tmp_path / "link" / "data"):
        with pytest.raises(ValueError, match=f"no undamaged CIFAR-10 in {path}, and it cannot be downloaded"):
            download_if_absent(path)


@pytest.mark.parametrize("proxy", ["not a proxy", "ftp://127.0.0.1:9", "http://127.0.0.1:9", "http://[::1"])
def test_no_download_through_a_bad_proxy(tmp_path, monkeypatch, proxy):
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", proxy)
    with pytest.raises(ValueError, match=f"no undamaged CIFAR-10 in {tmp_path}, and it cannot be downloaded"):
        download_if_absent(tmp_path)


def test_a_stalled_download_ends(tmp_path, monkeypatch):
    """A server that accepts connections and says nothing."""
    monkeypatch.setattr("resnet_cifar10.data.STALLED_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.getsockname()[1]}/cifar-10-python.tar.gz")
        with pytest.raises(ValueError, match="cannot be downloaded"):
            download_if_absent(tmp_path)
    assert socket.getdefaulttimeout() is None


@pytest.mark.slow
def test_a_download_can_take_longer_than_a_collective():
    code = "import datetime, sys, time, torch.distributed as dist; from resnet_cifar10 import data\n"
    code += "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=10))\n"
    code += "data.download_if_absent = lambda root: time.sleep(13)\n"
    code += "print(len(data.load(None, 'cpu')))"
    assert launch(2, "-c", code, timeout=60).succeeded().stdout.split() == ["2", "2"]


def is_cifar10(root):
    """Itself, or a copy of it as an image folder, which may lack images."""
    return (root / CIFAR10.base_folder).exists() or (root / "train").exists() and class_names(root) == CLASSES


@pytest.mark.skipif(not is_cifar10(Path(os.environ.get("DATA", "/nowhere"))), reason="DATA names no CIFAR-10")
def test_cifar10_itself():
    root = Path(os.environ["DATA"])
    for split in ("train", "test"):
        images, labels = load_split(root, split)
        assert images.shape == (len(labels), 3, 32, 32) and len(labels.bincount()) == 10
        if not (root / "train").exists():
            assert labels.bincount().tolist() == [{"train": 5000, "test": 1000}[split]] * 10
        means = to_float(images).mean(dim=(0, 2, 3))
        torch.testing.assert_close(means, torch.tensor([0.491, 0.482, 0.447]), rtol=0, atol=0.04)


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """A few images in CIFAR-10's own files, with MD5 sums that torchvision takes for the right ones."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    pixels = random_images(24)

    def batch(start):
        return {"data": pixels[start : start + 4].reshape(4, -1).numpy(), "labels": [start // 4] * 4}

    train = [[f"data_batch_{i + 1}", write(f"data_batch_{i + 1}", batch(4 * i))] for i in range(5)]
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", write("test_batch", batch(20))]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": write("batches.meta", {"label_names": []})}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/nobody-listens-here")
    return tmp_path, pixels


def test_cifar10_files(cifar10):
    root, pixels = cifar10
    download_if_absent(root)
    images, labels = load_split(root, "train")
    assert torch.equal(images, pixels[:20]) and labels.tolist() == list(np.arange(20) // 4)
    images, labels = load_split(root, "test")
    assert torch.equal(images, pixels[20:]) and labels.tolist() == [5] * 4
    download_if_absent(root / CIFAR10.base_folder)
    assert torch.equal(load_split(root / CIFAR10.base_folder, "test")[0], images)


def test_cifar10_files_that_fail_their_md5_check(cifar10):
    root, _ = cifar10
    with (root / CIFAR10.base_folder / "data_batch_3").open("ab") as file:
        file.write(b"!")
    with pytest.raises(
        ValueError, match=f"no undamaged CIFAR-10 in {root}, and it cannot be downloaded.*DATA.*--dummy"
    ):
        download_if_absent(root)
    with pytest.raises(ValueError, match="no CIFAR-10 in"):
        load_split(root, "train")
