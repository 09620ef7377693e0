"""Train ResNet-18 on CIFAR-10 with ColossalAI's Booster.

    colossalai run --nproc_per_node 2 train.py -p low_level_zero
    torchrun --nproc_per_node 2 train.py -p gemini
    python train.py --dummy --epochs 2

The README has the whole story; `python train.py --help` lists the flags.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

from resnet_cifar10 import arguments, checkpoint, files, metrics, quiet, startup
from resnet_cifar10.failure import fail, fail_clearly, fail_together

PLUGINS = {  # and the precisions of each, its default first
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
    parser.error = fail
    add = parser.add_argument
    add("-p", "--plugin", default="torch_ddp", choices=PLUGINS, help="how the Booster distributes the training")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="of low_level_zero or (no fp32) gemini, if not fp16")
    add("-r", "--resume", type=arguments.resume_epoch, default=-1, help="epoch to resume from, or latest; -1: none")
    add("-c", "--checkpoint", type=Path, default="./checkpoint", help="folder of the checkpoints, made when absent")
    add(
        "-i",
        "--interval",
        type=arguments.natural_int,
        default=5,
        help="save every so many epochs and the last; 0: never",
    )
    add("--eval_interval", type=arguments.natural_int, default=0, help="evaluate every so many epochs and the last")
    add("--target_acc", type=arguments.accuracy, help="accuracy in (0, 1] to reach; a run that ends below it fails")
    add("--log_dir", type=Path, help="folder for metrics.jsonl and TensorBoard's curves, made when absent")
    add("--epochs", type=arguments.positive_int, default=80, help="in all, those resumed from included")
    add("--batch_size", type=arguments.batch_size, default=100, help="images per process and step")
    add("--lr", type=arguments.learning_rate, default=1e-3, help="learning rate of one process, scaled by their number")
    add("--seed", type=arguments.seed, default=1024, help="of weights, order and augmentation")
    add("--dummy", action="store_true", help="train on generated images: no download")
    add("--eager", action="store_true", help="no CUDA graph: each kernel is launched from Python")
    args = parser.parse_args()
    args.precision = args.precision or PLUGINS[args.plugin][0]
    if args.precision not in PLUGINS[args.plugin]:
        fail(f"-p {args.plugin} has no --precision {args.precision}: it has {', '.join(PLUGINS[args.plugin])}")
    if args.resume != "latest" and args.resume > args.epochs:
        fail(f"--resume {args.resume} is beyond --epochs {args.epochs}")
    return args


def make_plugin(name: str, precision: str | None = None):
    """ColossalAI's plugin for one of the :data:`PLUGINS`; DDP's fp16 is up to the Booster."""
    from colossalai.accelerator import get_accelerator
    from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

    from resnet_cifar10.cpu import CPUTorchDDPPlugin

    precision = precision or PLUGINS[name][0]
    if name == "low_level_zero":
        # To overlap communication with the backward pass, ZeRO waits for the whole GPU, which no graph can hold
        return LowLevelZeroPlugin(precision=precision, initial_scale=2**5, overlap_communication=False)
    if name == "gemini":
        # To reduce on another stream, Gemini waits for that stream in each step: no gain with one chunk
        return GeminiPlugin(precision=precision, initial_scale=2**5, enable_async_reduce=False)
    # All gradients are reduced at once and where they are; BatchNorm's statistics are averaged after each epoch
    options = dict(bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    return (TorchDDPPlugin if get_accelerator().name == "cuda" else CPUTorchDDPPlugin)(**options)


def make_folders(args: argparse.Namespace) -> None:
    """Make the folders to save and to log to; raise a ValueError where the run could not resume, save or log."""
    if args.resume not in (-1, "latest"):
        checkpoint.check_exists(args.checkpoint, args.resume)
    if args.interval and os.environ["LOCAL_RANK"] == "0":
        files.make_folder(args.checkpoint)
    if args.log_dir and os.environ["RANK"] == "0":
        files.make_folder(args.log_dir)
        metrics.read(args.log_dir)


def main() -> None:
    started = time.perf_counter()
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # into files and pipes, too
    startup.set_launcher_variables()
    if startup.is_one_node():  # of several, one that failed now would leave the others waiting
        with fail_clearly():
            make_folders(args)
    startup.check_devices(args.plugin)
    quiet.silence_the_harmless()

    # Only now: these imports take seconds, which nobody should wait to learn of a mistyped flag.
    import colossalai
    import torch
    import torch.distributed as dist
    from colossalai.accelerator import get_accelerator
    from colossalai.booster import Booster
    from colossalai.cluster import DistCoordinator
    from colossalai.nn.optimizer import HybridAdam
    from torch.optim.lr_scheduler import MultiStepLR
    from torch.utils.data import DistributedSampler
    from tqdm import tqdm

    from resnet_cifar10 import cpu, cuda_graphs, data, internals
    from resnet_cifar10.evaluation import accuracy_line, average_batch_norm_statistics, evaluate
    from resnet_cifar10.model import make_model

    # Launch: one process per GPU, each of which runs this file
    on_gpu = get_accelerator().name == "cuda"
    if on_gpu:
        startup.check_kernels()
    else:
        cpu.register_cpu_adam()
    colossalai.launch_from_torch(seed=args.seed, verbose=False)
    coordinator = DistCoordinator()
    device = get_accelerator().get_current_device()
    device_name = torch.cuda.get_device_name() if on_gpu else "CPU (PyTorch sees no GPU)"
    coordinator.print_on_master(
        f"{args.plugin}, {args.precision}, {coordinator.world_size} process(es), {device_name}, "
        f"PyTorch {torch.__version__}, ColossalAI {colossalai.__version__}"
    )

    with fail_together():  # where there are several nodes, for the first time
        make_folders(args)

    # Plugin: DDP, ZeRO or Gemini, for the Booster to apply
    plugin = make_plugin(args.plugin, args.precision)
    booster = Booster(plugin=plugin, mixed_precision="fp16" if args.plugin == "torch_ddp_fp16" else None)

    # Data: whole on the device; the loader shards it and gives the indices of a batch
    root = Path(os.environ.get("DATA", "./data"))
    with fail_together():
        if not args.dummy and coordinator.is_node_master():
            data.download_if_absent(root)
    with fail_together():
        read = data.generate_split if args.dummy else partial(data.load_split, root)
        train_set = data.TrainingSet(*read("train"), args.seed, device)
        test_images, test_labels = (tensor.to(device) for tensor in read("test"))
        if len(train_set) < args.batch_size * coordinator.world_size:
            raise ValueError(f"{len(train_set)} training images do not fill one step: lower --batch_size")
    train_loader = plugin.prepare_dataloader(
        train_set,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda index: index,
        distributed_sampler_cls=partial(DistributedSampler, seed=args.seed),
    )

    # Model, loss, optimizer and learning rate
    model = make_model()
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=args.lr * coordinator.world_size)
    lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)

    startup.end_on_signals()

    # Boost
    if on_gpu:
        cuda_graphs.use_side_stream()
    boosted = booster.boost(model, optimizer, criterion, lr_scheduler=lr_scheduler)
    model, optimizer, criterion, _, lr_scheduler = boosted

    # All of a step but the optimizer's part; what is written here is what a graph holds
    def forward_backward(index: torch.Tensor) -> torch.Tensor:
        images, labels = train_set.batch(index)
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        return loss.detach()

    if on_gpu and not args.eager:
        index = torch.arange(args.batch_size, device=device)
        forward_backward = cuda_graphs.capture(forward_backward, index, model.train(), optimizer)

    # Resume
    if args.resume == "latest":
        args.resume = checkpoint.agree_on_latest(args.checkpoint)
        if args.resume > args.epochs:
            fail(f"the newest checkpoint is of epoch {args.resume}, beyond --epochs {args.epochs}: raise that")
    if args.resume != -1:
        checkpoint.load(booster, model, optimizer, lr_scheduler, args.checkpoint, args.resume)
    start_epoch = max(args.resume, 0) + 1
    if args.interval and coordinator.is_master():
        checkpoint.warn_of_later(args.checkpoint, start_epoch - 1)
    log = metrics.open_log(args.log_dir, start_epoch)

    # Train
    history, checkpoints = [], 0
    for epoch in range(start_epoch, args.epochs + 1):
        model.train()
        train_loader.sampler.set_epoch(epoch)
        train_set.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        start = time.perf_counter()
        description, is_silent = f"Epoch [{epoch}/{args.epochs}]", not coordinator.is_master()
        with tqdm(total=len(train_loader), desc=description, leave=False, disable=is_silent) as progress:
            for step, index in enumerate(train_loader):
                loss = forward_backward(index)
                optimizer.step()
                optimizer.zero_grad()
                loss_sum += loss
                if step % 50 == 0:  # now and then, for item() waits for the GPU
                    progress.set_postfix(loss=f"{loss.item():.4f}")
                progress.update()
            dist.all_reduce(loss_sum)
            steps = len(train_loader) * coordinator.world_size
            mean_loss = loss_sum.item() / steps
        seconds = time.perf_counter() - start
        if not math.isfinite(mean_loss):
            fail(f"the mean loss of epoch {epoch} is {mean_loss}: nothing of it is saved; try a lower --lr")
        average_batch_norm_statistics(model)

        accuracy, is_last = None, epoch == args.epochs
        if is_last or (args.eval_interval and epoch % args.eval_interval == 0):
            accuracy = evaluate(model, test_images, test_labels)
        (lr,), loss_scale = lr_scheduler.get_last_lr(), internals.loss_scaling(optimizer)["loss_scale"]
        trained = steps * args.batch_size
        history.append(metrics.of_epoch(epoch, mean_loss, lr, accuracy, trained, seconds, loss_scale))
        coordinator.print_on_master(metrics.epoch_line(history[-1], args.epochs))
        log(history[-1])  # before it is saved: an epoch to resume from has been logged
        lr_scheduler.step()

        if args.interval and (is_last or epoch % args.interval == 0):
            checkpoint.save(booster, model, optimizer, lr_scheduler, args.checkpoint, epoch)
            checkpoints += 1

    if not history:  # nothing was left to train
        accuracy = evaluate(model, test_images, test_labels)
    coordinator.print_on_master(metrics.summary_line(history, time.perf_counter() - started, checkpoints))
    coordinator.print_on_master(accuracy_line(accuracy))
    if args.target_acc and accuracy < args.target_acc:
        fail(f"the accuracy, {accuracy:.4f}, is below --target_acc {args.target_acc}")
    startup.shut_down()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("error: stopped before the training began" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)
