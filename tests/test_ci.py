"""test_ci.sh, but for its installation and its tests."""

import os
import re

import pytest
from conftest import BIN, ROOT, execute


@pytest.mark.slow
def test_each_plugin_has_its_turn_and_its_line(tmp_path):
    """Without a GPU, gemini fails before it has a log."""
    for name in ("pip", "pytest"):
        (tmp_path / name).symlink_to("/bin/true")
    path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    run = execute("bash", ROOT / "test_ci.sh", PATH=path, PLUGINS="gemini torch_ddp", RUNS=tmp_path / "runs")
    assert run.returncode == 1 and len(run.errors) == 1 and "gemini needs a GPU" in run.errors[0], run.output
    headings, gemini, ddp = run.stdout.splitlines()[-3:]
    assert headings.split() == "plugin result accuracy s an epoch peak memory".split()
    assert gemini.split() == ["gemini", "failed", "-", "-", "-"]
    assert re.fullmatch(rf"torch_ddp +passed +{run.accuracies[0]} % +\d+\.\d\d +-", ddp)
    assert run.accuracies == [run.accuracies[0]] * 2 and float(run.accuracies[0]) >= 90  # train.py's and eval.py's
