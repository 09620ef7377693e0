import pytest
from conftest import torchrun


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_fused_step_leaves_the_same_bits(size):
    output = torchrun(size, "-m", "tests.processes", "zero_steps").succeeded().output
    assert "torch.float32: equal" in output and "torch.bfloat16: equal" in output
    assert "torch.float16: equal, loss scales [32.0, 64.0, 64.0, 128.0, 64.0, 64.0, 128.0, 128.0]" in output
