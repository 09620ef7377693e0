"""The scripts as users run them, on a small image folder."""

import re
import subprocess
import sys
from importlib.metadata import version

from resnet_cifar10.checkpoint import PARTS, epochs
from resnet_cifar10.runtime import LAUNCHER_VARIABLES, compiling_kernels, prepare_launch, report_waiting

import pytest
import torch
from colossalai.nn.optimizer import HybridAdam
from conftest import ROOT, TRAIN, colossalai_run, execute, free_port, launch, python, weights
from torchvision.models import resnet18


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
    assert re.fullmatch(r"Trained 3 epoch\(s\) in \d+\.\d s, [\d,]+ images/s while training", summary)
    assert accuracy == f"Accuracy of the model on the test images: {run.accuracies[0]} %"
    resnet18(num_classes=10).load_state_dict(weights(folder, 3))


def test_a_quiet_start(trained):
    """At most six lines before the first bar that are not the launcher's own."""
    before = [stream.split("Epoch [1/3]", maxsplit=1)[0] for stream in (trained[1].stdout, trained[1].stderr)]
    lines = "\n".join(before).splitlines()
    lines = [line for line in lines if line.strip() and "torch/distributed/run.py" not in line]
    assert len(lines) <= 6, lines


def test_only_the_harmless_is_silenced():
    code = "import resnet_cifar10, warnings\n"
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
        (("--target_acc", "84"), ("--target_acc", "0.84")),
        (("--target_acc", "-1"), ("--target_acc",)),
        (("-r", "all"), ("--resume takes one epoch",)),
        (("--epochs", "0"), ("--epochs must be 1 or above",)),
        (("--batch_size", "-5"), ("--batch_size",)),
        (("--batch_size", "many"), ("--batch_size", "invalid int value: 'many'")),
        (("--batch_size", "1"), ("--batch_size", "two images")),
        (("--lr", "0"), ("--lr",)),
        (("--lr", "nan"), ("--lr",)),
        (("--lr", "1e39"), ("--lr",)),
        (("-i", "-1"), ("--interval",)),
        (("--eval_interval", "-1"), ("--eval_interval",)),
        (("--seed", "-1"), ("--seed",)),
        (("-p", "ddp"), ("invalid choice", "low_level_zero")),
        (("--precision", "bf16"), ("-p torch_ddp takes --precision fp32",)),
        (("-p", "gemini", "--precision", "fp32"), ("-p gemini takes --precision fp16 or bf16",)),
        (("--colour", "blue"), ("unrecognized arguments: --colour blue",)),
        (("-r", "newest"), ("'newest' is not an epoch", "latest")),
        (("-r", "0"), ("'0' is not an epoch",)),
        (("-r", "5", "-c", "/nowhere", "-i", "0"), ("no checkpoint of epoch 5 in /nowhere", "none at all")),
        (("-c", "x" * 300), ("cannot write to", "too long")),
    ],
)
def test_bad_arguments(arguments, words):
    run = launch(None, "train.py", *arguments).failed_with(*words)
    assert "usage" not in run.output


def test_bad_arguments_are_named_once():
    launch(3, "train.py", "--epochs", "0").failed_with("--epochs")
    launch(3, "train.py", "-r", "5", "-c", "/nowhere", "-i", "0").failed_with("no checkpoint of epoch 5")


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
    words = (f"no undamaged CIFAR-10 in {tmp_path / 'empty'}", "cannot be downloaded", "DATA", "--dummy")
    launch(2, "train.py", "-i", 0, DATA=tmp_path / "empty", **offline).failed_with(*words)
    launch(None, "eval.py", "-e", 3, "-c", checkpoint, DATA=tmp_path / "empty", **offline).failed_with(*words)


def test_fewer_images_than_a_step_takes(images):
    launch(2, "train.py", "-i", 0, DATA=images).failed_with("120 training images do not fill one step")


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_the_readme_names_flags_that_exist(script):
    flags = set(re.findall(r"--?\w+", launch(None, script, "--help").succeeded().output))
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(rf"^    .*?{script} ([^&\n]*)", readme, re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--?[a-z_]+", " ".join(commands)))
    assert {"-c", "--dummy"} <= named <= flags


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "2")
    prepare_launch("gemini")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit, match=r"3 processes on a node with 2 GPU\(s\)"):
        prepare_launch("gemini")


def test_a_launcher_variable_is_missing(images):
    launch(None, "train.py", RANK=0, DATA=images).failed_with("RANK is set, but not LOCAL_RANK, WORLD_SIZE")


@pytest.mark.parametrize("cuda_home", [None, str(ROOT)])
def test_no_cuda_toolkit(monkeypatch, tmp_path, cuda_home):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))  # where compiled kernels are kept
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", cuda_home)
    with pytest.raises(SystemExit, match="HybridAdam cannot compile its CUDA kernels: .*CUDA_HOME"):
        with compiling_kernels():
            HybridAdam([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    "script, redirection",
    [
        pytest.param("train.py --epochs 1 -i 0", "| head -1", marks=pytest.mark.slow),
        ("eval.py -e 3", "| head -1"),
        pytest.param("eval.py -e 3", ">&- 2>&-", marks=pytest.mark.slow),
        pytest.param("train.py --epochs 1 -i 0", ">/dev/full 2>/dev/full", marks=pytest.mark.slow),
    ],
)
def test_closed_streams_do_not_end_a_run(trained, images, script, redirection):
    command = f"set -o pipefail; {sys.executable} {script} -c {trained[0]} {redirection}"
    run = execute("bash", "-c", command, DATA=images, PYTHONIOENCODING="ascii").succeeded()
    assert "Traceback" not in run.output and "Exception ignored" not in run.output


def test_a_silent_wait_is_explained(monkeypatch, capsys):
    for name, value in zip(LAUNCHER_VARIABLES, ("0", "0", "2", "2", "127.0.0.1", "29500")):
        monkeypatch.setenv(name, value)
    report_waiting()
    assert "rank 0 is waiting for the rest of WORLD_SIZE=2 processes at 127.0.0.1:29500" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_whose_others_never_come(images):
    variables = dict(zip(LAUNCHER_VARIABLES, ("0", "0", "2", "1", "127.0.0.1", free_port())))
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        launch(None, "train.py", "-i", "0", DATA=images, timeout=14, **variables)
    assert "rank 0 is waiting for the rest" in raised.value.stderr
