"""Launch, errors, shutdown, and writing files."""

import fcntl
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_claims = []  # descriptors of locked folders; the locks end with the process


def fail(message: object) -> NoReturn:
    """Exit with code 1 and one line on standard error.

    Every process of a node must call it. Local rank 0 prints the line.

    Raises:
        SystemExit: always.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The launcher kills all processes when the first one exits: let local rank 0 print first
        time.sleep(30)
    sys.exit("error: " + " ".join(str(message).split()))


@contextmanager
def fail_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """End all processes with one line if any of them raises an :class:`OSError` or :class:`ValueError` in the block.

    The block is a collective: every process of ``group`` (default: the default process group, if any) must run it.

    Raises:
        SystemExit: in every process, with the message of the lowest rank that raised.
    """
    error = None
    try:
        yield
    except (OSError, ValueError) as raised:
        error = str(raised)
    errors = [error]
    if dist.is_initialized():
        errors *= dist.get_world_size()
        dist.all_gather_object(errors, error, group)
    for message in errors:
        if message is not None:
            fail(message)


def survive_closed_streams() -> None:
    """Run on if standard output or error is closed, on a full disk, or a pipe whose reader has ended."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))
        stream = getattr(sys, name)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
        for method in ("write", "flush"):
            setattr(stream, method, partial(_write, stream, getattr(stream, method)))


def _write(stream, method: Callable, *args) -> int:
    try:
        return method(*args)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return unused.getsockname()[1]


def prepare_launch(plugin: str) -> None:
    """Check the launcher and the GPUs. Set what a plain ``python train.py``, or a machine without a GPU, needs.

    Raises:
        SystemExit: a launcher variable is missing, or there are too few GPUs.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process at once, without a traceback
    survive_closed_streams()
    if "RANK" not in os.environ:
        os.environ.update(zip(LAUNCHER_VARIABLES, ("0", "0", "1", "1", "127.0.0.1", str(free_port()))))
    if missing := [name for name in LAUNCHER_VARIABLES if name not in os.environ]:
        fail(f"RANK is set, but not {', '.join(missing)}: start with torchrun or colossalai run, or unset RANK")

    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if gpus == 0 and plugin != "torch_ddp":
        fail(f"-p {plugin} needs a GPU and PyTorch sees none; -p torch_ddp also runs on a CPU")
    if 0 < gpus < processes:
        fail(f"{processes} processes on a node with {gpus} GPU(s): start at most {gpus} with --nproc_per_node")
    if gpus == 0:  # TorchDDPPlugin converts to SyncBatchNorm, which needs a GPU
        torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, process_group=None: module

    timer = threading.Timer(10, report_waiting)
    timer.daemon = True
    timer.start()


def report_waiting() -> None:
    """Print a line if the process group is not there yet."""
    if not dist.is_initialized() and os.environ["LOCAL_RANK"] == "0":
        env = os.environ
        print(
            f"rank {env['RANK']} is waiting for the rest of WORLD_SIZE={env['WORLD_SIZE']} processes at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}; to run one process, unset RANK",
            file=sys.stderr,
        )


def environment() -> str:
    """The world size, the device, and the versions that matter, for the first line of a run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (PyTorch sees no GPU)"
    versions = f"PyTorch {torch.__version__}, ColossalAI {version('colossalai')}"
    return f"{dist.get_world_size()} process(es), {device}, {versions}"


@contextmanager
def compiling_kernels() -> Iterator[None]:
    """End the run with one line if HybridAdam's CUDA kernels cannot be compiled in the block."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C must release the lock of the compilation
    try:
        yield
    except Exception as error:  # ColossalAI raises different exceptions
        fail(
            f"HybridAdam cannot compile its CUDA kernels: {error} Install the CUDA toolkit of the version PyTorch was "
            "built with, and set CUDA_HOME to the folder that holds its bin/nvcc."
        )
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def shut_down() -> None:
    """Destroy the default process group. Every process calls this at the end of a run."""
    # PyTorch 2.5 holds the GIL while it destroys a gloo group, and waits for threads that may need the GIL to free the
    # tensors of the last collectives. Give them time first.
    time.sleep(0.1)
    dist.destroy_process_group()


def make_folders(*folders: Path | None, exclusive: bool = False) -> None:
    """Make folders that do not exist, on rank 0, and check that files can be written to them.

    Args:
        exclusive: refuse a folder that another run has claimed in this way, on this machine, and that still runs.

    Raises:
        SystemExit: in every process; a folder cannot be written to, or is claimed.
    """
    with fail_together():
        for folder in set(folders) - {None}:
            if os.environ.get("RANK", "0") != "0":
                return
            try:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
                if exclusive:
                    _claims.append(os.open(folder, os.O_RDONLY))
                    fcntl.flock(_claims[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another run writes to {folder}: give each run a folder of its own") from error
            except OSError as error:
                raise ValueError(f"cannot write to {folder}: {error.strerror}") from error


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to ``path`` at the end of the block: the file is written whole or not.

    Raises:
        OSError: it cannot be written; the message names ``path``.
    """
    new = path.with_name(f".new_{os.getpid()}")
    try:
        yield new
        flush(new)
        new.replace(path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        new.unlink(missing_ok=True)
