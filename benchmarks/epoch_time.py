"""Time this project's training loop against others, in turns, in one run.

    colossalai run --nproc_per_node 2 benchmarks/epoch_time.py -p torch_ddp
    torchrun --nproc_per_node 2 benchmarks/epoch_time.py -p torch_ddp --scaling
    python benchmarks/epoch_time.py -p torch_ddp --peers

The classic loop is that of many examples: torchvision's transforms on PIL images in the training process, the plugin
and its data loader with their defaults, no graphs, and the loss read in each step. The peers are loops of plain PyTorch
and of accelerate, if it is installed, with data loader workers. Pixels are random, 50,000 images.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
from resnet_cifar10 import cuda_graphs, runtime
from resnet_cifar10.data import TrainingSet
from train import PRECISIONS, make_booster

import colossalai
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.models import resnet18

IMAGES = 50_000
PEERS = ("plain PyTorch", "autocast", "torch.compile", *(("accelerate",) if find_spec("accelerate") else ()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time an epoch of this project's loop against others.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-p", "--plugin", default="torch_ddp", choices=PRECISIONS)
    parser.add_argument("--batch_size", type=int, default=100, help="images per process and step")
    parser.add_argument("--steps", type=int, default=50, help="steps to time at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scaling", action="store_true", help="time only our loop, with one process and with all")
    parser.add_argument("--peers", action="store_true", help="also time plain PyTorch and accelerate; one process")
    parser.add_argument("--workers", type=int, default=8, help="data loader workers of the peers")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in our loop")
    return parser.parse_args()


class PILImages(Dataset):
    """Random images in memory, as torchvision's CIFAR10 keeps them, and torchvision's transforms."""

    transform = transforms.Compose(
        [transforms.Pad(4), transforms.RandomHorizontalFlip(), transforms.RandomCrop(32), transforms.ToTensor()]
    )

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int):
        return self.transform(Image.fromarray(self.arrays[number])), self.labels[number]


def boost(booster: Booster):
    model = resnet18(num_classes=10)
    make_adam = HybridAdam if torch.cuda.is_available() else torch.optim.Adam
    adam = make_adam(model.parameters(), lr=1e-3 * dist.get_world_size())
    model, optimizer, criterion, _, _ = booster.boost(model, adam, torch.nn.CrossEntropyLoss())
    return model.train(), optimizer, criterion, adam


def make_run(step: Callable, loader) -> Callable[[int], None]:
    """A function that runs a number of steps, each with the next batch."""

    def endless():
        while True:
            yield from loader

    def run(count: int) -> None:
        for _ in range(count):
            step(next(batches))

    batches = endless()
    return run


def our_loop(args, images, labels, device) -> tuple:
    train_set = TrainingSet(images.to(device), labels.to(device), seed=0)
    train_set.set_epoch(1)
    booster = make_booster(args.plugin, PRECISIONS[args.plugin][0])
    options = dict(shuffle=True, drop_last=True, collate_fn=lambda index: index)
    loader = booster.plugin.prepare_dataloader(train_set, args.batch_size, **options)
    model, optimizer, criterion, adam = boost(booster)

    def forward_backward(index):
        images, labels = train_set.batch(index)
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        return loss.detach()

    if device.type == "cuda" and not args.eager:
        forward_backward = cuda_graphs.capture(forward_backward, args.batch_size, model, optimizer)

    def step(index) -> None:
        forward_backward(index)
        optimizer.step()
        optimizer.zero_grad()

    return make_run(step, loader), adam


def classic_loop(args, images, labels, device) -> tuple:
    make_plugin = {
        "low_level_zero": partial(LowLevelZeroPlugin, initial_scale=2**5),
        "gemini": partial(GeminiPlugin, initial_scale=2**5),
    }.get(args.plugin, TorchDDPPlugin)
    booster = Booster(plugin=make_plugin(), mixed_precision="fp16" if args.plugin == "torch_ddp_fp16" else None)
    dataset = PILImages(images, labels)
    loader = booster.plugin.prepare_dataloader(dataset, args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, criterion, adam = boost(booster)

    def step(batch) -> None:
        images, labels = batch
        loss = criterion(model(images.to(device)), labels.to(device))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return make_run(step, loader), adam


def peer_loop(name: str, args, images, labels, device) -> tuple:
    """What users often pick without ColossalAI, on one GPU: fused Adam, pinned memory, data loader workers."""
    options = dict(shuffle=True, drop_last=True, pin_memory=device.type == "cuda", persistent_workers=args.workers > 0)
    loader = DataLoader(PILImages(images, labels), args.batch_size, num_workers=args.workers, **options)
    criterion = torch.nn.CrossEntropyLoss()
    model = resnet18(num_classes=10).to(device).train()
    optimizer = adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    is_half = name == "autocast"
    scaler = torch.amp.GradScaler(device.type, enabled=is_half)
    if name == "torch.compile":
        model = torch.compile(model, mode="reduce-overhead")
    if name == "accelerate":
        from accelerate import Accelerator

        without_launcher = {name: value for name, value in os.environ.items() if name not in runtime.LAUNCHER_VARIABLES}
        with patch.dict(os.environ, without_launcher, clear=True):
            accelerator = Accelerator(mixed_precision="fp16")
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(batch) -> None:
        images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(device.type, torch.float16, enabled=is_half):
            loss = criterion(model(images), labels)
        if name == "accelerate":
            accelerator.backward(loss)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return make_run(step, loader), adam


def images_per_second_of_one_process() -> float:
    """Run this script on the first GPU while the other processes wait."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in runtime.LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC")
    }
    run = subprocess.run([sys.executable, *sys.argv], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(run.stdout, end="", flush=True)
    return float(re.search(r"([\d,]+) images/s", run.stdout)[1].replace(",", ""))


def synchronize() -> None:
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[int], None], steps: int) -> float:
    synchronize()
    start = time.perf_counter()
    run(steps)
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    args = parse_args()
    alone = images_per_second_of_one_process() if args.scaling and os.environ.get("RANK") == "0" else None
    runtime.prepare_launch(args.plugin)
    colossalai.launch_from_torch(verbose=False)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = get_accelerator().get_current_device()
    cuda_graphs.use_side_stream()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)

    loops = {"this project": our_loop}
    if not args.scaling:
        loops["the classic loop"] = classic_loop
    if args.peers:
        if world_size > 1:
            runtime.fail("--peers takes one process")
        loops.update({name: partial(peer_loop, name) for name in PEERS})

    runs, memory = {}, {}
    for name, make_loop in loops.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        runs[name], adam = make_loop(args, images, labels, device)
        runs[name](args.steps)  # warm up
        moments = [s[moment] for s in adam.state.values() for moment in ("exp_avg", "exp_avg_sq")]
        memory[name] = f"optimizer state {sum(moment.nbytes for moment in moments) / 2**20:.1f} MiB"
        if device.type == "cuda":
            memory[name] += f", peak {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"

    times = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            times[name].append(seconds(run, args.steps) / args.steps)
    medians = {name: statistics.median(each) for name, each in times.items()}
    if rank == 0:
        start = f"{args.plugin}, {world_size} process(es)"
        for name, step in medians.items():
            spread = (max(times[name]) - min(times[name])) / step
            print(
                f"{start}, {name}: {step * (IMAGES // (args.batch_size * world_size)):.2f} s an epoch, "
                f"{args.batch_size * world_size / step:,.0f} images/s, {1000 * step:.2f} ms a step "
                f"(spread of {args.repeats}: {100 * spread:.0f} %), {memory[name]}"
            )
        for name in list(medians)[1:]:
            print(f"{start}: {medians[name] / medians['this project']:.1f} times as fast as {name}")
        if alone:
            efficiency = args.batch_size / medians["this project"] / alone
            print(f"{args.plugin}: {100 * efficiency:.0f} % of {world_size} times the images/s of one process")
    cuda_graphs.reset()
    runtime.shut_down()


if __name__ == "__main__":
    main()
