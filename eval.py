"""Evaluate checkpoints of train.py on one device: a GPU if there is one, else the CPU.

python eval.py -c ./checkpoint -e 80
"""

import argparse
import os
from pathlib import Path

# This package comes first: it silences harmless warnings of the packages below
from resnet_cifar10 import checkpoint, data, report, runtime
from resnet_cifar10.evaluation import accuracy_line, accuracy_of, confusion_matrix
from resnet_cifar10.runtime import fail, fail_together

import torch
from torchvision.models import resnet18
from tqdm import tqdm


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Evaluate checkpoints of train.py on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.error = fail
    add = parser.add_argument
    add("-e", "--epoch", nargs="+", default=["80"], help="one or more epochs, latest, or all")
    add("-c", "--checkpoint", type=Path, default="./checkpoint", help="folder of the checkpoints")
    add("--per_class", action="store_true", help="print the accuracy of each class and the most confused pairs")
    add("--plot", type=Path, metavar="FILE.png", help="plot the confusion matrix and the accuracy of each epoch")
    add("--dummy", action="store_true", help="use the generated images of train.py --dummy")
    args = parser.parse_args()
    if args.plot and (args.plot.suffix != ".png" or args.plot.is_dir()):
        parser.error("--plot needs the name of a file that ends in .png")
    return args


def main() -> None:
    args = parse_args()
    runtime.survive_closed_streams()
    root = None if args.dummy else Path(os.environ.get("DATA", "./data"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.plot and not report.can_plot():
        args.plot = None
    runtime.make_folders(args.plot and args.plot.parent)
    with fail_together():
        epochs = checkpoint.resolve_epochs(args.checkpoint, args.epoch)
        data.download_if_absent(root)
        images, labels = (tensor.to(device) for tensor in data.load_split(root, "test"))

    model = resnet18(num_classes=10).to(device)
    confusions = {}
    for epoch in tqdm(epochs, "Evaluating", leave=False, disable=len(epochs) == 1):
        with fail_together():
            weights = checkpoint.read_model(args.checkpoint, epoch, model)
        model.load_state_dict(weights)  # fp16 and bf16 become fp32
        confusions[epoch] = confusion_matrix(model, images, labels)

    best = report.best_epoch(confusions)
    if len(epochs) > 1:
        print(report.accuracy_table(confusions))
    else:
        if args.epoch[0] in ("latest", "all"):
            print(f"Checkpoint of epoch {best}")
        print(accuracy_line(accuracy_of(confusions[best])))
    names = data.class_names(root)
    if args.per_class:
        print(f"\nEpoch {best}, class by class:\n{report.class_table(confusions[best], names)}")
    if args.plot:
        with fail_together():
            report.plot(args.plot, confusions, names)


if __name__ == "__main__":
    main()
