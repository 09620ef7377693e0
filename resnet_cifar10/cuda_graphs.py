"""A step, but for the optimizer's part, as one CUDA graph: one launch where Python makes hundreds."""

import atexit
from collections.abc import Callable

import torch
from torch import Tensor

from resnet_cifar10 import internals
from resnet_cifar10.failure import fail

WARMUP_STEPS = 11  # what PyTorch's notes on graphs ask for under DDP
_graphs = []


def use_side_stream() -> None:
    """Leave the default stream, where nothing can be captured, before DDP and autograd are set up on it."""
    torch.cuda.set_stream(torch.cuda.Stream())


def capture(step: Callable[[Tensor], Tensor], index: Tensor, model, optimizer) -> Callable[[Tensor], Tensor]:
    """Capture ``step``, a forward and backward pass of what the Booster has boosted.

    All processes call it. Weights, statistics, optimizer and random state stay as they are. A process that cannot
    capture ends the run with one line. Each replay does what the kernels did in the capture, with other numbers, and
    writes the gradients anew: what Python decides in ``step`` is decided once, and nothing accumulates.

    Args:
        step: computes the loss of a batch, calls ``booster.backward``, returns the loss.
        index: an argument for ``step``, on the GPU; those of the replays have its shape.
        model: in training mode; its parameters stay where they are.
        optimizer: its ``step()`` and ``zero_grad()`` follow each replay as they would the eager step.

    Returns:
        A function to call in place of ``step``. The loss it returns is overwritten by its next call.
    """
    network = model.unwrap()
    statistics = [(buffer, buffer.clone()) for buffer in network.buffers()]
    static_index, graph = index.clone(), torch.cuda.CUDAGraph()
    try:
        prepare = internals.make_capturable(optimizer)
        with torch.random.fork_rng(devices=[index.device]):
            for _ in range(WARMUP_STEPS):
                prepare()
                step(static_index)
                internals.discard_gradients(optimizer)
            # thread_local, for NCCL's watchdog asks for the state of earlier collectives meanwhile
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                loss = step(static_index)
    except (RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"the step cannot be captured as a CUDA graph ({reason}): try --eager")
    _graphs.append(graph)
    atexit.register(reset)
    grads = [(parameter, parameter.grad) for parameter in network.parameters()]
    internals.discard_gradients(optimizer)
    for buffer, before in statistics:
        buffer.copy_(before)

    def replay(index: Tensor) -> Tensor:
        assert index.shape == static_index.shape, f"{len(index)} images for a graph of {len(static_index)}"
        static_index.copy_(index, non_blocking=True)
        prepare()
        graph.replay()
        for parameter, grad in grads:  # zero_grad() has taken them away
            parameter.grad = grad
        return loss

    return replay


def reset() -> None:
    """Free all captured graphs: a process group never ends while one with its collectives lives (pytorch#115388)."""
    while _graphs:
        _graphs.pop().reset()
