"""What eval.py makes of one checkpoint, and of several."""

import re

from resnet_cifar10.report import accuracy_table, class_table

import pytest
import torch
from conftest import CLASSES, launch, python, weights

WITHOUT_MATPLOTLIB = (
    "import sys, runpy; sys.modules['matplotlib'] = None; runpy.run_path('eval.py', run_name='__main__')"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(checkpoint, images, dtype):
    model = {name: tensor.to(dtype) for name, tensor in weights(checkpoint, 3).items()}
    torch.save(model, checkpoint / "model_9.pth")
    assert launch(None, "eval.py", "-c", checkpoint, "-e", 9, DATA=images).succeeded().accuracies


def test_colossalai_is_not_imported(trained, images):
    """And one process evaluates to what two have, which trained."""
    code = "import sys, runpy; runpy.run_path('eval.py', run_name='__main__'); assert 'colossalai' not in sys.modules"
    run = python("-c", code, "-c", trained[0], "-e", 3, DATA=images).succeeded()
    assert run.accuracies == trained[1].accuracies and "colossalai" not in run.output.lower()


def test_several_latest_and_all(trained, images):
    """And of one, the classes."""
    folder, run = trained
    outputs = {}
    for asked in (["all"], ["3", "1"], ["latest", "--per_class"]):
        outputs[asked[0]] = launch(None, "eval.py", "-c", folder, "-e", *asked, DATA=images).succeeded()
    rows = re.findall(r"^ +(\d)  +(\d+\.\d\d) %(  best)?$", outputs["all"].stdout, re.MULTILINE)
    assert [epoch for epoch, _, _ in rows] == ["1", "2", "3"] and rows[2][1] == run.accuracies[0]
    best = max(rows, key=lambda row: float(row[1]))
    assert [row for row in rows if row[2]] == [best]
    two = re.findall(r"^ +(\d)  +(\d+\.\d\d) %", outputs["3"].stdout, re.MULTILINE)
    assert two == [row[:2] for row in rows if row[0] != "2"]
    assert outputs["latest"].stdout.splitlines()[0] == "Checkpoint of epoch 3"
    assert outputs["latest"].accuracies == run.accuracies

    output = outputs["latest"].stdout
    rows = re.findall(r"^(\w+) +(\d+\.\d\d) % +(\d+)$", output, re.MULTILINE)
    assert [(name, count) for name, _, count in rows] == [(name, "5") for name in CLASSES]
    mean = sum(float(share) for _, share, _ in rows) / 10
    assert f"{mean:.2f}" == run.accuracies[0]
    mistakes = [int(n) for n in re.findall(r"^\w+ predicted as \w+: (\d)$", output, re.MULTILINE)]
    assert 1 <= len(mistakes) <= 5 and mistakes == sorted(mistakes, reverse=True)


def test_tables():
    confusion = torch.tensor([[3, 1, 0], [0, 4, 0], [2, 0, 1]])
    assert class_table(confusion, ["ant", "bumblebee", "cat"]).splitlines() == [
        "class      accuracy  images",
        "ant         75.00 %       4",
        "bumblebee  100.00 %       4",
        "cat         33.33 %       3",
        "cat predicted as ant: 2",
        "ant predicted as bumblebee: 1",
    ]
    worse = torch.tensor([[1, 3, 0], [0, 4, 0], [2, 0, 1]])
    assert accuracy_table({4: worse, 5: confusion, 10: confusion}).splitlines() == [
        "epoch  accuracy",
        "    4   54.55 %",
        "    5   72.73 %  best",
        "   10   72.73 %",
    ]


@pytest.mark.optional
def test_plots(trained, tmp_path, images):
    pytest.importorskip("matplotlib")
    sizes = []
    for epochs in ("3", "all"):
        path = tmp_path / "new folder" / f"{epochs}.png"
        launch(None, "eval.py", "-c", trained[0], "-e", epochs, "--plot", path, DATA=images).succeeded()
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(picture[16:20], "big"))
    assert sizes == [600, 1100]  # pixels wide: the curve is there for several epochs alone
    assert len(list((tmp_path / "new folder").iterdir())) == 2  # nothing else is left
    run = python("eval.py", "-c", trained[0], "-e", 3, "--plot", "/proc/none/plot.png")
    run.failed_with("cannot write to /proc/none")


@pytest.mark.optional
def test_a_plot_does_not_depend_on_settings(trained, tmp_path, images):
    pytest.importorskip("matplotlib")
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    environment = dict(DATA=images, MPLBACKEND="module://of_a_notebook", MATPLOTLIBRC=tmp_path)
    launch(None, "eval.py", "-c", trained[0], "-e", 3, "--plot", tmp_path / "plot.png", **environment).succeeded()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.optional
def test_matplotlib_is_optional(trained, tmp_path, images):
    arguments = ("-c", trained[0], "-e", 3, "--plot", tmp_path / "plot.png")
    run = launch(None, "-c", WITHOUT_MATPLOTLIB, *arguments, DATA=images).succeeded()
    assert (
        run.accuracies and len(re.findall("^warning: no plot: pip install matplotlib", run.output, re.MULTILINE)) == 1
    )
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("-e", "0"), ("'0' is not an epoch",)),
        (("-e", "newest"), ("'newest' is not an epoch", "latest")),
        (("-e", "1", "7"), ("no checkpoint of epoch 7", "1, 2, 3")),
        (("-e", "all", "-c", "/nowhere"), ("no checkpoint in /nowhere",)),
        (("-e", "3", "--plot", "plot.jpg"), ("--plot", "ends in .png")),
    ],
)
def test_bad_arguments(trained, arguments, words):
    launch(None, "eval.py", "-c", trained[0], *arguments).failed_with(*words)


def test_a_folder_in_the_way_of_the_plot(trained, tmp_path):
    (tmp_path / "plot.png").mkdir()
    run = launch(None, "eval.py", "-c", trained[0], "--plot", tmp_path / "plot.png")
    run.failed_with("--plot needs the name of a file")


def test_a_damaged_one_of_several_is_named(checkpoint, images):
    (checkpoint / "model_2.pth").write_bytes(b"damaged")
    launch(None, "eval.py", "-c", checkpoint, "-e", "all", DATA=images).failed_with("model_2.pth is damaged")
