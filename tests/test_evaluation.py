import re
from functools import cache

import pytest
from conftest import launch

TWO = pytest.param(2, marks=pytest.mark.slow)


@cache
def output(size):
    return launch(size, "-m", "tests.processes", "evaluation").succeeded().output


@pytest.mark.parametrize("size", [TWO, 3])
def test_one_accuracy_whatever_the_number_of_processes(size):
    alone, found = (re.findall(r"(\d+) images: (\S+)", output(each)) for each in (1, size))
    assert len(found) == 5 and found == alone
    for count, accuracy in found:
        right = float(accuracy) * int(count)
        assert abs(right - round(right)) < 1e-6 and round(right) <= int(count)
    assert 0.02 < float(dict(found)["1003"]) < 0.5


@pytest.mark.parametrize(
    "size, mean, variance", [(1, 0, 1), pytest.param(2, 0.5, 1.5, marks=pytest.mark.slow), (3, 1, 2)]
)
def test_batch_norm_statistics_are_averaged(size, mean, variance):
    assert f"averages: [{mean:.1f}, {10 * mean:.1f}] [{variance:.1f}, {variance:.1f}]" in output(size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_failure_of_one_process_ends_all(size):
    run = launch(size, "-m", "tests.processes", "failure", timeout=60)
    run.failed_with("the last process is out of luck, as it were")
    assert "went on" not in run.output
