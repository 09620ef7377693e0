"""Train ResNet-18 on CIFAR-10 with ColossalAI's Booster.

    colossalai run --nproc_per_node 2 train.py -p low_level_zero
    torchrun --nproc_per_node 2 train.py -p gemini
    python train.py --dummy --epochs 2

The README has the whole story; `python train.py --help` lists the flags.
"""

import argparse
import math
import os
from functools import partial
from pathlib import Path

from resnet_cifar10 import arguments, checkpoint, quiet, startup
from resnet_cifar10.failure import fail, fail_together

PLUGINS = ("torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train ResNet-18 on CIFAR-10 with ColossalAI's Booster.")
    parser.error = fail
    parser.add_argument(
        "-p",
        "--plugin",
        default="torch_ddp",
        choices=PLUGINS,
        help="how the Booster distributes the training (default: %(default)s)",
    )
    parser.add_argument(
        "-r",
        "--resume",
        type=arguments.resume_epoch,
        default=-1,
        help="epoch of the checkpoint to resume from, or latest; -1: none (default: %(default)s)",
    )
    parser.add_argument(
        "-c",
        "--checkpoint",
        type=Path,
        default="./checkpoint",
        help="folder of the checkpoints, made when absent (default: %(default)s)",
    )
    parser.add_argument(
        "-i",
        "--interval",
        type=arguments.natural_int,
        default=5,
        help="save every so many epochs, and after the last; 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--target_acc",
        type=arguments.accuracy,
        help="accuracy in (0, 1] to reach; a run that ends below it fails (default: none)",
    )
    parser.add_argument("--epochs", type=arguments.positive_int, default=80, help="(default: %(default)s)")
    parser.add_argument(
        "--batch_size",
        type=arguments.batch_size,
        default=100,
        help="images per process and step (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=arguments.learning_rate,
        default=1e-3,
        help="learning rate of one process, scaled linearly by the number of processes (default: %(default)s)",
    )
    parser.add_argument("--seed", type=arguments.seed, default=1024, help="(default: %(default)s)")
    parser.add_argument("--dummy", action="store_true", help="train on generated images: no download")
    parser.add_argument("--eager", action="store_true", help="launch every kernel from Python: no CUDA graphs")
    return parser.parse_args()


def make_plugin(name: str):
    """ColossalAI's plugin for one of the :data:`PLUGINS`: the one place in which the four ways to train differ."""
    from colossalai.accelerator import get_accelerator
    from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

    from resnet_cifar10.cpu import CPUTorchDDPPlugin

    if name == "low_level_zero":
        # To overlap communication with the backward pass, ZeRO waits for the whole GPU: with graphs, for nothing
        return LowLevelZeroPlugin(initial_scale=2**5, overlap_communication=False)
    if name == "gemini":
        # To reduce on another stream, Gemini waits for that stream in each step: for nothing, with one chunk
        return GeminiPlugin(initial_scale=2**5, enable_async_reduce=False)
    # All gradients are reduced at once and where they are; BatchNorm's statistics are averaged after each epoch
    options = dict(bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    return (TorchDDPPlugin if get_accelerator().name == "cuda" else CPUTorchDDPPlugin)(**options)


def check_checkpoints(args: argparse.Namespace) -> None:
    """Raise an OSError or ValueError where the run could not resume, or not save."""
    if args.resume != "latest" and args.resume > args.epochs:
        raise ValueError(f"--resume {args.resume} is beyond --epochs {args.epochs}")
    if args.resume not in (-1, "latest"):
        checkpoint.check_exists(args.checkpoint, args.resume)
    if args.interval and os.environ["LOCAL_RANK"] == "0":
        checkpoint.make_folder(args.checkpoint)


def main() -> None:
    args = parse_args()
    startup.be_a_launcher_of_one()
    if startup.is_one_node():  # of several, one that failed now would leave the others waiting
        try:
            check_checkpoints(args)
        except (OSError, ValueError) as error:
            fail(error)
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
    from torchvision.models import resnet18
    from tqdm import tqdm

    from resnet_cifar10 import cpu, cuda_graphs, data, zero
    from resnet_cifar10.evaluation import accuracy_line, average_batch_norm_statistics, evaluate

    # Launch: one process per GPU, each of which runs this file
    if get_accelerator().name == "cuda":
        startup.check_cuda_toolkit()
    else:
        cpu.register_cpu_adam()
    colossalai.launch_from_torch(seed=args.seed, verbose=False)
    coordinator = DistCoordinator()
    device = get_accelerator().get_current_device()

    with fail_together():
        check_checkpoints(args)

    # Plugin: DDP, ZeRO or Gemini, for the Booster to apply
    plugin = make_plugin(args.plugin)
    booster = Booster(plugin=plugin, mixed_precision="fp16" if args.plugin == "torch_ddp_fp16" else None)

    # Data: whole on the device; the plugin shards it, and collate_fn passes on the batches the data set has made
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
        collate_fn=lambda batch: batch,
        distributed_sampler_cls=partial(DistributedSampler, seed=args.seed),
    )

    # Model, loss, optimizer and learning rate
    model = resnet18(num_classes=10)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=args.lr * coordinator.world_size)
    lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)

    startup.end_on_signals()

    # Boost
    with cuda_graphs.capturable():
        boosted = booster.boost(model, optimizer, criterion, lr_scheduler=lr_scheduler)
    model, optimizer, criterion, _, lr_scheduler = boosted
    if args.plugin == "low_level_zero":
        zero.wait_once_a_step(optimizer)
    if device.type == "cuda" and not args.eager and args.plugin != "gemini":  # which moves its parameters
        cuda_graphs.capture(model, args.batch_size, autocast=args.plugin == "torch_ddp_fp16")

    # Resume
    if args.resume == "latest":
        args.resume = checkpoint.agree_on_latest(args.checkpoint)
    if args.resume != -1:
        checkpoint.load(booster, model, optimizer, lr_scheduler, args.checkpoint, args.resume)

    # Train
    for epoch in range(max(args.resume, 0) + 1, args.epochs + 1):
        model.train()
        train_loader.sampler.set_epoch(epoch)
        train_set.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        with tqdm(
            total=len(train_loader), desc=f"Epoch [{epoch}/{args.epochs}]", disable=not coordinator.is_master()
        ) as progress:
            for step, (images, labels) in enumerate(train_loader):
                loss = criterion(model(images), labels)
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                loss_sum += loss.detach()
                if step % 50 == 0:  # now and then, for item() waits for the GPU
                    progress.set_postfix(loss=f"{loss.item():.4f}")
                progress.update()
            dist.all_reduce(loss_sum)
            mean_loss = loss_sum.item() / (len(train_loader) * coordinator.world_size)
            progress.set_postfix(mean_loss=f"{mean_loss:.4f}")
        if not math.isfinite(mean_loss):
            fail(f"the mean loss of epoch {epoch} is {mean_loss}: nothing of it is saved; try a lower --lr")
        lr_scheduler.step()
        average_batch_norm_statistics(model)

        if args.interval and (epoch % args.interval == 0 or epoch == args.epochs):
            checkpoint.save(booster, model, optimizer, lr_scheduler, args.checkpoint, epoch)

    # Evaluate
    accuracy = evaluate(model, test_images, test_labels)
    coordinator.print_on_master(accuracy_line(accuracy))
    if args.target_acc and accuracy < args.target_acc:
        fail(f"the accuracy, {accuracy:.4f}, is below --target_acc {args.target_acc}")
    startup.leave()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("stopped before the training began")
