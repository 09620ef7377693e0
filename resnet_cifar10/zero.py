"""ColossalAI 0.5.0's ZeRO optimizer with a step in a few launches, in place, without a change to its results."""

import torch
import torch.distributed as dist

SUPPORTED_OPTIONS = dict(  # of the optimizer; with others it does more than what is fused here
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


def fuse_step(optimizer) -> bool:
    """Make a boosted ``LowLevelZeroOptimizer`` of stage 1 handle all parameters at once instead of one by one.

    As it comes, it cuts, pads, casts and copies each gradient and each weight by itself, asks the GPU for each gradient
    whether it overflowed, and for the loss scale twice: some 400 small operations and 70 waits a step. Here gradients
    and weights pass through buffers that hold them all, and it waits once, in fp16 alone, to learn of an overflow.
    Every parameter must get a gradient in every step, and every step follow a backward pass of its own.

    Private parts of ColossalAI 0.5.0 are used and replaced.

    Returns:
        Whether it has been done. Where those parts are not as expected, or the optimizer has other options than
        :data:`SUPPORTED_OPTIONS`, it is left as it is.
    """
    try:
        if not hasattr(optimizer, "_reduce_grad") or any(
            getattr(optimizer, name) != value for name, value in SUPPORTED_OPTIONS.items()
        ):
            return False
        (group,) = optimizer.pg_to_param_list
        working, masters = optimizer._working_param_groups[0], optimizer._master_param_groups_of_current_rank[0]
        padded = [optimizer._working_param_to_padded_working_param[weight] for weight in working]
        mixin = optimizer.mixed_precision_mixin
        scaler = getattr(mixin, "grad_scaler", None)
        if scaler is not None:  # its few numbers on the CPU, where they are updated and read
            scales = {name: getattr(scaler, name) for name in ("_scale", "_min_scale", "_max_scale")}
    except (AttributeError, KeyError, ValueError):
        return False
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [weight.numel() for weight in padded]
    shard_sizes = [master.numel() for master in masters]

    # Gradients, parameter by parameter, each with its padding; this process's shards of them, in fp32
    grads = torch.empty(sum(sizes), dtype=optimizer.dtype, device=masters[0].device)
    grad_views = [part[: weight.numel()].view_as(weight) for part, weight in zip(grads.split(sizes), working)]
    shards = [part.chunk(world_size)[rank] for part in grads.split(sizes)]
    master_grads = torch.empty(sum(shard_sizes), device=grads.device)
    master_grad_views = master_grads.split(shard_sizes)

    # Weights, one process's shards after the other's, in the memory of the gradients, which are no longer needed then
    gathered = grads.chunk(world_size)
    gathered_shards = [shard for part in gathered for shard in part.split(shard_sizes)]
    working_shards = [weight.chunk(world_size)[number] for number in range(world_size) for weight in padded]

    def reduce_grad(partition_grad: bool) -> None:
        grads.zero_()  # for the padding
        torch._foreach_copy_(grad_views, [weight.grad for weight in working])
        grads.div_(world_size)
        dist.all_reduce(grads, group=group)

    def check_overflow() -> bool:
        return not grads.isfinite().all().item()  # reduced, they are the same in all processes

    @torch.no_grad()
    def step(closure=None) -> None:
        assert closure is None, "closure is not supported by step()"
        if not optimizer.require_grad_sync:
            return
        if mixin is not None and mixin.should_skip_step():
            optimizer.zero_grad()
            return
        torch._foreach_copy_(master_grad_views, shards)
        if mixin is not None:
            master_grads.mul_(1.0 / mixin.get_grad_div_scale())
        for master, grad in zip(masters, master_grad_views):
            master.grad = grad
        optimizer.optim.step()
        torch._foreach_copy_(gathered[rank].split(shard_sizes), masters)
        dist.all_gather_into_tensor(grads, gathered[rank], group=group)
        torch._foreach_copy_(working_shards, gathered_shards)

    if scaler is not None:
        vars(scaler).update({name: scale if scale is None else scale.cpu() for name, scale in scales.items()})
        mixin.check_overflow = check_overflow
    optimizer._reduce_grad, optimizer.step = reduce_grad, step
    return True
