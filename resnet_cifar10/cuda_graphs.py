"""Forward and backward of the network as two CUDA graphs: two launches a step, where Python makes hundreds."""

import atexit
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from colossalai.tensor.param_op_hook import ColoParamOpHookManager
from colossalai.zero import GeminiDDP
from torch import Tensor
from torch.func import functional_call

from resnet_cifar10.data import SIZE
from resnet_cifar10.failure import fail

WARMUP_STEPS = 11  # what PyTorch's notes on graphs ask for under DDP


@contextmanager
def capturable() -> Iterator[None]:
    """Boost in this block what is to be captured later: on a stream of its own.

    DDP and autograd go on using the stream they were set up on; where that is the default one, the capture fails.
    """
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture(model, batch_size: int, autocast: bool) -> None:
    """Make a boosted ``model`` replay graphs when it trains on batches of ``batch_size``; it evaluates as before.

    All processes call it. Where they cannot capture, they go on without graphs, and the first says so; where only some
    can, those hang in SyncBatchNorm, and after a minute the others end the run with one line.

    Args:
        model: boosted, its parameters at addresses that do not change; left in training mode. Its network takes a batch
            of images, and nothing else.
        autocast: whether ``model`` runs its network in fp16 by autocast.
    """
    network = model.train().unwrap()
    statistics = [(buffer, buffer.clone()) for buffer in network.buffers()]
    weight = next(network.parameters())
    images = torch.rand(batch_size, 3, SIZE, SIZE).to(weight.device, weight.dtype)
    stream = torch.cuda.current_stream()
    gloo_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=1))  # NCCL's may wait in a capture
    failure = None
    try:
        with torch.autocast("cuda", dtype=torch.float16, enabled=autocast, cache_enabled=False):
            if isinstance(model, GeminiDDP):
                _capture_under_gemini(model, images)
            else:
                torch.cuda.make_graphed_callables(network, (images,), num_warmup_iters=WARMUP_STEPS)
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
        torch.cuda.set_stream(stream)  # a capture that fails does not always leave its own
    atexit.register(reset)

    failures = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(failures, failure, group=gloo_group)
    except RuntimeError:
        fail(f"not all processes could capture CUDA graphs ({failure}): try --eager")
    if any(failures):
        vars(network).pop("forward", None)  # which make_graphed_callables has put before the class's own
        reset()
        if dist.get_rank() == 0:
            reason = next(filter(None, failures))
            print(f"warning: training without CUDA graphs, which could not be captured: {reason}", file=sys.stderr)
    for buffer, before in statistics:  # the warm-up has moved BatchNorm's
        buffer.copy_(before)


def _capture_under_gemini(model: GeminiDDP, images: Tensor) -> None:
    """Pass the whole network through Gemini's hooks as one operator with all parameters, and replay that.

    Operator by operator, its hooks run in Python some 40 times each way, and no graph can hold them. A network of less
    than GeminiPlugin's ``min_chunk_size_m``, by default 32 Mi parameters, has a single chunk, which stays where it is.
    """
    if not all(chunk.keep_gathered for chunk in model.chunk_manager.get_chunks(model.fp16_params)):
        raise RuntimeError("Gemini moves the parameters of a network of this size")
    if len(model.hooks) > 1:
        raise RuntimeError("Gemini computes in fp8, operator by operator")
    network, hooks = model.unwrap(), ColoParamOpHookManager
    names, parameters = zip(*network.named_parameters())
    weights = [parameter.data.requires_grad_() for parameter in parameters]

    def operator(images: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(network, dict(zip(names, weights)), (images,))

    replay = torch.cuda.make_graphed_callables(operator, (images, *weights), num_warmup_iters=WARMUP_STEPS)
    eager = network.forward

    def forward(images: Tensor) -> Tensor:
        if not (model.training and hooks.has_hook()):
            return eager(images)
        with torch._C.DisableTorchFunction():
            images, *weights = hooks.pre_op(parameters, images, *parameters)
            return hooks.post_op(parameters, replay(images, *weights))

    network.forward = forward


def reset() -> None:
    """Free all captured graphs: a process group never ends while one with its collectives lives (pytorch#115388).

    Not while a collective is under way: the search for the graphs holds all tensors for a moment, and PyTorch complains
    of those that a thread frees meanwhile.
    """
    time.sleep(0.1)  # for the threads that free the tensors of the last collectives
    for graph in gc.get_objects():
        if type(graph) is torch.cuda.CUDAGraph:
            graph.reset()
