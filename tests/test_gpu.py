"""Every plugin on the GPUs there are, up to two."""

import re
import subprocess
import sys
from importlib.util import find_spec

from resnet_cifar10.checkpoint import PARTS
from resnet_cifar10.metrics import read
from train import PRECISIONS

import pytest
import torch
from conftest import BIN, GPUS, ROOT, VISIBLE_GPUS, killed_after, python, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
PROCESSES = min(2, GPUS)
TOLERANCES = {"fp32": 0, "fp16": 0.1, "bf16": 1}  # in points: train.py evaluates in this precision, eval.py in fp32


@pytest.fixture(autouse=True)
def visible_gpus(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which torchrun sets for several processes; shards may share the cores
    if VISIBLE_GPUS is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)


@pytest.mark.parametrize("plugin, precision", [(plugin, each) for plugin in PRECISIONS for each in PRECISIONS[plugin]])
def test_eval_agrees_with_training(plugin, precision, tmp_path):
    """Which goes on after it has evaluated for the first time."""
    arguments = ("--dummy", "-c", tmp_path)
    how = ("-p", plugin, "--precision", precision, "--epochs", 2, "--eval_interval", 1, "--log_dir", tmp_path)
    run = torchrun(PROCESSES, "train.py", *arguments, *how).succeeded()
    evaluated = python("eval.py", "-e", 2, *arguments).succeeded()
    (printed,), (found,) = run.accuracies, evaluated.accuracies
    assert float(printed) > 50  # two epochs of 100 steps: the running statistics still change a lot
    print(f"{plugin}, {precision}: train.py {printed} %, eval.py {found} %")
    assert abs(float(found) - float(printed)) <= TOLERANCES[precision] + 1e-9
    assert all(metrics["peak_memory_mib"] > 100 for metrics in read(tmp_path))
    assert [metrics["loss_scale"] is not None for metrics in read(tmp_path)] == [precision == "fp16"] * 2
    without_curves = find_spec("tensorboard") is None
    assert run.output.count("warning:") == run.output.count("warning: no curves in") == without_curves
    assert re.search(rf"^{plugin}, {precision}, {PROCESSES} process\(es\), (?!CPU)[\w -]+, PyTorch", run.stdout)


def test_a_checkpoint_of_one_plugin_resumes_under_any_other(tmp_path):
    plugins = ["torch_ddp", "gemini", "low_level_zero", "torch_ddp_fp16", "gemini"]
    for epoch, plugin in enumerate(plugins):
        resume = ("-r", epoch) if epoch else ()
        arguments = ("-p", plugin, "--dummy", "-i", 1, "--epochs", epoch + 1, "-c", tmp_path, *resume)
        run = torchrun(PROCESSES, "train.py", *arguments).succeeded()
    assert float(run.accuracies[0]) > 50  # here, too


@pytest.mark.parametrize("plugin", PRECISIONS)
def test_saving_and_loading_lose_nothing(plugin, tmp_path):
    (tmp_path / "again").mkdir()
    run = torchrun(PROCESSES, "-m", "tests.processes", "reload", plugin, tmp_path).succeeded()
    losses = [float(loss) for loss in re.search("went on with: (.*)", run.output)[1].split()]
    assert max(losses) < 2.5
    saved, reloaded = (
        {part: torch.load(folder / f"{part}_1.pth", weights_only=True) for part in PARTS}
        for folder in (tmp_path, tmp_path / "again")
    )
    torch.testing.assert_close(reloaded["state"], saved["state"], rtol=0, atol=0)
    assert (saved["state"]["loss_scale"] == 4096) == (plugin != "torch_ddp")
    for name, weight in saved["model"].items():
        assert torch.equal(weight, reloaded["model"][name]), name
        assert weight.dtype in (torch.float32, torch.int64)
    weight = saved["model"]["conv1.weight"]
    assert not torch.equal(weight, weight.half().float())  # not rounded on the way
    for number, values in saved["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(reloaded["optimizer"]["state"][number][name]))
    groups = [checkpoint["optimizer"]["param_groups"][0] for checkpoint in (saved, reloaded)]
    assert groups[0]["lr"] == groups[1]["lr"]
    assert saved["lr_scheduler"]["_last_lr"] == reloaded["lr_scheduler"]["_last_lr"]


@pytest.mark.parametrize("plugin", PRECISIONS)
def test_a_resumed_epoch_is_within_the_noise_of_two_runs(plugin, tmp_path):
    losses = []
    for folder, resume in (("a", -1), ("b", -1), ("a", 1)):
        how = ("-p", plugin, "--dummy", "--epochs", 2, "-i", 1, "-r", resume)
        log = tmp_path / f"{folder} {resume}"
        torchrun(PROCESSES, "train.py", *how, "-c", tmp_path / folder, "--log_dir", log).succeeded()
        losses.append(read(log)[-1]["loss"])
    a, b, resumed = losses
    print(f"{plugin}: mean losses of epoch 2: {a:.5f} and {b:.5f}, resumed {resumed:.5f}")
    assert abs(resumed - a) <= 3 * abs(a - b) + 0.1 * a


def test_more_processes_than_gpus():
    torchrun(GPUS + 1, "train.py", "--dummy").failed_with("GPU(s)")


def first_losses(plugin, *how):
    run = torchrun(PROCESSES, "-m", "tests.processes", "losses", plugin, *how).succeeded()
    assert f"replays: {50 if how else 0}\n" in run.output and "warning:" not in run.output
    return [
        torch.tensor([float(x) for x in re.search(rf"{name}: (.*)", run.output)[1].split()], dtype=torch.float64)
        for name in ("losses", "state")
    ]


@pytest.mark.parametrize("plugin", PRECISIONS)
def test_graphs_change_nothing_but_the_speed(plugin):
    """Nor does what they ask of ColossalAI's optimizers, a new loss scale and overflows included."""
    (eager, state), (again, _), (graphed, graphed_state) = (first_losses(plugin, *how) for how in ([], [], ["graphs"]))
    noise, difference = (eager - again).abs(), (eager - graphed).abs()
    print(f"{plugin}: two eager runs differ by {noise.max():.2e}, a graph by {difference.max():.2e}")
    assert eager[0] > 2 > eager[-1]
    if noise.max() == 0:
        assert torch.equal(graphed, eager) and torch.equal(graphed_state, state)
    else:  # reductions of several processes, in changing order
        assert difference[0] <= noise[0] + 1e-4
        assert difference.mean() <= 2 * noise.mean() + 5e-3
        torch.testing.assert_close(graphed_state, state, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("plugin", ["torch_ddp", "gemini"])
def test_a_failed_capture_ends_the_run_with_one_line(plugin):
    """In the last process alone."""
    run = torchrun(PROCESSES, "-m", "tests.processes", "losses", plugin, "graphs", "uncapturable")
    run.failed_with("the step cannot be captured as a CUDA graph", "try --eager")


@pytest.mark.parametrize("target, code", [(0.2, 0), (1, 1)])
def test_a_run_with_graphs_ends_at_once(target, code, tmp_path):
    """Within 5 s of its last line; a hang would take for ever."""
    arguments = ["train.py", "--dummy", "--epochs", "1", "-i", "0", "--target_acc", str(target)]
    command = [BIN / "torchrun", "--standalone", f"--nproc_per_node={PROCESSES}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    with killed_after(200, process):
        assert any(line.startswith("Accuracy") for line in process.stdout)
        assert (process.wait(timeout=5) == 0) == (code == 0)
