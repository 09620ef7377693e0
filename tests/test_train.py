"""The scripts as users run them, on a small image folder."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from colossalai.kernel.kernel_loader import CPUAdamLoader, FusedOptimizerLoader
from conftest import ROOT, TRAIN, colossalai_run, launch, python, torchrun, weights
from torchvision.models import resnet18

from resnet_cifar10.checkpoint import PARTS, epochs
from resnet_cifar10.startup import check_devices, check_kernels


def test_training_reports_and_saves(trained):
    folder, run = trained
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{part}_{epoch}.pth" for part in PARTS for epoch in (1, 2, 3)
    )
    for epoch in (1, 2, 3):
        assert re.search(rf"Epoch \[{epoch}/3\]: +\d+%.* \d/3 \[\d\d:\d\d<.*, loss=\d+\.\d{{4}}", run.output)
        line = rf"(?m)^Epoch \[{epoch}/3\]: mean loss \d+\.\d{{4}}, learning rate 0.002, [\d,]+ images/s, \d+\.\d s"
        assert len(re.findall(line + (rf", accuracy {run.accuracies[0]} %$" if epoch == 3 else "$"), run.stdout)) == 1
    start, *_, summary, accuracy = run.stdout.splitlines()
    versions = f"PyTorch {torch.__version__}, ColossalAI {version('colossalai')}"
    assert start == f"torch_ddp, fp32, 2 process(es), CPU (PyTorch sees no GPU), {versions}"
    assert re.fullmatch(
        r"Trained 3 epoch\(s\) in \d+\.\d s, [\d,]+ images/s while training, 3 checkpoint\(s\) written", summary
    )
    assert accuracy == f"Accuracy of the model on the test images: {run.accuracies[0]} %"
    resnet18(num_classes=10).load_state_dict(weights(folder, 3))


def test_a_quiet_start(trained):
    """At most six lines before the first bar that are not the launcher's own."""
    before = [stream.split("Epoch [1/3]", maxsplit=1)[0] for stream in (trained[1].stdout, trained[1].stderr)]
    lines = "\n".join(before).splitlines()
    lines = [line for line in lines if line.strip() and "torch/distributed/run.py" not in line]
    assert len(lines) <= 6, lines


def test_only_the_harmless_is_silenced():
    code = "import warnings; from resnet_cifar10.quiet import silence_the_harmless as f; f()\n"
    code += "warnings.warn('Please install apex from source'); warnings.warn('Please look out')\n"
    code += "warnings.warn('TypedStorage is deprecated', FutureWarning)"
    output = launch(None, "-c", code).succeeded().output
    assert "apex" not in output and "Please look out" in output and "TypedStorage" in output


def test_processes_through_colossalai_run_and_a_missed_target(tmp_path, images):
    folder = tmp_path / "new" / "folder"
    run = colossalai_run(2, *TRAIN, "--epochs", 1, "-c", folder, "--target_acc", 1, DATA=images)
    run.failed_with("is below --target_acc 1")
    assert len(run.accuracies) == 1 and epochs(folder) == [1]


def test_one_process_without_a_launcher_without_checkpoints_and_a_missed_target(tmp_path, images, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")  # which importing the package has set in this process, too
    code = "import runpy, sys; sys.argv = sys.argv[1:]\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "finally: print('compile threads:', sys.modules['torch._inductor.config'].compile_threads)"
    how = ("--epochs", 1, "-i", 0, "-c", tmp_path / "none", "--target_acc", 1)
    run = python("-c", code, *TRAIN, *how, DATA=images).failed_with("is below --target_acc 1")
    assert len(run.accuracies) == 1 and not (tmp_path / "none").exists()
    assert "compile threads: 1\n" in run.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--target_acc", "84"), ("--target_acc", "0.84 stands for 84 %")),
        (("--target_acc", "0"), ("--target_acc",)),
        (("--epochs", "0"), ("--epochs", "above 0")),
        (("--batch_size", "-5"), ("--batch_size",)),
        (("--batch_size", "many"), ("--batch_size", "'many' is not a whole number")),
        (("--lr", "0"), ("--lr",)),
        (("--lr", "nan"), ("--lr",)),
        (("--lr", "1e39"), ("--lr",)),
        (("--batch_size", "1"), ("--batch_size", "at least two images")),
        (("-r", "81"), ("--resume 81 is beyond --epochs 80",)),
        (("-r", "newest"), ("--resume", "latest")),
        (("-c", "x" * 300), ("cannot write to", "too long")),
        (("-i", "-1"), ("--interval",)),
        (("--seed", "-1"), ("--seed",)),
        (("-r", "0"), ("--resume",)),
        (("-p", "ddp"), ("invalid choice", "low_level_zero")),
        (("--precision", "bf16"), ("-p torch_ddp has no --precision bf16: it has fp32",)),
        (("-p", "gemini", "--precision", "fp32"), ("gemini has no --precision fp32: it has fp16, bf16",)),
        (("--eval_interval", "-1"), ("--eval_interval",)),
        (("--colour", "blue"), ("unrecognized arguments: --colour blue",)),
        (("-r", "5", "-c", "/nowhere"), ("no checkpoint of epoch 5 in /nowhere", "none at all")),
    ],
)
def test_bad_arguments(arguments, words):
    run = python("train.py", *arguments).failed_with(*words)
    assert "usage" not in run.output


def test_bad_arguments_are_named_once():
    torchrun(3, "train.py", "--epochs", "0").failed_with("--epochs")
    launch(3, "train.py", "-r", "5", "-c", "/nowhere").failed_with("no checkpoint of epoch 5")


@pytest.mark.parametrize("plugin", ["torch_ddp_fp16", "low_level_zero", "gemini"])
def test_plugins_that_need_a_gpu(plugin):
    launch(2, "train.py", "-p", plugin, "--dummy", "-i", 0).failed_with(f"-p {plugin} needs a GPU", "-p torch_ddp")


def test_checkpoint_folder_that_is_a_file_or_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    launch(2, "train.py", "--dummy", "-c", tmp_path / "file").failed_with("cannot write to", "file")
    launch(2, "train.py", "--dummy", "-c", "/proc/x").failed_with("cannot write to /proc/x")


def test_missing_and_incomplete_checkpoints_name_what_there_is(checkpoint):
    launch(2, "train.py", "-r", 7, "-c", checkpoint).failed_with("no checkpoint of epoch 7", "1, 2, 3")
    launch(None, "eval.py", "-e", 7, "-c", checkpoint).failed_with("no checkpoint of epoch 7", "1, 2, 3")
    (checkpoint / "optimizer_2.pth").unlink()
    launch(2, "train.py", "-r", 2, "-c", checkpoint).failed_with("epoch 2", "incomplete: optimizer_2.pth is missing")


def test_no_data_and_no_network(tmp_path, checkpoint):
    offline = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    words = (f"no CIFAR-10 in {tmp_path / 'empty'}", "cannot be downloaded", "DATA", "--dummy")
    launch(2, "train.py", "-i", 0, DATA=tmp_path / "empty", **offline).failed_with(*words)
    launch(None, "eval.py", "-e", 3, "-c", checkpoint, DATA=tmp_path / "empty", **offline).failed_with(*words)


def test_fewer_images_than_a_step_takes(images):
    launch(2, "train.py", "-i", 0, DATA=images).failed_with("120 training images do not fill one step")


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_the_readme_has_every_flag(script):
    flags = set(re.findall(r"--\w+", python(script, "--help").succeeded().output)) - {"--help"}
    (table,) = re.findall(rf"### Flags of `{script}`\n(.*?)\n#", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "--dummy" in flags and set(re.findall(r"--\w+", table)) == flags


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_bad_arguments_are_answered_before_the_slow_imports(script):
    for arguments in (["--help"], ["--colour"], ["-c", "/nowhere", "-r" if script == "train.py" else "-e", "5"]):
        code = f"import sys, runpy; sys.argv = {[script, *arguments]}\n"
        code += f"try: runpy.run_path('{script}', run_name='__main__')\n"
        code += "finally: print('slow:', [name for name in ('torch', 'colossalai', 'numpy') if name in sys.modules])"
        assert "slow: []" in python("-c", code).output


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_devices("gemini")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match=r"3 processes on a node with 2 GPU\(s\)"):
        check_devices("gemini")


@pytest.fixture
def cuda_kernels(monkeypatch, tmp_path):
    """HybridAdam's kernels, as if there were a GPU, and a folder for them that is empty."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")


def test_no_cuda_toolkit(monkeypatch, cuda_kernels):
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    with pytest.raises(SystemExit, match=r"HybridAdam compiles CUDA kernels and cannot: .*CUDA_HOME"):
        check_kernels()
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(ROOT))
    with pytest.raises(SystemExit, match="nvcc"):
        check_kernels()


def test_a_line_while_kernels_compile(monkeypatch, cuda_kernels, capsys):
    """Only where they are not there yet, and once a node."""
    kernels = (CPUAdamLoader.REGISTRY[0], FusedOptimizerLoader.REGISTRY[0])
    for kernel in kernels:
        monkeypatch.setattr(kernel, "assert_compatible", lambda self: None)
    check_kernels()
    assert capsys.readouterr().out.startswith("compiling cpu_adam_x86 and fused_optim_cuda, HybridAdam's CUDA kernels")
    folder = Path(kernels[0].get_jit_extension_folder_path())
    folder.mkdir(parents=True)
    (folder / "cpu_adam_x86.so").touch()
    check_kernels()
    assert capsys.readouterr().out.startswith("compiling fused_optim_cuda, HybridAdam's")
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_kernels()
    (folder / "fused_optim_cuda.so").touch()
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_kernels()
    assert capsys.readouterr().out == ""
