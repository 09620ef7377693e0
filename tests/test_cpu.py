import pytest
import torch
from colossalai.nn.optimizer import HybridAdam

from resnet_cifar10.cpu import CPUAdamOptimizer, register_cpu_adam


@pytest.mark.parametrize("weight_decay", [0, 0.1])
@pytest.mark.parametrize("adamw_mode, reference", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_hybrid_adam_equals_torch(adamw_mode, reference, weight_decay):
    register_cpu_adam()
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (3,), ())]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    options = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    hybrid = HybridAdam(ours, adamw_mode=adamw_mode, **options)
    torch_adam = reference(theirs, **options)
    for step in range(20):
        if step == 10:
            for optimizer in (hybrid, torch_adam):
                optimizer.param_groups[0]["lr"] /= 3
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        hybrid.step()
        torch_adam.step()
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_loss_scale_divides_the_gradients():
    grads = torch.tensor([1.0, -2.0])
    plain, scaled = ([torch.ones(2), torch.zeros(2), torch.zeros(2)] for _ in range(2))
    kernel = CPUAdamOptimizer(0.1, 0.9, 0.999, 1e-8, 0, True)
    for tensors, gradient, loss_scale in ((plain, grads, -1), (scaled, grads * 64, 64)):
        params, exp_avg, exp_avg_sq = tensors
        kernel.step(1, 0.1, 0.9, 0.999, 1e-8, 0, True, params, gradient, exp_avg, exp_avg_sq, loss_scale)
    assert all(torch.equal(one, other) for one, other in zip(plain, scaled))
    assert grads.tolist() == [1.0, -2.0]


def test_without_bias_correction():
    params, exp_avg, exp_avg_sq = torch.ones(1), torch.zeros(1), torch.zeros(1)
    CPUAdamOptimizer(0.1, 0.9, 0.99, 0, 0, True).step(
        1, 0.1, 0.9, 0.99, 0, 0, False, params, torch.ones(1), exp_avg, exp_avg_sq, -1
    )
    torch.testing.assert_close(params, torch.tensor([1 - 0.1 * 0.1 / 0.1]))
