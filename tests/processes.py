"""Run under torchrun by the tests: prints what the processes agree on."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from resnet_cifar10.data import TrainingSet, generate_split
from resnet_cifar10.evaluation import average_batch_norm_statistics, evaluate
from resnet_cifar10.failure import fail_together
from resnet_cifar10.model import make_model
from resnet_cifar10.startup import shut_down


def evaluation():
    accuracies()
    averages()


def accuracies():
    """Of one and the same half-trained model, on numbers of images that do not divide evenly."""
    torch.manual_seed(0)
    model = make_model()
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
    """Of ZeRO and of Gemini, faster than they come."""
    from tests.stand_in import stand_in_for_a_gpu

    stand_in_for_a_gpu()
    zero_steps()
    gemini_steps()
    resets()


def zero_steps():
    """ColossalAI's ZeRO step and the fused one, on a CPU: after each, in every precision, all bits must be equal."""
    from colossalai.nn.optimizer import HybridAdam
    from colossalai.zero import LowLevelZeroOptimizer

    from resnet_cifar10 import zero

    def run(dtype, fused, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).to(dtype)
        optimizer = LowLevelZeroOptimizer(HybridAdam(model.parameters(), lr=0.1), initial_scale=2**5, **options)
        return model, optimizer, fused and zero.fuse_step(optimizer)

    seed = 0 if dist.get_world_size() > 2 else dist.get_rank()  # a sum of three depends on their order
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scales, runs = [], [run(dtype, fused, hysteresis=1, growth_interval=2) for fused in (False, True)]
        assert [done for _, _, done in runs] == [False, True]
        for step in range(8):
            torch.manual_seed(100 * step + seed)
            images, labels = torch.randn(4, 7).to(dtype), torch.randint(0, 3, (4,))
            if dtype == torch.float16 and step == 4 and dist.get_rank() == dist.get_world_size() - 1:
                images[0, 0] = torch.inf  # gradients overflow, in one process
            for model, optimizer, _ in runs:
                optimizer.backward(torch.nn.functional.cross_entropy(model(images).float(), labels))
                optimizer.step()
                optimizer.zero_grad()
            (model, optimizer, _), (fused_model, fused_optimizer, _) = runs
            torch.testing.assert_close(fused_model.state_dict(), model.state_dict(), rtol=0, atol=0)
            state = optimizer.state_dict()["state"]
            torch.testing.assert_close(fused_optimizer.state_dict()["state"], state, rtol=0, atol=0)
            for master, fused_master in zip(*(opt._master_param_groups_of_current_rank[0] for _, opt, _ in runs)):
                assert torch.equal(master, fused_master) and master.isfinite().all()
            if dtype == torch.float16:
                scales.append(optimizer.mixed_precision_mixin.loss_scale)
                assert scales[-1] == fused_optimizer.mixed_precision_mixin.loss_scale
        print(f"ZeRO, {dtype}: equal, loss scales {scales}", flush=True)

    _, clips, done = run(torch.float16, fused=True, clip_grad_norm=1.0)
    assert not done and "step" not in vars(clips)


def gemini_steps():
    """Gemini's, operator by operator and with the network as one, on a CPU: after each, all bits must be equal."""
    from colossalai.nn.optimizer import HybridAdam
    from colossalai.zero import GeminiDDP, GeminiOptimizer

    from resnet_cifar10 import cuda_graphs

    def run(dtype, is_one, min_chunk_size_m=32):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(3600, 10)
        )
        optimizer = HybridAdam(network.parameters(), lr=0.01)
        options = dict(search_range_m=32, min_chunk_size_m=min_chunk_size_m, chunk_init_device=torch.device("cpu"))
        model = GeminiDDP(network, **options, placement_policy="static", mixed_precision=dtype)
        optimizer = GeminiOptimizer(optimizer, model, initial_scale=2**5, hysteresis=1, growth_interval=2)

        def replay(operator, inputs, **_):  # as a graph does, with the shapes and at the addresses of its capture
            shape, addresses = inputs[0].shape, [weight.data_ptr() for weight in inputs[1:]]

            def call(images, *weights):
                replays.append(dtype)
                assert images.shape == shape and [weight.data_ptr() for weight in weights] == addresses
                with patch.dict(vars(model.module)):
                    del model.module.forward
                    return operator(images, *weights)

            return call

        if is_one:
            with patch.object(torch.cuda, "make_graphed_callables", replay):
                cuda_graphs._capture_under_gemini(model, torch.rand(4, 3, 32, 32))
        return model, optimizer

    replays = []
    for dtype in (torch.float16, torch.bfloat16):
        scales, runs = [], [run(dtype, is_one) for is_one in (False, True)]
        for step in range(8):
            torch.manual_seed(100 * step + (dist.get_rank() if dist.get_world_size() < 3 else 0))
            images, labels = torch.rand(4, 3, 32, 32), torch.randint(0, 10, (4,))
            found = []
            for model, optimizer in runs:
                model.train()
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.backward(loss * (1e9 if step == 4 and dtype == torch.float16 else 1))
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    found.append({"loss": loss, "logits": model(images[:3]), **dict(model.module.named_buffers())})
                found[-1].update(model.state_dict(only_rank_0=False))
            torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
            if dtype == torch.float16:
                scales.append(optimizer.mix_precision_mixin.loss_scale)
        assert replays.count(dtype) == 8
        print(f"Gemini, {dtype}: equal, loss scales {scales}", flush=True)
    with pytest.raises(RuntimeError, match="Gemini moves the parameters"):
        run(torch.float16, is_one=True, min_chunk_size_m=0)


def resets():
    """Right after collectives, whose tensors another thread may still have to free."""
    from resnet_cifar10 import cuda_graphs

    for _ in range(20):
        dist.all_reduce(torch.zeros(1000))
        cuda_graphs.reset()


def boosted(plugin, *how):
    """On a GPU, as train.py does it; ``how``: "graphs", "fused" (ZeRO), "uncapturable" (it waits for the GPU)."""
    import colossalai
    from colossalai.booster import Booster
    from colossalai.nn.optimizer import HybridAdam

    from resnet_cifar10 import cuda_graphs, zero
    from train import make_plugin

    if not dist.is_initialized():
        colossalai.launch_from_torch(verbose=False)
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda", torch.cuda.current_device())
    train_set = TrainingSet(*generate_split("train"), 0, device)
    train_set.set_epoch(1)
    boosting = make_plugin(plugin)
    loader = boosting.prepare_dataloader(train_set, 50, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    booster = Booster(plugin=boosting, mixed_precision="fp16" if plugin == "torch_ddp_fp16" else None)
    model, criterion = make_model(), torch.nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20])
    with cuda_graphs.capturable():
        boosted = booster.boost(model, optimizer, criterion, lr_scheduler=lr_scheduler)
    model, optimizer, criterion, _, lr_scheduler = boosted
    if "fused" in how:
        assert zero.fuse_step(optimizer)
    if "uncapturable" in how:
        model.unwrap().relu.register_forward_pre_hook(lambda module, inputs: (inputs[0].sum().item(), None)[1])
    if "graphs" in how:
        cuda_graphs.capture(model, 50, autocast=plugin == "torch_ddp_fp16")

    def train(steps):
        model.train()
        found = []
        for _, (images, labels) in zip(range(steps), loader):
            loss = criterion(model(images), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().float())
        return torch.stack(found).tolist()

    return train, (booster, model, optimizer, lr_scheduler)


def losses(plugin, *how):
    """Of the first 50 steps, and what they leave BatchNorm with; how many graphs they replayed."""
    train, (_, model, *_) = boosted(plugin, *how)
    replay, replays = torch.cuda.CUDAGraph.replay, []
    with patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))):
        print("losses:", *train(50), flush=True)
    print("replays:", len(replays), flush=True)
    print("statistics:", *(buffer.float().sum().item() for buffer in model.unwrap().buffers()), flush=True)


def reload(plugin, folder):
    """Save a trained model, load it into an untrained one, save that again."""
    from resnet_cifar10 import checkpoint

    how = ["fused"] if plugin == "low_level_zero" else []
    train, trained = boosted(plugin, *how)
    train(6)
    average_batch_norm_statistics(trained[1])
    trained[-1].step()
    checkpoint._set_loss_scaling(trained[2], {"loss_scale": 4096.0, "growth_step": 7, "hysteresis_step": 1})
    checkpoint.save(*trained, Path(folder), 1)
    train, fresh = boosted(plugin, *how)
    checkpoint.load(*fresh, Path(folder), 1)
    checkpoint.save(*fresh, Path(folder, "again"), 1)
    print("went on with:", *train(3), flush=True)


def save_for_ever(folder):
    """Until killed, over and over, in a child for each line of input; prints the child's number when it starts."""
    from colossalai.booster import Booster
    from colossalai.nn.optimizer import HybridAdam

    from resnet_cifar10 import checkpoint
    from resnet_cifar10.cpu import CPUTorchDDPPlugin, register_cpu_adam

    for _ in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            print("gone", flush=True)
            continue
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        register_cpu_adam()
        booster = Booster(plugin=CPUTorchDDPPlugin())
        model = make_model()
        optimizer = HybridAdam(model.parameters(), lr=1e-3)
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
        shut_down()
