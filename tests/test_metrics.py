"""The log of a run: one object an epoch, none twice and none missing."""

import json
import shutil

from resnet_cifar10.checkpoint import epochs
from resnet_cifar10.metrics import FILE, read

import pytest
from conftest import TRAIN, launch

NAMES = "epoch loss lr accuracy images_per_second seconds loss_scale peak_memory_mib".split()


def curves(folder):
    """What TensorBoard shows: the steps and values of each curve."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, images):
    """The log of three epochs, of which the third was lost and trained again before a fourth."""
    folder = tmp_path_factory.mktemp("resumed")
    log, checkpoints = folder / "log", ("-i", 2, "-c", folder / "checkpoint")
    run = launch(2, *TRAIN, "--epochs", 3, *checkpoints, "--log_dir", log, "--eval_interval", 2, DATA=images)
    before, printed = read(log), run.succeeded().accuracies
    assert epochs(folder / "checkpoint") == [2, 3]  # every other, and the last
    again = launch(2, *TRAIN, "--epochs", 4, *checkpoints, "--log_dir", log, "-r", 2, DATA=images).succeeded()
    return log, before, printed, again


def test_an_object_an_epoch(resumed):
    _, before, printed, _ = resumed
    assert [list(metrics) for metrics in before] == [NAMES] * 3
    assert [metrics["epoch"] for metrics in before] == [1, 2, 3]
    assert before[0]["accuracy"] is None and 0 <= before[1]["accuracy"] <= 1
    assert printed == [f"{100 * before[2]['accuracy']:.2f}"]
    assert before[0]["loss"] > before[2]["loss"] and before[0]["lr"] == 0.002
    assert before[0]["images_per_second"] * before[0]["seconds"] == pytest.approx(120)


def test_a_resumed_log_has_each_epoch_once(resumed):
    log, before, _, again = resumed
    after = read(log)
    assert [metrics["epoch"] for metrics in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert after[2]["loss"] == before[2]["loss"] and after[2]["seconds"] != before[2]["seconds"]
    assert again.output.count("Trained 2 epoch(s)") == 1


@pytest.mark.optional
def test_resumed_curves_have_each_epoch_once(resumed):
    log = resumed[0]
    shown = curves(log)
    for name in ("loss", "lr", "images_per_second", "accuracy"):
        logged = [(metrics["epoch"], metrics[name]) for metrics in read(log) if metrics[name] is not None]
        assert [step for step, _ in shown[name]] == [step for step, _ in logged]
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in logged])
    assert [step for step, _ in shown["accuracy"]] == [2, 4] and "loss_scale" not in shown
    assert len(list(log.glob("events*"))) == 1  # TensorBoard would show the points of others, too


@pytest.mark.optional
def test_a_run_that_trains_nothing_leaves_the_log_alone(resumed, tmp_path, images):
    log = shutil.copytree(resumed[0], tmp_path / "log")
    checkpoints = resumed[0].with_name("checkpoint")
    launch(None, *TRAIN, "--epochs", 2, "-r", 2, "-c", checkpoints, "-i", 0, "--log_dir", log, DATA=images).succeeded()
    assert read(log) == read(resumed[0]) and curves(log) == curves(resumed[0])


@pytest.mark.optional
@pytest.mark.parametrize("error", ["ImportError", pytest.param("TypeError('old')", marks=pytest.mark.slow)])
def test_a_new_run_begins_a_new_log_and_tensorboard_is_optional(tmp_path, images, error):
    (tmp_path / "without" / "tensorboard").mkdir(parents=True)
    (tmp_path / "without" / "tensorboard" / "__init__.py").write_text(f"raise {error}")
    (tmp_path / FILE).write_text(json.dumps({"epoch": 1}) + "\n" + json.dumps({"epoch": 2}) + "\n")
    arguments = (*TRAIN, "--epochs", 1, "-i", 0, "--log_dir", tmp_path)
    run = launch(2, *arguments, DATA=images, PYTHONPATH=tmp_path / "without").succeeded()
    assert run.output.count("warning: no curves in") == 1 and "pip install tensorboard" in run.output
    assert [list(metrics) for metrics in read(tmp_path)] == [NAMES]
    assert not list(tmp_path.glob("events*"))


def test_a_log_that_fails_does_not_cost_the_run(tmp_path, images):
    code = "import runpy; from resnet_cifar10 import metrics\n"
    code += "def full(path): raise OSError('no space left')\n"
    code += "metrics.replacement = full; runpy.run_path('train.py', run_name='__main__')"
    run = launch(None, "-c", code, *TRAIN[1:], "--epochs", 1, "-c", tmp_path, "--log_dir", tmp_path, DATA=images)
    assert "warning: cannot log epoch 1: no space left" in run.succeeded().stderr
    assert epochs(tmp_path) == [1] and run.accuracies


@pytest.mark.parametrize("content", ["{", "[]", '{"loss": 1}', '{"epoch": "1"}', "\0", "[" * 100_000])
def test_what_is_no_log_is_refused(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{FILE} is damaged or not a log of training"):
        read(tmp_path)


def test_a_log_that_cannot_be_read_or_written(tmp_path, images):
    (tmp_path / "file").touch()
    run = launch(2, *TRAIN, "-i", 0, "--log_dir", tmp_path / "file", DATA=images)
    run.failed_with("cannot write to", "file")
    (tmp_path / FILE).write_text("no log")
    launch(2, *TRAIN, "-i", 0, "--log_dir", tmp_path, DATA=images).failed_with(f"{FILE} is damaged")
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    launch(None, *TRAIN, "-i", 0, "--log_dir", tmp_path, DATA=images).failed_with(f"cannot read {tmp_path / FILE}")
