"""What ColossalAI 0.5.0 lacks to run ``torch_ddp`` on a CPU: an Adam kernel, and DDP without SyncBatchNorm."""

import math

import torch
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from colossalai.interface import OptimizerWrapper
from colossalai.kernel.extensions.base_extension import _Extension
from colossalai.kernel.kernel_loader import CPUAdamLoader


class CPUAdamOptimizer:
    """Adam(W) in plain PyTorch, called by :class:`colossalai.nn.optimizer.HybridAdam` for parameters on a CPU.

    Stands in for the class of that name in ColossalAI's C++ kernel, which a machine without CUDA cannot build.
    """

    def __init__(self, lr, beta1, beta2, eps, weight_decay, adamw_mode):
        self.adamw_mode = adamw_mode

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        params: torch.Tensor,
        grads: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        loss_scale: float,
    ) -> None:
        """Update ``params``, ``exp_avg`` and ``exp_avg_sq`` in place; ``step`` counts from 1.

        A ``loss_scale`` above 0 divides the gradients first; the four tensors have one shape.
        """
        if loss_scale > 0:
            grads = grads / loss_scale
        if weight_decay and self.adamw_mode:
            params.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grads = grads.add(params, alpha=weight_decay)
        exp_avg.lerp_(grads, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        correction1 = 1 - beta1**step if bias_correction else 1
        correction2 = 1 - beta2**step if bias_correction else 1
        denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(eps)
        params.addcdiv_(exp_avg, denominator, value=-lr / correction1)


class _TorchAdamExtension(_Extension):
    """Hands :class:`CPUAdamOptimizer` to ColossalAI's kernel loader, behind any kernel of ColossalAI's own."""

    def __init__(self):
        super().__init__(name="cpu_adam_torch", support_aot=False, support_jit=False, priority=0)

    def is_available(self) -> bool:
        return not torch.cuda.is_available()

    def assert_compatible(self) -> None:
        pass

    def build_aot(self):
        raise NotImplementedError("nothing to build")

    build_jit = build_aot

    def load(self):
        import resnet_cifar10.cpu as kernel  # the loader wants something with a CPUAdamOptimizer: this module is

        return kernel


def register_cpu_adam() -> None:
    """Make :class:`colossalai.nn.optimizer.HybridAdam` work on a machine without CUDA."""
    if _TorchAdamExtension not in CPUAdamLoader.REGISTRY:
        CPUAdamLoader.register_extension(_TorchAdamExtension)


class CPUTorchDDPPlugin(TorchDDPPlugin):
    """:class:`TorchDDPPlugin` that keeps plain BatchNorm: SyncBatchNorm, to which it converts, exists on GPUs alone."""

    def configure(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
        model = TorchDDPModel(model, **self.ddp_kwargs)
        return model, optimizer and OptimizerWrapper(optimizer), criterion, dataloader, lr_scheduler
