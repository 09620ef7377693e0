"""Takes the waiting out of a step of ColossalAI 0.5.0's ZeRO optimizer, in place, without a change to its results."""

import torch
import torch.distributed as dist


def wait_once_a_step(optimizer) -> None:
    """Make a step of a boosted ``LowLevelZeroOptimizer`` ask the GPU for one number instead of some 130.

    As it comes, the optimizer fetches the loss scale twice, asks for each gradient by itself whether it overflowed, and
    computes a norm of each to clip by even where clipping is off. Here the loss scale stays on the CPU, where it is
    updated; all gradients are checked, and unscaled, at once; and norms that nobody asked for are not computed.

    Private parts of ColossalAI 0.5.0 are replaced; where they are not as expected, the optimizer is left as it is.
    """
    mixin = optimizer.mixed_precision_mixin
    scaler = getattr(mixin, "grad_scaler", None)
    methods = ("_compute_grad_norm", "_unscale_and_clip_grads", "pg_to_grad_store", "_clip_grad_norm")
    if not all(hasattr(optimizer, name) for name in methods) or optimizer._clip_grad_norm > 0:
        return
    optimizer._compute_grad_norm = lambda *args, **kwargs: 0.0

    if not all(hasattr(scaler, name) for name in ("_scale", "_min_scale", "_max_scale")):
        return  # fp32 and bf16 scale nothing
    scaler._scale, scaler._min_scale, scaler._max_scale = (
        limit if limit is None else limit.cpu() for limit in (scaler._scale, scaler._min_scale, scaler._max_scale)
    )
    one = torch.ones((), device=mixin.found_overflow.device)

    def check_overflow() -> bool:
        grads = [
            grad
            for store in optimizer.pg_to_grad_store.values()
            for group in range(optimizer.num_param_groups)
            for grad in store.get_working_grads_by_group_id(group)
        ]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, mixin.found_overflow.zero_(), one)
        dist.all_reduce(mixin.found_overflow, op=dist.ReduceOp.MAX)
        return mixin.found_overflow.item() > 0

    def unscale(grads: list, total_norm: float) -> None:
        torch._foreach_mul_(grads, 1.0 / mixin.get_grad_div_scale())

    mixin.check_overflow = check_overflow
    optimizer._unscale_and_clip_grads = unscale
