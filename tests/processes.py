"""Run under torchrun by test_evaluation.py: prints what the processes agree on."""

import os
import sys

import torch
import torch.distributed as dist
from torchvision.models import resnet18

from resnet_cifar10.data import generate_split
from resnet_cifar10.evaluation import average_batch_norm_statistics, evaluate
from resnet_cifar10.failure import fail_together
from resnet_cifar10.startup import leave


def accuracies():
    """Of one and the same half-trained model, on numbers of images that do not divide evenly."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    images, labels = generate_split("test")
    model.train()
    for batch in images[:400].float().div(255).split(100):  # statistics under which the guesses vary
        model(batch)
    for count in (1, 499, 501, 1000, 1003):
        print(f"{count} images: {evaluate(model, images[:count], labels[:count])!r}", flush=True)


def averages():
    """Of BatchNorm statistics that differ from process to process."""
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean += torch.tensor([dist.get_rank(), 10.0 * dist.get_rank()])
    norm.running_var.fill_(dist.get_rank() + 1)
    norm.weight.data.fill_(dist.get_rank())
    norm.num_batches_tracked += 7
    average_batch_norm_statistics(norm)
    assert norm.weight.unique().tolist() == [dist.get_rank()] and norm.num_batches_tracked == 7
    print("averages:", norm.running_mean.tolist(), norm.running_var.tolist(), flush=True)


def failure():
    """In the last process alone; the others would go on."""
    with fail_together():
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("the last process is out of luck,\nas it were")
    print("went on", flush=True)


dist.init_process_group("gloo")
if dist.get_rank() > 0:
    sys.stdout = open(os.devnull, "w")
globals()[sys.argv[1]]()
leave()
