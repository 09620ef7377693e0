import re

import pytest
from conftest import launch

WORLD_SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def outputs():
    return {size: launch(size, "-m", "tests.processes", "evaluation").succeeded().output for size in WORLD_SIZES}


def test_one_accuracy_whatever_the_number_of_processes(outputs):
    found = {size: re.findall(r"(\d+) images: (\S+)", output) for size, output in outputs.items()}
    assert len(found[1]) == 5
    assert found[1] == found[2] == found[3]
    for count, accuracy in found[1]:
        right = float(accuracy) * int(count)
        assert abs(right - round(right)) < 1e-6 and round(right) <= int(count)
    assert 0.02 < float(dict(found[1])["1003"]) < 0.5


@pytest.mark.parametrize("size, mean, variance", [(1, 0, 1), (2, 0.5, 1.5), (3, 1, 2)])
def test_batch_norm_statistics_are_averaged(size, mean, variance, outputs):
    assert f"averages: [{mean:.1f}, {10 * mean:.1f}] [{variance:.1f}, {variance:.1f}]" in outputs[size]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_a_failure_of_one_process_ends_all(size):
    run = launch(size, "-m", "tests.processes", "failure", timeout=60)
    run.failed_with("the last process is out of luck, as it were")
    assert "went on" not in run.output
