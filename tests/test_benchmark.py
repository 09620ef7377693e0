import json
import re

import pytest
from conftest import launch

BRIEFLY = ("benchmarks/epoch_time.py", "--batch_size", 4, "--steps", 1, "--repeats", 2)


@pytest.mark.slow
def test_loops_are_timed():
    how = ("--batch_size", 4, "--steps", 1, "--repeats", 1, "--peers", "--workers", 1)
    output = launch(None, BRIEFLY[0], *how).succeeded().output
    for loop in ("the classic loop", "this project"):
        assert re.search(rf"torch_ddp, 1 process\(es\), {loop}: \d+\.\d\d s an epoch, [\d,]+ images/s", output)
    for peer in ("the classic loop", "plain PyTorch", "autocast", "torch.compile"):
        assert re.search(rf"\d+\.\d times as fast as {re.escape(peer)}", output)


@pytest.mark.slow
def test_scaling_starts_from_one_process():
    output = launch(3, *BRIEFLY, "--scaling").succeeded().output
    rates = [int(rate.replace(",", "")) for rate in re.findall(r"this project: .* ([\d,]+) images/s", output)]
    efficiency = int(re.search(r"torch_ddp: (\d+) % of 3 times the images/s of one process", output)[1])
    assert len(rates) == 2 and re.findall(r"(\d) process\(es\), this", output) == ["1", "3"]
    assert abs(efficiency - 100 * rates[1] / rates[0] / 3) < 5 + 100 / min(rates)
    assert re.findall(r"optimizer state (\S+) MiB", output) == ["85.3", "85.3"]  # two fp32 numbers a parameter


def test_a_table_of_accuracies(tmp_path):
    """Of runs that have ended; the one that has not is left out."""
    for seed, accuracy in enumerate((0.83, 0.85, None)):
        run = tmp_path / "gemini" / str(seed)
        run.mkdir(parents=True)
        metrics = {"epoch": 1, "seconds": 2.0 + seed, "peak_memory_mib": 100 + seed, "accuracy": None}
        epochs = [metrics, {**metrics, "epoch": 2, "seconds": 1.0 + seed, "accuracy": accuracy}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    line = "Accuracy of the model on the test images: 84.90 %\n"
    (tmp_path / "gemini" / "1" / "eval.txt").write_text(line)
    (tmp_path / "torch_ddp").mkdir()
    (tmp_path / "gemini" / "resumed").mkdir()
    (tmp_path / "gemini" / "resumed" / "metrics.jsonl").write_text('{"epoch": 2, "accuracy": 0.9}\n' * 2)
    for evaluated in ("-", "84.85 ± 0.07 %"):  # before and after run 0 is evaluated
        lines = launch(None, "benchmarks/accuracy.py", tmp_path, "--epochs", 2).succeeded().stdout.splitlines()
        assert lines[2:] == [f"| gemini | 2 | 84.00 ± 1.41 % | {evaluated} | 83.00 % | 1.50 | 101 |"]
        (tmp_path / "gemini" / "0" / "eval.txt").write_text(line + line.replace("84.90", "84.80"))
    for folder, words in (("nowhere", "No such file"), ("torch_ddp", "no folder of finished runs")):
        run = launch(None, "benchmarks/accuracy.py", tmp_path / folder)
        assert run.returncode == 2 and words in run.stderr and "Traceback" not in run.stderr
