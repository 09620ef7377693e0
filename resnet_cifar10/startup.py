"""The edges of a run: what train.py makes sure of before it launches, and how its processes end."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from resnet_cifar10.failure import fail

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def set_launcher_variables() -> None:
    """Set the variables that torchrun sets, for one process, where no launcher has: ``python train.py`` then works."""
    if "RANK" in os.environ:
        if missing := [name for name in LAUNCHER_VARIABLES if name not in os.environ]:
            fail(f"RANK is set, but not {', '.join(missing)}: start with torchrun or colossalai run, or unset RANK")
        return
    os.environ.update(zip(LAUNCHER_VARIABLES, ("0", "0", "1", "1", "127.0.0.1", str(free_port()))))


def is_one_node() -> bool:
    """Whether all processes run on this machine, and see the same files."""
    return os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]


def end_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process at once and without a traceback; the first process says how to go on.

    A thread waits for them, for the main one may be waiting, deaf to signals, for processes that are already gone.
    Call it when HybridAdam's kernels are there: a compilation that ends so leaves a lock that the next run waits for.
    """

    def wait() -> None:
        (number,) = os.read(reader, 1)
        if os.environ["RANK"] == "0":
            name = signal.Signals(number).name
            print(f"\n{name}: stopped; the same command with -r latest goes on", file=sys.stderr, flush=True)
        os._exit(128 + number)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=wait, daemon=True).start()


def check_devices(plugin: str) -> None:
    """Fail where ``plugin`` needs a GPU and there is none, or where a node has more processes than GPUs."""
    import torch

    if not torch.cuda.is_available():
        if plugin != "torch_ddp":
            fail(f"-p {plugin} needs a GPU and PyTorch sees none; -p torch_ddp runs on a CPU, too")
        return
    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if processes > gpus:
        fail(f"{processes} processes on a node with {gpus} GPU(s): start at most {gpus} with --nproc_per_node")


def check_kernels() -> None:
    """Fail where HybridAdam could not build its CUDA kernels, for want of nvcc or one of PyTorch's CUDA version.

    ColossalAI asks for the toolkit even when the kernels are built already. Where they are not, say that they will be.
    """
    from colossalai.kernel.kernel_loader import CPUAdamLoader, FusedOptimizerLoader

    kernels = [kernel() for loader in (CPUAdamLoader, FusedOptimizerLoader) for kernel in loader.REGISTRY]
    kernels = [kernel for kernel in kernels if kernel.is_available()]
    for kernel in kernels:
        try:
            kernel.assert_compatible()
        except Exception as error:  # ColossalAI raises AssertionError, FileNotFoundError, ValueError and Exception here
            fail(
                f"HybridAdam compiles CUDA kernels and cannot: {error} "
                "Install the CUDA toolkit of the version PyTorch was built with and set CUDA_HOME to its folder, "
                "the one that holds bin/nvcc."
            )
    missing = [kernel.name for kernel in kernels if not _is_built(kernel)]
    if missing and os.environ["LOCAL_RANK"] == "0":
        print(
            f"compiling {' and '.join(missing)}, HybridAdam's CUDA kernels: up to two minutes, once on this machine",
            flush=True,
        )


def _is_built(kernel) -> bool:
    try:
        kernel.import_op()  # with ColossalAI, when it was installed
        return True
    except ImportError:
        return (Path(kernel.get_jit_extension_folder_path()) / f"{kernel.name}.so").exists()


def shut_down() -> None:
    """Destroy the default process group, on all processes, at the end of a run, and first what would keep it alive."""
    import torch.distributed as dist

    from resnet_cifar10 import cuda_graphs

    cuda_graphs.reset()
    # PyTorch 2.5 destroys a gloo group holding the GIL, and waits for threads that may want it to free the tensors of
    # the last collectives: for ever. Asleep, this thread leaves them the GIL.
    time.sleep(0.1)
    dist.destroy_process_group()
