import pytest
from conftest import torchrun


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_the_faster_steps_leave_the_same_bits(size):
    output = torchrun(size, "-m", "tests.processes", "steps").succeeded().output
    assert "Deallocating" not in output
    for plugin, precisions in (("low_level_zero", ("float32", "bfloat16")), ("gemini", ("bfloat16",))):
        for precision in precisions:
            assert f"{plugin}, torch.{precision}: equal" in output
        scales = "[32.0, 64.0, 64.0, 128.0, 64.0, 64.0, 128.0, 128.0]"
        assert f"{plugin}, torch.float16: equal, loss scales {scales}" in output
