"""Real runs of the scripts, and a data set small enough for many of them."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path

from resnet_cifar10.checkpoint import PARTS, read_lr_scheduler, read_model, read_optimizer, read_state
from resnet_cifar10.runtime import free_port

import fork_server
import psutil
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

ROOT = Path(__file__).parent.parent
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
BIN = Path(sys.executable).parent
TRAIN = ("train.py", "--batch_size", 20)

# GPUs are for the tests marked so: the others start more processes than there may be GPUs, and expect a CPU's results
GPUS, VISIBLE_GPUS = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

fork_server.context.set_forkserver_preload(  # what the scripts import, and what pytest's own script does
    ["__main__", "torch", "torch.distributed", "torchvision", "torchvision.datasets", "torchvision.models", "tqdm"]
    + ["PIL.Image", "colossalai", "colossalai.booster.plugin", "colossalai.cluster", "colossalai.nn.optimizer"]
)
forkserver.ensure_running()  # while this one imports


class Run:
    """A finished command: its exit code, what it wrote, and the lines of that which matter here."""

    def __init__(self, returncode: int, stdout: str, stderr: str):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr
        self.output = (stdout + stderr).replace("\r", "\n")
        self.errors = re.findall(r"^error: .*$", stderr, re.MULTILINE)
        self.accuracies = re.findall(r"^Accuracy of the model on the test images: (\d+\.\d\d) %$", stdout, re.MULTILINE)

    def succeeded(self) -> "Run":
        assert self.returncode == 0, self.output
        return self

    def failed_with(self, *words: str) -> "Run":
        """It ended with one error line, which holds ``words``, and no traceback but the launcher's own."""
        assert self.returncode != 0, self.output
        assert len(self.errors) == 1, self.output
        for word in words:
            assert word in self.errors[0]
        for traceback in re.findall(r"Traceback \(most recent call last\):\n  File \"(.*?)\"", self.output):
            assert Path(traceback).name in ("torchrun", "run.py"), self.output
        return self


def kill_family(process: subprocess.Popen) -> None:
    """Kill a process that still runs, and all it has started: a launcher, and its workers."""
    if process.poll() is None:
        for member in [process, *psutil.Process(process.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen) -> Iterator[None]:
    """Kill a process, and all it has started, at the end of the block or, should that wait for it, after a while."""
    timer = threading.Timer(seconds, kill_family, [process])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        kill_family(process)


def execute(*command: object, timeout: float = 300, **environment: object) -> Run:
    """Run a command in the project's folder, and end it with all it has started."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        kill_family(process)
    return Run(process.returncode, stdout, stderr)


def launch(processes: int | None, *words: object, timeout: float = 300, preexec=None, **environment: object) -> Run:
    """What ``torchrun`` does or, for None, ``python``, without the seconds that they take to start."""
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    done = fork_server.run([str(word) for word in words], processes, environment, timeout, preexec)
    return Run(done.returncode, done.stdout, done.stderr)


def torchrun(processes: int, *arguments: object, **environment: object) -> Run:
    """Run a script under torchrun, at a port of its own."""
    return execute(BIN / "torchrun", "--standalone", "--nproc_per_node", processes, *arguments, **environment)


def python(*arguments: object, **environment: object) -> Run:
    return execute(sys.executable, *arguments, **environment)


def colossalai_run(processes: int, *arguments: object, **environment: object) -> Run:
    launcher = (BIN / "colossalai", "run", "--nproc_per_node", processes, "--master_port", free_port())
    return execute(*launcher, *arguments, **environment, PATH=f"{BIN}:{os.environ['PATH']}")


def write_images(folder: Path, classes: list[str], per_class: int, seed: int) -> None:
    """Ten classes told apart by their colours, with noise, as PNG files."""
    generator = torch.Generator().manual_seed(seed)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        colour = torch.tensor([number % 3, number // 3 % 3, number // 9]) * 80 + 40
        for i in range(per_class):
            pixels = colour + torch.randint(-30, 30, (32, 32, 3), generator=generator)
            Image.fromarray(pixels.clamp(0, 255).to(torch.uint8).numpy()).save(folder / name / f"{i:04d}.png")


@pytest.fixture
def make_images(tmp_path):
    """A function that writes an image folder and returns it."""

    def make(classes=CLASSES, test_classes=None, train=6, test=3) -> Path:
        write_images(tmp_path / "images" / "train", classes, train, seed=0)
        write_images(tmp_path / "images" / "test", test_classes or classes, test, seed=1)
        return tmp_path / "images"

    return make


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """An image folder of 120 training and 50 test images."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train", CLASSES, 12, seed=0)
    write_images(root / "test", CLASSES, 5, seed=1)
    return root


def weights(folder: Path, epoch: int) -> dict:
    return torch.load(folder / f"model_{epoch}.pth", weights_only=True)


def read(folder: Path, part: str, epoch: int) -> dict:
    """A part of a checkpoint, with the checks that train.py makes before it loads one."""
    with torch.device("meta"):
        model = resnet18(num_classes=10)
    if part == "model":
        return read_model(folder, epoch, model)
    if part == "optimizer":
        return read_optimizer(folder, epoch, model, torch.optim.Adam(model.parameters()))
    if part == "lr_scheduler":
        optimizer = torch.optim.Adam(model.parameters())
        return read_lr_scheduler(folder, epoch, torch.optim.lr_scheduler.MultiStepLR(optimizer, [20]))
    return read_state(folder, epoch)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, images):
    """A folder with the checkpoints of epochs 1 to 3, by two processes; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    run = torchrun(2, *TRAIN, "--epochs", 3, "-i", 1, "-c", folder, DATA=images).succeeded()
    return folder, run


def copy_epoch(source: Path, target: Path, epoch: int) -> None:
    """Copy one epoch's checkpoint into a folder, made when absent."""
    target.mkdir(exist_ok=True)
    for part in PARTS:
        shutil.copy(source / f"{part}_{epoch}.pth", target)


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy of epochs 1 to 3, to do things to."""
    return shutil.copytree(trained[0], tmp_path / "checkpoint")
