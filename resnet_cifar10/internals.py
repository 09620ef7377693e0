"""Private parts of ColossalAI 0.5.0 that are used or replaced. The results stay the same."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.zero import GeminiDDP, GeminiOptimizer, LowLevelZeroOptimizer
from torch import Tensor
from torch.nn.functional import pad

FUSED_OPTIONS = dict(  # the options of ZeRO's optimizer that _fuse_step supports
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
    """The object of ZeRO's or Gemini's optimizer that handles fp16 or bf16; None for other optimizers."""
    return getattr(optimizer, "mixed_precision_mixin", None) or getattr(optimizer, "mix_precision_mixin", None)


def _grad_scaler(optimizer):
    return getattr(_mixed_precision(optimizer), "grad_scaler", None)


def loss_scaling(optimizer) -> dict:
    """The loss scale and the steps until its next change; all 0 without loss scaling."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None:  # PyTorch's
        numbers = scaler.state_dict()
        return {"loss_scale": numbers["scale"], "growth_step": numbers["_growth_tracker"], "hysteresis_step": 0}
    scaler = _grad_scaler(optimizer)
    if scaler is None:
        return {"loss_scale": 0, "growth_step": 0, "hysteresis_step": 0}
    steps = {"growth_step": scaler._growth_step, "hysteresis_step": scaler._hysteresis_step}
    return {"loss_scale": scaler.scale.item(), **steps}


def set_loss_scaling(optimizer, state: dict) -> None:
    """Restore a result of :func:`loss_scaling`, if both runs scale the loss."""
    if not state["loss_scale"]:
        return
    steps, scaler = int(state["growth_step"]), getattr(optimizer, "scaler", None)
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": state["loss_scale"], "_growth_tracker": steps})
    elif (scaler := _grad_scaler(optimizer)) is not None:
        scaler.scale.fill_(state["loss_scale"])
        scaler._growth_step, scaler._hysteresis_step = steps, int(state["hysteresis_step"])


def _zero_masters(model, optimizer) -> dict:
    """The fp32 weights of ZeRO by name: (the parameter of the model, this process's shard); {} for other plugins."""
    if not isinstance(optimizer, LowLevelZeroOptimizer):
        return {}
    masters = optimizer.get_working_to_master_map()
    return {name: (weight, masters[id(weight)]) for name, weight in model.unwrap().named_parameters()}


def gather_masters(model, optimizer) -> dict[str, Tensor]:
    """The fp32 weights of ZeRO by name, on the CPU; {} for other plugins. Every process calls this."""
    weights = {}
    for name, (weight, shard) in _zero_masters(model, optimizer).items():
        gathered = shard.new_empty(shard.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(gathered, shard.flatten())
        weights[name] = gathered[: weight.numel()].view_as(weight).cpu()
    return weights


def full_precision(model):
    """A context in which Gemini gathers and scatters the fp32 weights of a sharded model without rounding them."""
    return patch.object(model, "mixed_precision", torch.float32) if isinstance(model, GeminiDDP) else nullcontext()


def load_weights(model, optimizer, weights: dict[str, Tensor]) -> None:
    """Load fp32 weights into the model and, for ZeRO and Gemini, into the fp32 weights of the optimizer."""
    with full_precision(model):
        (model if isinstance(model, GeminiDDP) else model.unwrap()).load_state_dict(weights)
    for name, (weight, shard) in _zero_masters(model, optimizer).items():
        padded = pad(weights[name].flatten(), (0, shard.numel() * dist.get_world_size() - weight.numel()))
        shard.copy_(padded.chunk(dist.get_world_size())[dist.get_rank()].view_as(shard))


def make_capturable(optimizer) -> Callable[[], None]:
    """Change a boosted ``optimizer`` so that a CUDA graph can contain the backward pass.

    - Loss scale: ColossalAI multiplies the loss by ``scale.item()``, which would be a constant in a graph. Instead, the
      graph reads a number on the GPU, and the scale is updated on the CPU.
    - ZeRO: see :func:`_fuse_step`.
    - Gemini: each process checks for an overflow by itself. Without sharding, all have the same gradients.

    PyTorch's GradScaler needs no change.

    Returns:
        A function to call before each backward pass or replay. It copies the loss scale to the GPU.

    Raises:
        ValueError: a graph cannot contain this optimizer's backward pass.
    """
    mixin, scaler = _mixed_precision(optimizer), _grad_scaler(optimizer)
    if isinstance(optimizer, GeminiOptimizer):
        if not all(chunk.keep_gathered for chunk in optimizer.chunk16_set):
            raise ValueError("Gemini shards a model of this size")
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
    """Do what ``optimizer.step()`` does after an overflow, but keep the loss scale.

    Gemini stores gradients where its weights were, so ``zero_grad()`` is not enough.
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
    """Replace ZeRO's step, for stage 1, by one with few kernel launches.

    ColossalAI cuts, pads, casts and copies gradients and weights one by one, and waits for the GPU for each gradient.
    Here, all of them share one buffer, and only fp16 waits, once, for the overflow check. Every step needs one backward
    pass, with a gradient for every parameter.

    Raises:
        ValueError: the optimizer has other options than :data:`FUSED_OPTIONS`.
    """
    if odd := [name for name, value in FUSED_OPTIONS.items() if getattr(optimizer, name) != value]:
        raise ValueError(f"the fused ZeRO step does not support the options {', '.join(odd)}")
    (group,) = optimizer.pg_to_param_list
    working, masters = optimizer._working_param_groups[0], optimizer._master_param_groups_of_current_rank[0]
    padded = [optimizer._working_param_to_padded_working_param[weight] for weight in working]
    mixin = optimizer.mixed_precision_mixin
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [weight.numel() for weight in padded]
    shard_sizes = [master.numel() for master in masters]

    # One buffer for all gradients, with padding, and one for the fp32 gradients of this process's shards
    grads = torch.empty(sum(sizes), dtype=optimizer.dtype, device=masters[0].device)
    grad_views = [part[: weight.numel()].view_as(weight) for part, weight in zip(grads.split(sizes), working)]
    shards = [part.chunk(world_size)[rank] for part in grads.split(sizes)]
    master_grads, is_finite = torch.empty(sum(shard_sizes), device=grads.device), grads.new_empty((), dtype=torch.bool)
    master_grad_views = master_grads.split(shard_sizes)

    # The first buffer is also used for the gathered weights: the shards of rank 0, of rank 1, ...
    gathered = grads.chunk(world_size)
    gathered_shards = [shard for part in gathered for shard in part.split(shard_sizes)]
    working_shards = [weight.chunk(world_size)[number] for number in range(world_size) for weight in padded]

    def reduce_grad(partition_grad: bool) -> None:
        if any(weight.grad is None for weight in working):
            raise ValueError("a parameter has no gradient, which the fused ZeRO step does not support")
        grads.zero_()  # padding
        torch._foreach_copy_(grad_views, [weight.grad for weight in working])
        grads.div_(world_size)
        dist.all_reduce(grads, group=group)
        is_finite.copy_(grads.isfinite().all())  # the same in all processes
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
