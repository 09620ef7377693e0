"""Evaluate checkpoints of train.py on one device: the GPU if there is one, else the CPU.

python eval.py -c ./checkpoint -e 80
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from resnet_cifar10 import arguments, checkpoint, files
from resnet_cifar10.failure import fail, fail_clearly


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Evaluate checkpoints of train.py on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.error = fail
    add = parser.add_argument
    add("-e", "--epoch", type=arguments.epoch, nargs="+", default=[80], help="one or several, latest, or all")
    add("-c", "--checkpoint", type=Path, default="./checkpoint", help="folder of the checkpoints")
    add("--per_class", action="store_true", help="print the accuracy of each class and the most confused pairs")
    add("--plot", type=arguments.png, metavar="FILE.png", help="draw the confusion matrix and accuracy over epochs")
    add("--dummy", action="store_true", help="evaluate on the generated images of train.py --dummy")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    sys.stdout.reconfigure(errors="replace")  # names of classes can have any character
    with fail_clearly():
        epochs = checkpoint.resolve_epochs(args.checkpoint, args.epoch)
        if args.plot and find_spec("matplotlib") is None:
            print(f"warning: no {args.plot}: pip install matplotlib first", file=sys.stderr)
            args.plot = None
        if args.plot:
            files.make_folder(args.plot.parent)

    # Only now: these imports take seconds
    import torch
    from tqdm import tqdm

    from resnet_cifar10 import data, report
    from resnet_cifar10.evaluation import accuracy_line, accuracy_of, confusion_matrix
    from resnet_cifar10.model import make_model

    with fail_clearly():
        if args.dummy:
            images, labels = data.generate_split("test")
            names = [str(label) for label in range(data.CLASSES)]
        else:
            root = Path(os.environ.get("DATA", "./data"))
            data.download_if_absent(root)
            images, labels = data.load_split(root, "test")
            names = data.class_names(root)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = images.to(device), labels.to(device)
    model = make_model().to(device)
    confusions = {}
    for epoch in tqdm(epochs, desc="Evaluating", leave=False, disable=len(epochs) == 1):
        with fail_clearly():
            weights = checkpoint.read(args.checkpoint, "model", epoch)
        model.load_state_dict(weights)  # casts fp16 and bf16 to the fp32 of this model
        confusions[epoch] = confusion_matrix(model, images, labels)

    best = report.best_epoch(confusions)
    if len(epochs) > 1:
        print(report.accuracy_table(confusions))
    else:
        if args.epoch != epochs:  # it was asked for as latest, or all
            print(f"Checkpoint of epoch {best}")
        print(accuracy_line(accuracy_of(confusions[best])))
    if args.per_class:
        print(f"\nEpoch {best}, class by class:\n{report.class_table(confusions[best], names)}")
    if args.plot:
        with fail_clearly():
            report.plot(args.plot, confusions, names)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("stopped")
