"""test_ci.sh, but for its installation and its tests."""

import os

import pytest
from conftest import BIN, ROOT, execute


@pytest.mark.slow
def test_a_plugin_that_fails_has_its_line(tmp_path):
    """Without a GPU, gemini fails before it has a log. What passes is run by .ci/run."""
    for name in ("pip", "pytest"):
        (tmp_path / name).symlink_to("/bin/true")
    path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    run = execute("bash", ROOT / "test_ci.sh", PATH=path, PLUGINS="gemini", RUNS=tmp_path / "runs")
    assert run.returncode == 1 and len(run.errors) == 1 and "gemini needs a GPU" in run.errors[0], run.output
    headings, gemini = run.stdout.splitlines()[-2:]
    assert headings.split() == "plugin result accuracy s an epoch peak memory".split()
    assert gemini.split() == ["gemini", "failed", "-", "-", "-"]
