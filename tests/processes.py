"""Run under torchrun by the tests: prints what the processes agree on."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

from resnet_cifar10.data import TrainingSet, generate_split
from resnet_cifar10.evaluation import average_batch_norm_statistics, evaluate
from resnet_cifar10.runtime import fail_together, prepare_launch, shut_down

import pytest
import torch
import torch.distributed as dist
from torchvision.models import resnet18


def evaluation():
    accuracies()
    averages()


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


def steps():
    """Of ZeRO and of Gemini, changed so that a graph can hold them, after warm-up steps that must leave no trace.

    On a CPU, without a graph, beside ColossalAI as it comes: after each step, in every precision, all bits are equal.
    """
    from resnet_cifar10 import internals
    from tests.stand_in import stand_in_for_a_gpu

    import colossalai.zero as zero
    from colossalai.nn.optimizer import HybridAdam

    stand_in_for_a_gpu()
    scaling = dict(initial_scale=2**5, hysteresis=1, growth_interval=2)

    def low_level_zero(network, dtype, **options):
        network = network.to(dtype)
        optimizer = zero.LowLevelZeroOptimizer(HybridAdam(network.parameters(), lr=0.01), **scaling, **options)
        return network, optimizer, lambda: optimizer._master_param_groups_of_current_rank[0]

    def gemini(network, dtype, min_chunk_size_m=32):
        optimizer = HybridAdam(network.parameters(), lr=0.01)
        options = dict(search_range_m=32, min_chunk_size_m=min_chunk_size_m, chunk_init_device=torch.device("cpu"))
        model = zero.GeminiDDP(network, **options, placement_policy="static", mixed_precision=dtype)
        return model, zero.GeminiOptimizer(optimizer, model, **scaling), lambda: model.state_dict(only_rank_0=False)

    def boost(plugin, dtype, **options):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 10)
        )
        return plugin(network, dtype, **options)

    seed = 0 if dist.get_world_size() > 2 else dist.get_rank()  # a sum of three depends on their order
    half = torch.float16
    for plugin, dtypes in ((low_level_zero, (torch.float32, half, torch.bfloat16)), (gemini, (half, torch.bfloat16))):
        for dtype in dtypes:
            plain, changed = (boost(plugin, dtype) for _ in range(2))
            scales, prepare = [], internals.make_capturable(changed[1])

            def backward(model, optimizer, step, factor=1):
                torch.manual_seed(100 * step + seed)
                images, labels = torch.rand(4, 3, 8, 8).to(dtype), torch.randint(0, 10, (4,))  # noqa: B023
                loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
                optimizer.backward(loss * factor)
                return loss

            statistics = [(buffer, buffer.clone()) for buffer in changed[0].buffers()]
            for step in range(3):
                prepare()
                backward(*changed[:2], step)
                internals.discard_gradients(changed[1])
            for buffer, before in statistics:
                buffer.copy_(before)

            for step in range(8):
                # In half precision, gradients overflow, in one process
                overflow = dtype == half and step == 4 and dist.get_rank() == dist.get_world_size() - 1
                found = []
                for model, optimizer, weights in (plain, changed):
                    if model is changed[0]:
                        prepare()
                    loss = backward(model, optimizer, step, 1e9 if overflow else 1)
                    optimizer.step()
                    optimizer.zero_grad()
                    moments = [state[name] for state in optimizer.optim.state.values() for name in sorted(state)]
                    found.append([loss, weights(), dict(model.named_buffers()), moments])
                    found[-1].append({name: weight.clone() for name, weight in model.named_parameters()})
                    found[-1].append(internals.loss_scaling(optimizer))
                torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
                scales.append(found[1][-1]["loss_scale"])
            print(f"{plugin.__name__}, {dtype}: equal, loss scales {scales}", flush=True)

    for plugin, options, words in (
        (low_level_zero, dict(clip_grad_norm=1.0), "does not support the options _clip_grad_norm"),
        (gemini, dict(min_chunk_size_m=0), "Gemini shards a model of this size"),
    ):
        with pytest.raises(ValueError, match=words):
            internals.make_capturable(boost(plugin, half, **options)[1])


def boosted(plugin, *how):
    """On a GPU, as train.py does it; ``how``: "graphs", "uncapturable" (it waits for the GPU)."""
    from resnet_cifar10 import cuda_graphs
    from train import PRECISIONS, make_booster

    import colossalai
    from colossalai.nn.optimizer import HybridAdam

    if not dist.is_initialized():
        colossalai.launch_from_torch(verbose=False)
        cuda_graphs.use_side_stream()
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda", torch.cuda.current_device())
    train_set = TrainingSet(*(tensor.to(device) for tensor in generate_split("train")), 0)
    train_set.set_epoch(1)
    booster = make_booster(plugin, PRECISIONS[plugin][0])
    options = dict(shuffle=True, drop_last=True, collate_fn=lambda index: index)
    loader = booster.plugin.prepare_dataloader(train_set, 50, **options)
    model, criterion = resnet18(num_classes=10), torch.nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20])
    model, optimizer, criterion, _, lr_scheduler = booster.boost(model, optimizer, criterion, lr_scheduler=lr_scheduler)
    if "uncapturable" in how and dist.get_rank() == dist.get_world_size() - 1:
        model.unwrap().relu.register_forward_pre_hook(lambda module, inputs: (inputs[0].sum().item(), None)[1])

    def forward_backward(index):
        images, labels = train_set.batch(index)
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        return loss.detach()

    if "graphs" in how:
        forward_backward = cuda_graphs.capture(forward_backward, 50, model, optimizer)

    def train(steps):
        model.train()
        found = []
        for _, index in zip(range(steps), loader):
            found.append(forward_backward(index).float().clone())
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(found).tolist()

    return train, (booster, model, optimizer, lr_scheduler)


def losses(plugin, *how):
    """Of 50 steps, half of them after a loss scale that overflows; how many graphs they replayed; what they leave."""
    from resnet_cifar10.internals import loss_scaling, set_loss_scaling

    train, (_, model, optimizer, _) = boosted(plugin, *how)
    rng = [torch.get_rng_state().sum().item(), torch.cuda.get_rng_state().sum().item()]
    replay, replays = torch.cuda.CUDAGraph.replay, []
    with patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))):
        first = train(25)
        if loss_scaling(optimizer)["loss_scale"]:
            set_loss_scaling(optimizer, {"loss_scale": 2.0**24, "growth_step": 0, "hysteresis_step": 0})
        print("losses:", *first, *train(25), flush=True)
    print("replays:", len(replays), flush=True)
    adam = getattr(optimizer.optim, "optim", optimizer.optim)
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    tensors = [*model.unwrap().parameters(), *model.unwrap().buffers(), *moments]
    sums = [torch.as_tensor(tensor).double().sum().item() for tensor in tensors]
    print("state:", *rng, *loss_scaling(optimizer).values(), *sums, flush=True)


def reload(plugin, folder):
    """Save a trained model, load it into an untrained one, save that again."""
    from resnet_cifar10 import checkpoint, internals

    train, trained = boosted(plugin, "graphs")
    train(6)
    average_batch_norm_statistics(trained[1])
    trained[-1].step()
    internals.set_loss_scaling(trained[2], {"loss_scale": 4096.0, "growth_step": 7, "hysteresis_step": 1})
    checkpoint.save(*trained, Path(folder), 1)
    train, fresh = boosted(plugin, "graphs")
    checkpoint.load(*fresh, Path(folder), 1)
    checkpoint.save(*fresh, Path(folder, "again"), 1)
    print("went on with:", *train(3), flush=True)


def save_for_ever(folder):
    """Until killed, over and over, in a child for each line of input; prints the child's number when it starts."""
    from resnet_cifar10 import checkpoint

    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchDDPPlugin

    prepare_launch("torch_ddp")
    for _ in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            print("gone", flush=True)
            continue
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        booster = Booster(plugin=TorchDDPPlugin())
        model = resnet18(num_classes=10)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20])
        model, optimizer, _, _, lr_scheduler = booster.boost(model, optimizer, lr_scheduler=lr_scheduler)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        print(os.getpid(), flush=True)
        while True:
            for lr_scheduler.last_epoch in (2, 3):
                checkpoint.save(booster, model, optimizer, lr_scheduler, Path(folder), lr_scheduler.last_epoch)


if __name__ == "__main__":
    if sys.argv[1] in ("evaluation", "failure", "steps"):
        dist.init_process_group("gloo")
    if int(os.environ.get("RANK", 0)) > 0:
        sys.stdout = open(os.devnull, "w")
    globals()[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        if "resnet_cifar10.cuda_graphs" in sys.modules:
            sys.modules["resnet_cifar10.cuda_graphs"].reset()
        shut_down()
