import pytest
from conftest import torchrun


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gemini_with_its_network_as_one_operator_leaves_the_same_bits(size):
    output = torchrun(size, "-m", "tests.processes", "gemini_steps").succeeded().output
    assert "torch.bfloat16: equal" in output
    assert "torch.float16: equal, loss scales [32.0, 64.0, 64.0, 128.0, 64.0, 64.0, 128.0, 128.0]" in output
