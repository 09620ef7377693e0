"""Nothing lost, nothing half written, nothing trusted."""

import fcntl
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial

from resnet_cifar10.checkpoint import PARTS, epochs, resolve_epochs

import psutil
import pytest
import torch
from conftest import BIN, ROOT, TRAIN, copy_epoch, free_port, kill_family, killed_after, launch, read, weights
from torchvision.models import resnet18


@pytest.fixture
def one_epoch(trained, tmp_path):
    """A folder with epoch 2 alone, to do things to."""
    copy_epoch(trained[0], tmp_path / "one", 2)
    return tmp_path / "one"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_is_the_run_that_was_never_stopped(trained, tmp_path, images, processes):
    whole, parts = trained[0] if processes == 2 else tmp_path / "whole", tmp_path / "parts"
    if processes == 1:
        launch(None, *TRAIN, "--epochs", 2, "-i", 1, "-c", whole, DATA=images).succeeded()
    copy_epoch(whole, parts, 1)
    launch(processes, *TRAIN, "--epochs", 2, "-r", "latest", "-c", parts, DATA=images).succeeded()
    expected, found = weights(whole, 2), weights(parts, 2)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for part in ("optimizer", "lr_scheduler", "state"):
        expected, found = read(whole, part, 2), read(parts, part, 2)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_more_processes_resume(checkpoint, images):
    run = launch(3, *TRAIN, "--epochs", 4, "-r", 3, "-c", checkpoint, DATA=images).succeeded()
    assert len(run.accuracies) == 1 and epochs(checkpoint) == [1, 2, 3, 4]
    assert read(checkpoint, "optimizer", 4)["state"][0]["step"] == 9 + 2


def test_checkpoints_of_the_published_example_resume_under_one_process(checkpoint, images):
    """They have no state file; gemini's have tensors for step counts."""
    (checkpoint / "state_3.pth").unlink()
    path = checkpoint / "optimizer_3.pth"
    state = torch.load(path, weights_only=True)
    for values in state["state"].values():
        values["step"] = torch.tensor(int(values["step"]))
    torch.save(state, path)
    run = launch(None, *TRAIN, "--epochs", 4, "-r", 3, "-c", checkpoint, DATA=images).succeeded()
    assert (
        run.output.count("state_3.pth is missing: a loss scale, if the plugin has one, starts from its initial value")
        == 1
    )
    assert read(checkpoint, "optimizer", 4)["state"][0]["step"] == 9 + 6
    assert len(run.accuracies) == 1 and epochs(checkpoint) == [1, 2, 4]


def test_latest_is_the_newest_whole_one_or_none(checkpoint, tmp_path, images):
    run = launch(2, *TRAIN, "--epochs", 2, "-r", "latest", "-c", checkpoint, DATA=images)
    run.failed_with("the checkpoint to resume from is of epoch 3, beyond --epochs 2")
    (checkpoint / "state_3.pth").unlink()
    run = launch(2, *TRAIN, "--epochs", 2, "-r", "latest", "-c", checkpoint, DATA=images).succeeded()
    assert "resuming from epoch 2" in run.output and "Epoch [" not in run.output
    run = launch(2, *TRAIN, "--epochs", 1, "-r", "latest", "-c", tmp_path / "empty", DATA=images).succeeded()
    assert run.output.count("new run") == 1 and "Epoch [1/1]" in run.output


def test_a_save_clears_what_a_killed_one_left(checkpoint, images):
    (checkpoint / ".new").mkdir()
    (checkpoint / ".new" / "optimizer").write_bytes(b"half of it")
    launch(2, *TRAIN, "--epochs", 2, "-r", 1, "-c", checkpoint, DATA=images).succeeded()
    assert not (checkpoint / ".new").exists() and epochs(checkpoint) == [1, 2, 3]


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_kill_at_any_moment_of_a_save(trained, tmp_path, kills):
    """A process that saves epochs 2 and 3 over and over is killed; epoch 1, at least, must survive each time."""
    interrupted = 0
    copy_epoch(trained[0], tmp_path, 1)
    command = [sys.executable, "-m", "tests.processes", "save_for_ever", str(tmp_path)]
    parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with killed_after(300, parent):
        for _ in range(kills):
            parent.stdin.write("another\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(random.uniform(0, 1.5))
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "gone\n"
            there = epochs(tmp_path)
            assert 1 in there
            for part in PARTS:
                assert read(tmp_path, part, there[-1])
            for unfinished in tmp_path.glob(".new"):
                interrupted += 1
                shutil.rmtree(unfinished)
            for path in tmp_path.glob("*_[23].pth"):  # the next one meets what is left of either epoch, or nothing
                if random.random() < 0.2:
                    path.unlink()
    assert interrupted  # and not only killed before or between saves


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_end_every_process_without_a_traceback(tmp_path, images, number):
    command = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", *TRAIN, "-c", tmp_path / "c", "-i", "1"]
    command = [str(word) for word in command]
    environment = {**os.environ, "DATA": str(images)}
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while "Epoch [2/80]" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        process.send_signal(number)
        assert process.wait(timeout=20) != 0
        _, left = psutil.wait_procs(family, timeout=10)
        assert not [member for member in left if member.status() != psutil.STATUS_ZOMBIE]
    finally:
        kill_family(process)
    output = (tmp_path / "log").read_text()
    assert "[rank" not in output and 'train.py", line' not in output
    assert 1 in epochs(tmp_path / "c")
    for epoch in epochs(tmp_path / "c"):
        assert read(tmp_path / "c", "model", epoch)


def test_a_loss_that_is_not_finite_stops_the_run_before_it_saves(checkpoint, images):
    broken = weights(checkpoint, 3)
    broken["fc.weight"] = torch.full_like(broken["fc.weight"], 3e38)
    torch.save(broken, checkpoint / "model_3.pth")
    run = launch(2, *TRAIN, "--epochs", 5, "-r", 3, "-i", 1, "-c", checkpoint, DATA=images)
    run.failed_with("the mean loss of epoch 4 is", "this epoch is not saved")
    assert epochs(checkpoint) == [1, 2, 3]


def test_another_model_and_optimizer_in_train_py_and_eval_py_alone(tmp_path, images):
    """They train, save, resume and evaluate."""
    how = ("--epochs", 2, "-c", tmp_path, "-i", 1)
    scripts = {name: (ROOT / name).read_text() for name in ("train.py", "eval.py")}
    for name, script in scripts.items():
        changed = script.replace("resnet18", "resnet34").replace("torch.optim.AdamW(", "torch.optim.Adam(")
        assert changed != script
        (tmp_path / name).write_text(changed)
    for resume in ("-1", "1"):
        run = launch(2, tmp_path / "train.py", *TRAIN[1:], *how, "-r", resume, DATA=images, PYTHONPATH=ROOT).succeeded()
    evaluated = launch(None, tmp_path / "eval.py", "-e", 2, "-c", tmp_path, DATA=images, PYTHONPATH=ROOT).succeeded()
    assert evaluated.accuracies == run.accuracies
    launch(None, "eval.py", "-e", 2, "-c", tmp_path, DATA=images).failed_with("unexpected: layer1.2.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        "SGD(model.parameters(), lr=lr, momentum=0.9)",
        "Adam([{'params': [p for p in model.parameters() if p.dim() == n]} for n in (1, 2, 4)], lr=lr, amsgrad=True)",
        "NAdam((p.requires_grad_(p.dim() > 1) for p in model.parameters()), lr)",
    ],
)
def test_other_optimizers_resume(tmp_path, images, optimizer):
    """With several parameter groups or frozen parameters, too."""
    script = (ROOT / "train.py").read_text()
    changed = script.replace("AdamW(model.parameters(), lr=lr, weight_decay=0)", optimizer)
    assert changed != script
    changed = changed.replace("static_graph=True", "find_unused_parameters=False")  # which refuses frozen parameters
    (tmp_path / "train.py").write_text(changed)
    for folder, last in (("whole", 2), ("parts", 1), ("parts", 2)):
        how = ("--epochs", last, "-i", 1, "-r", "latest", "-c", tmp_path / folder)
        launch(None, tmp_path / "train.py", *TRAIN[1:], *how, DATA=images, PYTHONPATH=ROOT).succeeded()
    found = [torch.load(tmp_path / folder / "optimizer_2.pth", weights_only=True) for folder in ("whole", "parts")]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("missing", [20 << 20, 8])
def test_a_disk_that_is_full_leaves_earlier_checkpoints_alone(checkpoint, images, missing):
    """While the optimizer's file is written; torch.save does not notice that the last bytes are missing."""
    size = (checkpoint / "optimizer_3.pth").stat().st_size - missing  # a write beyond it fails like one to a full disk
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    run = launch(2, *TRAIN, "--epochs", 3, "-r", 2, "-i", 1, "-c", checkpoint, DATA=images, preexec=limit)
    run.failed_with("cannot save", "optimizer_3.pth: is the disk full?")
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_folder_in_the_way_of_a_file_leaves_the_others_alone(checkpoint, images):
    (checkpoint / "optimizer_1.pth").unlink()
    (checkpoint / "optimizer_1.pth").mkdir()
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    run = launch(None, *TRAIN, "--epochs", 1, "-i", 1, "-c", checkpoint, DATA=images)
    run.failed_with("optimizer_1.pth: a folder is in the way")
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_two_nodes_that_share_no_disk(checkpoint, tmp_path, images):
    """Two torchruns on the loopback interface, with folders of their own: rank 0 reads and writes the checkpoints."""

    def start(folders, *arguments):
        launcher = [BIN / "torchrun", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
        nodes = [
            subprocess.Popen(
                [str(word) for word in (*launcher, f"--node_rank={rank}", *TRAIN, "-c", folder, *arguments)],
                cwd=ROOT,
                env={**os.environ, "DATA": str(images), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, folder in enumerate(folders)
        ]
        try:
            outputs = [node.communicate(timeout=120) for node in nodes]
        finally:
            for node in nodes:
                kill_family(node)
        return [node.returncode for node in nodes], outputs

    folders = [checkpoint, tmp_path / "other"]
    codes, outputs = start(folders, "--epochs", 4, "-r", 3)
    assert codes == [0, 0], outputs
    assert "Accuracy" in outputs[0][0] and "Accuracy" not in outputs[1][0]
    assert epochs(checkpoint) == [1, 2, 3, 4] and not folders[1].exists()

    for arguments, error in (
        (("--epochs", 4, "-r", 4, "--target_acc", 1), "is below --target_acc 1"),
        (("-r", 5), f"no checkpoint of epoch 5 in {checkpoint} on {socket.gethostname()}: there are 1, 2, 3, 4"),
    ):
        codes, outputs = start(folders, *arguments, "-i", 0)
        assert 0 not in codes
        assert all(stderr.count("error: ") == stderr.count(error) == 1 for _, stderr in outputs), outputs


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not a checkpoint")
    elif how == "foreign":
        torch.save({"fc.weight": torch.zeros(3)}, path)
    elif how == "tensor":
        torch.save(torch.zeros(3), path)
    elif how == "code":
        torch.save({**torch.load(path, weights_only=True), "more": Payload(path.with_name("ran"))}, path)


@pytest.mark.parametrize("how", ["truncated", "empty", "text", "foreign", "tensor", "code"])
@pytest.mark.parametrize("part", PARTS)
def test_damaged_files_are_refused(one_epoch, part, how):
    assert read(one_epoch, part, 2)
    damage(one_epoch / f"{part}_2.pth", how)
    with pytest.raises(ValueError, match=f"{part}_2.pth (is damaged|does not fit)"):
        read(one_epoch, part, 2)
    assert not (one_epoch / "ran").exists()


def changed(content, *path_and_value):
    """``content`` with the value at a path of keys replaced; a function is called with the old one."""
    *path, last, value = path_and_value
    inner = content
    for key in path:
        inner = inner[key]
    inner[last] = value(inner[last]) if callable(value) else value
    return content


@pytest.mark.parametrize(
    "part, change",
    [
        ("model", ("bn1.running_mean", lambda tensor: tensor * float("nan"))),
        ("model", ("conv1.weight", lambda tensor: tensor.to_sparse())),
        ("model", ("conv1.weight", lambda tensor: tensor.to(torch.complex64))),
        ("model", ("conv1.weight", lambda tensor: tensor.to("meta"))),
        ("model", ("conv1.weight", lambda tensor: tensor.to(torch.int32))),
        ("model", ("conv1.weight", "a string")),
        ("model", ("fc.bias", lambda tensor: tensor.tolist())),
        ("optimizer", ("state", [])),
        ("optimizer", ("state", lambda state: list(state.values()))),
        ("optimizer", ("state", lambda state: {**state, 99: {}})),
        ("optimizer", ("state", 3, "step", float("inf"))),
        ("optimizer", ("state", 3, "step", 10**30)),
        ("optimizer", ("state", 3, "exp_avg", lambda tensor: tensor / 0)),
        ("optimizer", ("state", 3, "exp_avg_sq", lambda tensor: tensor.to("meta"))),
        ("optimizer", ("param_groups", lambda groups: groups * 2)),
        ("optimizer", ("param_groups", 0, "lr", "fast")),
        ("optimizer", ("param_groups", 0, "lr", float("nan"))),
        ("optimizer", ("param_groups", 0, {})),
        ("lr_scheduler", ("last_epoch", "x")),
        ("lr_scheduler", ("milestones", [20])),
        ("lr_scheduler", ("_last_lr", [])),
        ("state", ("loss_scale", float("nan"))),
        ("state", ("epoch", 3)),
    ],
)
def test_malformed_files_are_refused(one_epoch, part, change):
    path = one_epoch / f"{part}_2.pth"
    torch.save(changed(torch.load(path, weights_only=True), *change), path)
    with pytest.raises(ValueError, match=f"{part}_2.pth does not fit"):
        read(one_epoch, part, 2)


def test_stray_keys_change_nothing(checkpoint):
    path = checkpoint / "lr_scheduler_2.pth"
    torch.save({**torch.load(path, weights_only=True), "optimizer": None}, path)
    assert "optimizer" not in read(checkpoint, "lr_scheduler", 2)


def test_a_checkpoint_of_another_model_is_refused(checkpoint):
    torch.save(resnet18(num_classes=100).state_dict(), checkpoint / "model_2.pth")
    with pytest.raises(
        ValueError, match=r"model_2.pth does not fit .*fc.weight has shape \(100, 512\), not \(10, 512\)"
    ):
        read(checkpoint, "model", 2)


def test_weights_that_ddp_or_torch_compile_named(one_epoch):
    plain = read(one_epoch, "model", 2)
    for prefix, nested in (("module.", None), ("_orig_mod.module.", "state_dict"), ("", "model")):
        named = {prefix + name: tensor for name, tensor in plain.items()}
        torch.save({nested: named, "epoch": 2} if nested else named, one_epoch / "model_2.pth")
        assert all(torch.equal(tensor, plain[name]) for name, tensor in read(one_epoch, "model", 2).items())


@pytest.mark.parametrize("name", ["model_5", "model_5.safetensors", "model_5.pth"])
def test_a_checkpoint_of_another_format_is_named(one_epoch, name):
    (one_epoch / name).mkdir()
    with pytest.raises(ValueError, match=f"no checkpoint of epoch 5 .* there are 2; {name} has another format"):
        resolve_epochs(one_epoch, ["5"])


def test_one_run_per_folder(checkpoint, images):
    how = (2, *TRAIN, "--epochs", 3, "-r", 3, "-c", checkpoint, "--log_dir", checkpoint)
    claim = os.open(checkpoint, os.O_RDONLY)
    fcntl.flock(claim, fcntl.LOCK_EX)
    launch(*how, DATA=images).failed_with(f"another run writes to {checkpoint}")
    os.close(claim)
    launch(*how, DATA=images).succeeded()


def test_resuming_and_evaluating_damaged_files(checkpoint, images):
    damage(checkpoint / "optimizer_2.pth", "code")
    launch(2, *TRAIN, "-r", 2, "-c", checkpoint, DATA=images).failed_with("optimizer_2.pth is damaged")
    assert not (checkpoint / "ran").exists()
    damage(checkpoint / "model_2.pth", "foreign")
    launch(None, "eval.py", "-e", 2, "-c", checkpoint, DATA=images).failed_with(
        "model_2.pth does not fit (missing: bn1.bias, bn1.num_batches_tracked, bn1.running_mean and 118 more)"
    )
