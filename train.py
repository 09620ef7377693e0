"""Train ResNet-18 on CIFAR-10 with ColossalAI's Booster.

colossalai run --nproc_per_node 2 train.py -p low_level_zero
torchrun --nproc_per_node 2 train.py -p gemini
python train.py --dummy --epochs 2
"""

import argparse
import math
import os
import time
from pathlib import Path

# This package comes first: it silences harmless warnings of the packages below
from resnet_cifar10 import checkpoint, cuda_graphs, data, evaluation, internals, metrics, runtime
from resnet_cifar10.runtime import fail

import colossalai
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.optimizer import HybridAdam
from torch.optim.lr_scheduler import MultiStepLR
from torchvision.models import resnet18
from tqdm import tqdm

PRECISIONS = {  # that each plugin supports; the first is its default
    "torch_ddp": ("fp32",),
    "torch_ddp_fp16": ("fp16",),
    "low_level_zero": ("fp16", "bf16", "fp32"),
    "gemini": ("fp16", "bf16"),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train ResNet-18 on CIFAR-10 with ColossalAI's Booster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.error = fail  # print errors as one line, once per node
    add = parser.add_argument
    add("-p", "--plugin", default="torch_ddp", choices=PRECISIONS, help="how to distribute the training")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="for low_level_zero and gemini; if not given, fp16")
    add("-r", "--resume", metavar="EPOCH", default="-1", help="epoch to resume from, or latest; -1: start a new run")
    add("-c", "--checkpoint", type=Path, default="./checkpoint", help="folder for checkpoints")
    add("-i", "--interval", type=int, default=5, help="save every N epochs and after the last; 0: never")
    add("--eval_interval", type=int, default=0, help="also evaluate every N epochs; 0: after the last only")
    add("--target_acc", type=float, default=0, help="fail if the final accuracy is below this; 0.84 is 84 %%")
    add("--log_dir", type=Path, help="folder for metrics.jsonl and TensorBoard")
    add("--epochs", type=int, default=80, help="total epochs, including resumed ones")
    add("--batch_size", type=int, default=100, help="images per process and step")
    add("--lr", type=float, default=1e-3, help="learning rate for one process; multiplied by the world size")
    add("--seed", type=int, default=1024, help="random seed of weights, data order and augmentation")
    add("--dummy", action="store_true", help="train on generated images; otherwise on the data in $DATA or ./data")
    add("--eager", action="store_true", help="do not use a CUDA graph")
    args = parser.parse_args()
    precisions = PRECISIONS[args.plugin]
    args.precision = args.precision or precisions[0]
    for is_wrong, message in (
        (args.resume == "all", "--resume takes one epoch, or latest"),
        (args.precision not in precisions, f"-p {args.plugin} takes --precision {' or '.join(precisions)} only"),
        (min(args.interval, args.eval_interval) < 0, "--interval and --eval_interval must be 0 or above"),
        (not 0 <= args.target_acc <= 1, "--target_acc must be in [0, 1]: 0.84 is 84 %"),
        (args.epochs < 1, "--epochs must be 1 or above"),
        (args.batch_size < 2, "--batch_size must be 2 or above: BatchNorm needs two images"),
        (not 0 < args.lr <= 1, "--lr must be above 0, and 1 at most"),
        (not 0 <= args.seed < 2**32, "--seed must be 0 or above, and below 2**32"),
    ):
        if is_wrong:
            parser.error(message)
    return args


def make_booster(plugin: str, precision: str) -> Booster:
    """Make the plugin and its Booster."""
    if plugin == "low_level_zero":  # ZeRO stage 1: each process has a shard of the optimizer state
        # overlap_communication synchronizes with the GPU, which is not allowed in a CUDA graph
        options = dict(initial_scale=2**5, overlap_communication=False)
        return Booster(plugin=LowLevelZeroPlugin(precision=precision, **options))
    if plugin == "gemini":  # weights, gradients and optimizer state in chunks, which can be sharded
        # enable_async_reduce synchronizes streams in each step. It does not help a model that fits in one chunk.
        options = dict(initial_scale=2**5, enable_async_reduce=False)
        return Booster(plugin=GeminiPlugin(precision=precision, **options))
    # One bucket for all gradients. BatchNorm statistics are averaged after each epoch, not broadcast in each step.
    options = dict(bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    return Booster(plugin=TorchDDPPlugin(**options), mixed_precision="fp16" if precision == "fp16" else None)


def train_epoch(train_loader, forward_backward, optimizer, description: str) -> float:
    """Train for one epoch; return the mean loss over all steps and processes."""
    loss_sum = torch.zeros((), device=get_accelerator().get_current_device())
    with tqdm(train_loader, description, leave=False, disable=not DistCoordinator().is_master()) as progress:
        for step, index in enumerate(progress):
            loss = forward_backward(index)
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss  # before the next step overwrites it
            if step % 50 == 0:  # not in each step: item() waits for the GPU
                progress.set_postfix(loss=f"{loss.item():.4f}")
    dist.all_reduce(loss_sum)
    return loss_sum.item() / (len(train_loader) * dist.get_world_size())


def main() -> None:
    run_start = time.perf_counter()
    args = parse_args()

    # Launch: each process runs this file, on a GPU of its own
    runtime.prepare_launch(args.plugin)
    colossalai.launch_from_torch(seed=args.seed, verbose=False)
    coordinator = DistCoordinator()
    device = get_accelerator().get_current_device()
    on_gpu = device.type == "cuda"
    coordinator.print_on_master(f"{args.plugin}, {args.precision}, {runtime.environment()}")
    runtime.make_folders(args.checkpoint if args.interval else None, args.log_dir, exclusive=True)
    start_epoch = 1 + checkpoint.resume_epoch(args.checkpoint, args.resume, args.epochs)
    log = metrics.open_log(args.log_dir, start_epoch)

    # Plugin and Booster
    booster = make_booster(args.plugin, args.precision)

    # Data: all images are on the device; the loader shuffles and shards their indices
    root = None if args.dummy else Path(os.environ.get("DATA", "./data"))
    train_split, test_split = data.load(root, device)
    train_set = data.TrainingSet(*train_split, args.seed)
    train_loader = booster.plugin.prepare_dataloader(
        train_set, args.batch_size, shuffle=True, drop_last=True, collate_fn=lambda index: index
    )
    if len(train_loader) == 0:
        fail(f"{len(train_set)} training images do not fill one step: lower --batch_size")

    # Model, loss, optimizer, learning rate
    model = resnet18(num_classes=10)
    criterion = torch.nn.CrossEntropyLoss()
    lr = args.lr * coordinator.world_size
    if on_gpu:
        with runtime.compiling_kernels():
            optimizer = HybridAdam(model.parameters(), lr=lr)
    else:  # the same algorithm; ColossalAI has no kernel for CPUs
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)

    # Boost
    cuda_graphs.use_side_stream()
    model, optimizer, criterion, _, lr_scheduler = booster.boost(model, optimizer, criterion, lr_scheduler=lr_scheduler)

    def forward_backward(index: torch.Tensor) -> torch.Tensor:
        images, labels = train_set.batch(index)
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        return loss.detach()

    if on_gpu and not args.eager:  # one launch for all kernels of forward and backward
        forward_backward = cuda_graphs.capture(forward_backward, args.batch_size, model, optimizer)

    # Resume
    if start_epoch > 1:
        checkpoint.load(booster, model, optimizer, lr_scheduler, args.checkpoint, start_epoch - 1)

    # Epochs
    history = []
    for epoch in range(start_epoch, args.epochs + 1):
        model.train()
        train_loader.sampler.set_epoch(args.seed + epoch)  # it shuffles with this seed
        train_set.set_epoch(epoch)
        start = time.perf_counter()
        loss = train_epoch(train_loader, forward_backward, optimizer, f"Epoch [{epoch}/{args.epochs}]")
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            fail(f"the mean loss of epoch {epoch} is {loss}; this epoch is not saved; try a lower --lr")
        evaluation.average_batch_norm_statistics(model)
        is_last = epoch == args.epochs
        accuracy = None
        if is_last or (args.eval_interval and epoch % args.eval_interval == 0):
            accuracy = evaluation.evaluate(model, *test_split)
        history.append(
            {
                "epoch": epoch,
                "loss": loss,
                "lr": lr_scheduler.get_last_lr()[0],
                "accuracy": accuracy,
                "images_per_second": len(train_loader) * args.batch_size * coordinator.world_size / seconds,
                "seconds": seconds,
                "loss_scale": internals.loss_scaling(optimizer)["loss_scale"] or None,
                "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 or None,
            }
        )
        coordinator.print_on_master(metrics.epoch_line(history[-1], args.epochs))
        log(history[-1])  # first, so that every saved epoch is in the log
        lr_scheduler.step()
        if args.interval and (is_last or epoch % args.interval == 0):
            checkpoint.save(booster, model, optimizer, lr_scheduler, args.checkpoint, epoch)

    # Accuracy
    if not history:  # the checkpoint was of the last epoch
        accuracy = evaluation.evaluate(model, *test_split)
    coordinator.print_on_master(metrics.summary_line(history, time.perf_counter() - run_start))
    coordinator.print_on_master(evaluation.accuracy_line(accuracy))
    if accuracy < args.target_acc:
        fail(f"the accuracy, {accuracy:.4f}, is below --target_acc {args.target_acc}")
    cuda_graphs.reset()  # first: a graph can hold collectives of the process group
    runtime.shut_down()


if __name__ == "__main__":
    main()
