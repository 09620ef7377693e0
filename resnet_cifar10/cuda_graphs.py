"""One CUDA graph for the forward and backward passes of a step: one launch instead of hundreds."""

import atexit
from collections.abc import Callable

from resnet_cifar10 import internals
from resnet_cifar10.runtime import fail

import torch
from torch import Tensor

WARMUP_STEPS = 11  # PyTorch's notes on CUDA graphs require these for DDP
_graphs = []


def use_side_stream() -> None:
    """On a GPU, switch to a new stream, because the default stream cannot be captured. Call it before boost."""
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.Stream())


def capture(step: Callable[[Tensor], Tensor], batch_size: int, model, optimizer) -> Callable[[Tensor], Tensor]:
    """Capture ``step``, a forward and backward pass of a model that the Booster has wrapped.

    Every process calls this. Weights, statistics, the optimizer and random state do not change. If the
    capture fails in any process, the run ends with one line.

    A replay runs the captured kernels on new data. Python code in ``step`` does not run again, and gradients do
    not accumulate.

    Args:
        step: computes the loss of a batch, calls ``booster.backward`` and returns the loss. Its argument has the
            indices of the images, int64 of shape (B,).
        batch_size: B, the same in each step.
        model: left in training mode; its parameters must stay where they are.
        optimizer: its ``step()`` and ``zero_grad()`` follow each replay, as they would follow ``step``.

    Returns:
        A function to call instead of ``step``. Its next call overwrites the loss that it returns.
    """
    model.train()
    network = model.unwrap()
    statistics = [(buffer, buffer.clone()) for buffer in network.buffers()]
    static_index = torch.arange(batch_size, device="cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        prepare = internals.make_capturable(optimizer)
        with torch.random.fork_rng(devices=[static_index.device]):
            for _ in range(WARMUP_STEPS):
                prepare()
                step(static_index)
                internals.discard_gradients(optimizer)
            # thread_local: NCCL's watchdog thread queries earlier collectives during the capture
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
        assert index.shape == static_index.shape, f"the CUDA graph needs {len(static_index)} images, not {len(index)}"
        static_index.copy_(index, non_blocking=True)
        prepare()
        graph.replay()
        for parameter, grad in grads:  # zero_grad() has removed them
            parameter.grad = grad
        return loss

    return replay


def reset() -> None:
    """Free all graphs. A process group with collectives in a graph can never be destroyed (pytorch#115388)."""
    while _graphs:
        _graphs.pop().reset()
