"""Every plugin on the GPUs there are, up to two."""

import pytest
import torch
from conftest import python, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPUS = min(2, torch.cuda.device_count())


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini"])
def test_eval_agrees_with_training(plugin, tmp_path):
    run = torchrun(GPUS, "train.py", "-p", plugin, "--dummy", "--epochs", 2, "-c", tmp_path).succeeded()
    evaluated = python("eval.py", "--dummy", "-e", 2, "-c", tmp_path).succeeded()
    (printed,), (found,) = run.accuracies, evaluated.accuracies
    assert float(printed) > 90
    assert found == printed if plugin == "torch_ddp" else abs(float(found) - float(printed)) <= 0.1 + 1e-9


def test_a_checkpoint_of_one_plugin_resumes_under_any_other(tmp_path):
    plugins = ["torch_ddp", "gemini", "low_level_zero", "torch_ddp_fp16", "gemini"]
    for epoch, plugin in enumerate(plugins):
        resume = ("-r", epoch) if epoch else ()
        arguments = ("-p", plugin, "--dummy", "-i", 1, "--epochs", epoch + 1, "-c", tmp_path, *resume)
        run = torchrun(GPUS, "train.py", *arguments).succeeded()
    assert float(run.accuracies[0]) > 90


def test_more_processes_than_gpus():
    torchrun(torch.cuda.device_count() + 1, "train.py", "--dummy").failed_with("GPU(s)")
