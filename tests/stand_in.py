"""Runs a script with a CPU in place of a GPU, to train with ZeRO and Gemini where there is none.

    torchrun --nproc_per_node 2 -m tests.stand_in train.py -p gemini --dummy

All of ColossalAI's code for them runs, with gloo; only calls to CUDA are replaced. SyncBatchNorm and CUDA graphs need a
GPU and are left out. HybridAdam, which Gemini requires, gets a kernel in plain PyTorch.
"""

import math
import runpy
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, patch

from resnet_cifar10 import runtime

import torch
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.kernel.kernel_loader import CPUAdamLoader
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero import LowLevelZeroOptimizer
from colossalai.zero.gemini.chunk import Chunk


class CPUAdamOptimizer:
    """Adam, without weight decay, with the interface of ColossalAI's C++ class of that name."""

    def __init__(self, *options):
        pass

    def step(self, step, lr, beta1, beta2, eps, weight_decay, bias_correction, param, grad, exp_avg, exp_avg_sq, scale):
        grad = grad.float() / scale if scale > 0 else grad.float()
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
        param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def close_chunk(chunk, plain=Chunk.close_chunk) -> None:
    """Shard a chunk as on a GPU: a shard on a CPU counts as offloaded."""
    chunk.shard_device, chunk.pin_memory = SimpleNamespace(type="cuda"), False
    plain(chunk)


def stand_in_for_a_gpu() -> None:
    streams = {name: Mock() for name in ("Stream", "current_stream", "synchronize", "empty_cache")}
    patch.multiple(CpuAccelerator, device_count=lambda _: 1, stream=lambda *_: nullcontext(), **streams).start()
    patch.object(LowLevelZeroOptimizer, "_sanity_checks").start()
    patch.object(Chunk, "device_type", "cuda").start()
    patch.object(Chunk, "shard_move").start()
    patch.object(Chunk, "close_chunk", close_chunk).start()
    patch.object(CPUAdamLoader, "load", lambda _: SimpleNamespace(CPUAdamOptimizer=CPUAdamOptimizer)).start()
    prepare_launch = runtime.prepare_launch
    patch.object(runtime, "prepare_launch", lambda plugin: prepare_launch("torch_ddp")).start()
    patch.object(torch.optim, "AdamW", HybridAdam).start()


if __name__ == "__main__":
    stand_in_for_a_gpu()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
