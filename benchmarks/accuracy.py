"""Make a table of the accuracies of several runs per plugin, from their logs.

    for seed in 1 2 3 4 5; do
        python train.py -p gemini --seed $seed -i 80 -c runs/gemini/$seed --log_dir runs/gemini/$seed
        python eval.py -c runs/gemini/$seed | tee runs/gemini/$seed/eval.txt
    done
    python benchmarks/accuracy.py runs

Each folder of ``runs`` is a row, and each of its folders a run. Runs that have not evaluated their last epoch are left
out. If a run has no eval.txt, the accuracy of eval.py is left out. The seconds are those of the fastest run: runs that
share a GPU slow each other down.
"""

import argparse
import re
import sys
from pathlib import Path
from statistics import mean, median, stdev

sys.path.insert(0, str(Path(__file__).parent.parent))
from resnet_cifar10 import metrics


def spread(accuracies: list[float]) -> str:
    """Mean and standard deviation in percent."""
    if not accuracies:
        return "-"
    deviation = f" ± {100 * stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{100 * mean(accuracies):.2f}{deviation} %"


def row(folder: Path, epochs: int) -> str | None:
    """The runs in ``folder`` that have logged ``epochs`` epochs, as a row of the table."""
    histories, evaluated = [], []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        history = metrics.read(path.parent)
        if [epoch["epoch"] for epoch in history] != [*range(1, epochs + 1)] or history[-1]["accuracy"] is None:
            continue
        histories.append(history)
        if (text := path.with_name("eval.txt")).exists():
            numbers = re.findall(r"test images: ([\d.]+) %", text.read_text())
            evaluated += [float(number) / 100 for number in numbers[-1:]]
    if not histories:
        return None
    if len(evaluated) < len(histories):
        evaluated = []
    accuracies = [history[-1]["accuracy"] for history in histories]
    seconds = min(median(epoch["seconds"] for epoch in history) for history in histories)
    memory = max(history[-1]["peak_memory_mib"] or 0 for history in histories)
    cells = (folder.name, len(histories), spread(accuracies), spread(evaluated), f"{100 * min(accuracies):.2f} %")
    return "| " + " | ".join(map(str, (*cells, f"{seconds:.2f}", f"{memory:.0f}"))) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a table of the accuracies of several runs per plugin.")
    parser.add_argument("runs", type=Path, help="folder of folders of runs")
    parser.add_argument("--epochs", type=int, default=80, help="epochs of a whole run (default: 80)")
    args = parser.parse_args()
    try:
        rows = [line for folder in sorted(args.runs.iterdir()) if (line := row(folder, args.epochs))]
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{args.runs} has no folder of finished runs of {args.epochs} epochs")
    print("| runs | n | accuracy, train.py | accuracy, eval.py | lowest | s per epoch | peak memory, MiB |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
