"""ZeRO and Gemini, trained, stopped and resumed, with a CPU in the place of their GPU."""

from importlib.util import find_spec

from resnet_cifar10 import metrics
from resnet_cifar10.checkpoint import PARTS, epochs

import pytest
import torch
from conftest import ROOT, copy_epoch, launch, read


def train(processes, plugin, *arguments, **environment):
    how = () if plugin == "torch_ddp" else ("-m", "tests.stand_in")
    return launch(processes, *how, "train.py", "--batch_size", 5, "-p", plugin, "-i", 1, *arguments, **environment)


@pytest.mark.optional
@pytest.mark.parametrize(
    "plugin, precision, processes",
    [
        ("low_level_zero", "fp16", 2),
        pytest.param("low_level_zero", "fp32", 1, marks=pytest.mark.slow),
        pytest.param("gemini", "fp16", 3, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(plugin, precision, processes, make_images, tmp_path):
    images, whole, parts = make_images(train=2, test=2), tmp_path / "whole", tmp_path / "parts"
    how = (processes, plugin, "--precision", precision, "--epochs", 2, "--log_dir", whole)
    run = train(*how, "-c", whole, DATA=images).succeeded()
    without_curves = find_spec("tensorboard") is None
    assert run.output.count("warning:") == run.output.count("warning: no curves in") == without_curves

    copy_epoch(whole, parts, 1)
    train(*how, "-c", parts, "-r", "latest", DATA=images).succeeded()
    for part in PARTS:
        expected, found = read(whole, part, 2), read(parts, part, 2)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    model, state = read(whole, "model", 2), read(whole, "state", 2)
    assert all(weight.dtype == torch.float32 for weight in model.values() if weight.is_floating_point())
    half = {"fp32": torch.float16, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert not torch.equal(model["conv1.weight"], model["conv1.weight"].to(half).float())  # the master weights
    logged = metrics.read(whole)
    assert [each["loss_scale"] for each in logged] == ([32, 32] if precision == "fp16" else [None, None])
    assert state["loss_scale"] == (32 if precision == "fp16" else 0)
    evaluated = launch(None, "eval.py", "-e", 2, "-c", whole, DATA=images).succeeded()
    assert abs(float(evaluated.accuracies[0]) - 100 * logged[1]["accuracy"]) <= 100 / 20 + 0.01  # an image of 20


@pytest.mark.slow
def test_gemini_resumes_a_sharded_model(make_images, tmp_path):
    """Its fp32 weights are not rounded on the way."""
    images = make_images(train=2, test=2)
    script = (ROOT / "train.py").read_text()
    changed = script.replace(
        "enable_async_reduce=False", "enable_async_reduce=False, min_chunk_size_m=1, search_range_m=1"
    )
    assert changed != script
    (tmp_path / "train.py").write_text(changed)
    for folder, last in (("whole", 2), ("parts", 1), ("parts", 2)):
        how = ("--batch_size", 5, "-p", "gemini", "-i", 1, "--epochs", last, "-r", "latest", "-c", tmp_path / folder)
        launch(2, "-m", "tests.stand_in", tmp_path / "train.py", *how, DATA=images, PYTHONPATH=ROOT).succeeded()
    whole, parts = (read(tmp_path / folder, "model", 2) for folder in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert not torch.equal(whole["conv1.weight"], whole["conv1.weight"].half().float())


@pytest.mark.parametrize("links", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_a_checkpoint_of_one_plugin_resumes_under_any_other_on_any_number_of_processes(make_images, tmp_path, links):
    images, steps = make_images(train=2, test=2), 0
    plugins = [("torch_ddp", 2), ("gemini", 1), ("low_level_zero", 3), ("torch_ddp", 1), ("low_level_zero", 1)]
    plugins += [("gemini", 2), ("torch_ddp", 1)]
    for epoch, (plugin, processes) in enumerate(plugins[:links], start=1):
        precision = ("--precision", "fp32" if plugin == "torch_ddp" else "bf16")
        resume = ("-r", epoch - 1) if epoch > 1 else ()
        train(processes, plugin, *precision, *resume, "--epochs", epoch, "-c", tmp_path, DATA=images).succeeded()
        steps += 20 // (5 * processes)
        assert {values["step"].item() for values in read(tmp_path, "optimizer", epoch)["state"].values()} == {steps}
    assert epochs(tmp_path) == list(range(1, links + 1))
