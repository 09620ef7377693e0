"""Runs a script with a CPU in the place of a GPU, so that ZeRO and Gemini train where there is none.

    torchrun --nproc_per_node 2 -m tests.stand_in train.py -p gemini --dummy

All of ColossalAI's code for the two runs, with gloo; only what asks for CUDA by name is answered. SyncBatchNorm is left
out, for it exists on GPUs alone, and so are CUDA graphs.
"""

import runpy
import sys
from contextlib import nullcontext
from unittest.mock import Mock, patch

from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero import LowLevelZeroOptimizer
from colossalai.zero.gemini.chunk import Chunk
from torch.nn import SyncBatchNorm

from resnet_cifar10 import cpu, startup


def stand_in_for_a_gpu() -> None:
    streams = {name: Mock() for name in ("Stream", "current_stream", "synchronize", "empty_cache")}
    patch.multiple(CpuAccelerator, device_count=lambda _: 1, stream=lambda *_: nullcontext(), **streams).start()
    patch.object(LowLevelZeroOptimizer, "_sanity_checks").start()
    patch.object(Chunk, "device_type", "cuda").start()
    patch.object(SyncBatchNorm, "convert_sync_batchnorm", lambda model, *_: model).start()
    patch.object(startup, "check_devices").start()
    cpu.register_cpu_adam()
    plain_step = cpu.CPUAdamOptimizer.step

    def step(self, *args):  # as the CUDA kernel does, it takes Gemini's gradients, in half precision
        plain_step(self, *args[:8], args[8].float(), *args[9:])

    patch.object(cpu.CPUAdamOptimizer, "step", step).start()


if __name__ == "__main__":
    stand_in_for_a_gpu()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
