"""The network: one place to make it for training, for evaluation, and for checkpoints to be compared with."""

from torch import nn
from torchvision.models import resnet18

from resnet_cifar10.data import CLASSES


def make_model() -> nn.Module:
    """An untrained network, from float32 images of shape (B, 3, 32, 32) to logits of shape (B, 10)."""
    return resnet18(num_classes=CLASSES)
