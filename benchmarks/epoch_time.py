"""How long an epoch takes, against the classic training loop, for one plugin; both are timed in one run.

    colossalai run --nproc_per_node 2 benchmarks/epoch_time.py -p torch_ddp
    torchrun --nproc_per_node 2 benchmarks/epoch_time.py -p torch_ddp --scaling

The classic loop is that of many examples: torchvision's transforms on PIL images in the training process, the plugin
and its data loader with their defaults, no graphs, and the loss read every step. Pixels are random, 50,000 images.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from resnet_cifar10 import arguments, quiet, startup
from resnet_cifar10.failure import fail
from train import PLUGINS, make_plugin

IMAGES = 50_000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time an epoch against the classic training loop.")
    parser.error = fail
    parser.add_argument("-p", "--plugin", default="torch_ddp", choices=PLUGINS)
    parser.add_argument("--batch_size", type=arguments.batch_size, default=100, help="(default: %(default)s)")
    parser.add_argument("--steps", type=arguments.positive_int, default=50, help="timed at once (default: %(default)s)")
    parser.add_argument("--repeats", type=arguments.positive_int, default=5, help="(default: %(default)s)")
    parser.add_argument("--scaling", action="store_true", help="instead, time our loop with one process and with all")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in our loop either")
    return parser.parse_args()


def images_per_second_alone() -> float:
    """Of one process, on the first GPU, while the others wait to be joined."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in startup.LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC")
    }
    run = subprocess.run([sys.executable, *sys.argv], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(run.stdout, end="", flush=True)
    return float(re.search(r"([\d,]+) images/s", run.stdout)[1].replace(",", ""))


def main() -> None:
    args = parse_args()
    alone = images_per_second_alone() if args.scaling and os.environ.get("RANK") == "0" else None
    startup.set_launcher_variables()
    startup.check_devices(args.plugin)
    quiet.silence_the_harmless()

    import colossalai
    import torch
    import torch.distributed as dist
    from colossalai.accelerator import get_accelerator
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
    from colossalai.nn.optimizer import HybridAdam
    from PIL import Image
    from torch.utils.data import Dataset
    from torchvision import transforms

    from resnet_cifar10 import cpu, cuda_graphs, data
    from resnet_cifar10.model import make_model

    if not torch.cuda.is_available():
        cpu.register_cpu_adam()
    colossalai.launch_from_torch(verbose=False)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = get_accelerator().get_current_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        cuda_graphs.use_side_stream()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)

    class PILImages(Dataset):
        """In memory, as torchvision's CIFAR10 keeps them."""

        arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        targets = labels.tolist()
        transform = transforms.Compose(
            [transforms.Pad(4), transforms.RandomHorizontalFlip(), transforms.RandomCrop(32), transforms.ToTensor()]
        )

        def __len__(self):
            return IMAGES

        def __getitem__(self, index):
            return self.transform(Image.fromarray(self.arrays[index])), self.targets[index]

    def boosted(plugin):
        booster = Booster(plugin=plugin, mixed_precision="fp16" if args.plugin == "torch_ddp_fp16" else None)
        model = make_model()
        adam = HybridAdam(model.parameters(), lr=1e-3 * world_size)
        model, optimizer, criterion, _, _ = booster.boost(model, adam, torch.nn.CrossEntropyLoss())
        model.train()
        return booster, model, optimizer, adam, criterion

    def endless(loader):
        while True:
            yield from loader

    def loop(step, optimizer, batches):
        def run(count: int) -> None:
            for _ in range(count):
                step(next(batches))
                optimizer.step()
                optimizer.zero_grad()

        return run

    def classic_loop():
        plugin = {
            "low_level_zero": lambda: LowLevelZeroPlugin(initial_scale=2**5),
            "gemini": lambda: GeminiPlugin(initial_scale=2**5),
        }.get(args.plugin, TorchDDPPlugin if on_gpu else cpu.CPUTorchDDPPlugin)()
        loader = plugin.prepare_dataloader(PILImages(), args.batch_size, shuffle=True, drop_last=True)
        booster, model, optimizer, adam, criterion = boosted(plugin)

        def step(batch) -> None:
            images, labels = batch
            loss = criterion(model(images.to(device)), labels.to(device))
            booster.backward(loss, optimizer)
            loss.item()

        return loop(step, optimizer, endless(loader)), adam

    def our_loop():
        train_set = data.TrainingSet(images, labels, 0, device)
        train_set.set_epoch(1)
        plugin = make_plugin(args.plugin)
        loader = plugin.prepare_dataloader(
            train_set, args.batch_size, shuffle=True, drop_last=True, collate_fn=lambda index: index
        )
        booster, model, optimizer, adam, criterion = boosted(plugin)

        def step(index):
            images, labels = train_set.batch(index)
            loss = criterion(model(images), labels)
            booster.backward(loss, optimizer)
            return loss

        if on_gpu and not args.eager:
            step = cuda_graphs.capture(step, torch.arange(args.batch_size, device=device), model, optimizer)
        return loop(step, optimizer, endless(loader)), adam

    def synchronize() -> None:
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()

    def seconds(run) -> float:
        synchronize()
        start = time.perf_counter()
        run(args.steps)
        synchronize()
        return time.perf_counter() - start

    def measured(make_loop) -> tuple:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        run, adam = make_loop()
        run(args.steps)  # warm up
        moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
        memory = f"optimizer state {sum(moment.nbytes for moment in moments) / 2**20:.1f} MiB"
        if on_gpu:
            memory += f", peak {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
        return run, memory

    def report(name: str, times: list[float], memory: str) -> float:
        step = statistics.median(times) / args.steps
        epoch = step * (IMAGES // (args.batch_size * world_size))
        spread = (max(times) - min(times)) / statistics.median(times)
        if rank == 0:
            print(
                f"{args.plugin}, {world_size} process(es), {name}: {epoch:.2f} s an epoch, "
                f"{args.batch_size * world_size / step:,.0f} images/s, {1000 * step:.2f} ms a step "
                f"(spread of {args.repeats}: {100 * spread:.0f} %), {memory}",
                flush=True,
            )
        return step

    ours, our_memory = measured(our_loop)
    if args.scaling:
        step = report("this project", [seconds(ours) for _ in range(args.repeats)], our_memory)
        if alone is not None:
            efficiency = args.batch_size / step / alone
            print(f"{args.plugin}: {100 * efficiency:.0f} % of {world_size} times the images/s of one process")
    else:
        classic, classic_memory = measured(classic_loop)
        times = [(seconds(classic), seconds(ours)) for _ in range(args.repeats)]
        classic_step = report("classic loop", [time for time, _ in times], classic_memory)
        our_step = report("this project", [time for _, time in times], our_memory)
        if rank == 0:
            print(f"{args.plugin}, {world_size} process(es): {classic_step / our_step:.1f} times faster", flush=True)
    startup.shut_down()


if __name__ == "__main__":
    main()
