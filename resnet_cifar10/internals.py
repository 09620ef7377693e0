"""The private parts of ColossalAI 0.5.0 that are used or replaced here, and why. None changes a result."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from colossalai.zero import GeminiOptimizer, LowLevelZeroOptimizer

FUSED_OPTIONS = dict(  # of ZeRO's optimizer; with others it does more than what is fused here
    _master_weights=True,
    _cpu_offload=False,
    _partition_grads=False,
    _overlap_communication=False,
    _overlap_allgather=False,
    _fp8_communication=False,
    _communication_dtype=None,
    _clip_grad_norm=0.0,
    num_param_groups=1,
)


def _mixed_precision(optimizer):
    """What ZeRO's and Gemini's optimizers know of fp16 or bf16, under two names; of others None."""
    return getattr(optimizer, "mixed_precision_mixin", None) or getattr(optimizer, "mix_precision_mixin", None)


def _grad_scaler(optimizer):
    return getattr(_mixed_precision(optimizer), "grad_scaler", None)


def loss_scaling(optimizer) -> dict:
    """The loss scale and the steps towards its next change; all 0 where the loss is not scaled."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None:  # torch's
        numbers = scaler.state_dict()
        return {"loss_scale": numbers["scale"], "growth_step": numbers["_growth_tracker"], "hysteresis_step": 0}
    scaler = _grad_scaler(optimizer)
    if scaler is None:
        return {"loss_scale": 0, "growth_step": 0, "hysteresis_step": 0}
    steps = {"growth_step": scaler._growth_step, "hysteresis_step": scaler._hysteresis_step}
    return {"loss_scale": scaler.scale.item(), **steps}


def set_loss_scaling(optimizer, state: dict) -> None:
    """Go on with what :func:`loss_scaling` has returned, unless that run had no loss scale, or this one has none."""
    if not state["loss_scale"]:
        return
    steps, scaler = int(state["growth_step"]), getattr(optimizer, "scaler", None)
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": state["loss_scale"], "_growth_tracker": steps})
    elif (scaler := _grad_scaler(optimizer)) is not None:
        scaler.scale.fill_(state["loss_scale"])
        scaler._growth_step, scaler._hysteresis_step = steps, int(state["hysteresis_step"])


def make_capturable(optimizer) -> Callable[[], None]:
    """Change a boosted ``optimizer`` so that a CUDA graph can hold the forward and backward passes before its step.

    - The loss scale: ColossalAI multiplies the loss by ``scale.item()``, a constant for a graph. Here the graph reads a
      number on the GPU, and the scale itself is updated and read on the CPU, without a wait. PyTorch's GradScaler needs
      nothing of the kind.
    - ZeRO: see :func:`_fuse_step`.
    - Gemini: with its weights gathered, all processes have the same gradients, and need not ask each other, and the GPU
      twice, whether one has overflowed.

    Returns:
        A function to call before each backward pass, replayed or not, that brings the loss scale to the GPU.

    Raises:
        ValueError: a graph cannot hold them.
    """
    mixin, scaler = _mixed_precision(optimizer), _grad_scaler(optimizer)
    if isinstance(optimizer, GeminiOptimizer):
        if not all(chunk.keep_gathered for chunk in optimizer.chunk16_set):
            raise ValueError("Gemini moves the weights of a model of this size")
        if scaler is not None:
            mixin.check_overflow = mixin.check_local_overflow
    if isinstance(optimizer, LowLevelZeroOptimizer):
        _fuse_step(optimizer)
    if scaler is None:
        return lambda: None
    scale = torch.empty((), device=scaler.scale.device)
    for name in ("_scale", "_min_scale", "_max_scale"):
        setattr(scaler, name, getattr(scaler, name).cpu())

    def prepare() -> None:
        scale.fill_(mixin.loss_scale)
        mixin.optim_state = type(mixin.optim_state).SCALED

    mixin.pre_backward = lambda loss: loss * scale.to(loss.dtype)
    return prepare


def discard_gradients(optimizer) -> None:
    """Do after a backward pass what ``optimizer.step()`` does after an overflow, and leave the loss scale alone.

    Gemini's gradients lie where its weights were: ``zero_grad()`` alone would leave them there.
    """
    is_gemini, mixin = isinstance(optimizer, GeminiOptimizer), _mixed_precision(optimizer)
    if is_gemini:
        optimizer._set_grad_ptr()
    optimizer.zero_grad()
    if is_gemini:
        optimizer._update_fp16_params()
    if hasattr(mixin, "optim_state"):
        mixin.optim_state = type(mixin.optim_state).UNSCALED


def _fuse_step(optimizer: LowLevelZeroOptimizer) -> None:
    """Make ZeRO of stage 1 handle all parameters at once instead of one by one.

    As it comes, it cuts, pads, casts and copies each gradient and each weight by itself, asks the GPU for each gradient
    whether it overflowed, and keeps books of gradients that a replay would not write: some 400 small operations and 70
    waits a step. Here gradients and weights pass through buffers that hold them all, and it waits once, in fp16 alone,
    to learn of an overflow. Every parameter must get a gradient in every step, and every step follow a backward pass of
    its own.

    Raises:
        ValueError: the optimizer has other options than :data:`FUSED_OPTIONS`.
    """
    if odd := [name for name, value in FUSED_OPTIONS.items() if getattr(optimizer, name) != value]:
        raise ValueError(f"LowLevelZeroPlugin has options that its fused step does not know: {', '.join(odd)}")
    (group,) = optimizer.pg_to_param_list
    working, masters = optimizer._working_param_groups[0], optimizer._master_param_groups_of_current_rank[0]
    padded = [optimizer._working_param_to_padded_working_param[weight] for weight in working]
    mixin = optimizer.mixed_precision_mixin
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [weight.numel() for weight in padded]
    shard_sizes = [master.numel() for master in masters]

    # Gradients, parameter by parameter, each with its padding; this process's shards of them, in fp32
    grads = torch.empty(sum(sizes), dtype=optimizer.dtype, device=masters[0].device)
    grad_views = [part[: weight.numel()].view_as(weight) for part, weight in zip(grads.split(sizes), working)]
    shards = [part.chunk(world_size)[rank] for part in grads.split(sizes)]
    master_grads, is_finite = torch.empty(sum(shard_sizes), device=grads.device), grads.new_empty((), dtype=torch.bool)
    master_grad_views = master_grads.split(shard_sizes)

    # Weights, one process's shards after the other's, in the memory of the gradients, which are no longer needed then
    gathered = grads.chunk(world_size)
    gathered_shards = [shard for part in gathered for shard in part.split(shard_sizes)]
    working_shards = [weight.chunk(world_size)[number] for number in range(world_size) for weight in padded]

    def reduce_grad(partition_grad: bool) -> None:
        if any(weight.grad is None for weight in working):
            raise ValueError("LowLevelZeroPlugin: a parameter has no gradient")
        grads.zero_()  # for the padding
        torch._foreach_copy_(grad_views, [weight.grad for weight in working])
        grads.div_(world_size)
        dist.all_reduce(grads, group=group)
        is_finite.copy_(grads.isfinite().all())  # reduced, they are the same in all processes
        torch._foreach_copy_(master_grad_views, shards)

    @torch.no_grad()
    def step(closure=None) -> None:
        assert closure is None, "closure is not supported by step()"
        if not optimizer.require_grad_sync:
            return
        if mixin is not None and mixin.should_skip_step():
            optimizer.zero_grad()
            return
        if mixin is not None:
            master_grads.mul_(1.0 / mixin.get_grad_div_scale())
        for master, grad in zip(masters, master_grad_views):
            master.grad = grad
        optimizer.optim.step()
        torch._foreach_copy_(gathered[rank].split(shard_sizes), masters)
        dist.all_gather_into_tensor(grads, gathered[rank], group=group)
        torch._foreach_copy_(working_shards, gathered_shards)

    if _grad_scaler(optimizer) is not None:
        mixin.check_overflow = lambda: not is_finite.item()
    optimizer._reduce_grad, optimizer.step = reduce_grad, step
