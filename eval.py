"""Evaluate a checkpoint of train.py on one device: the GPU if there is one, else the CPU.

python eval.py -c ./checkpoint -e 80
"""

import argparse
import os
from pathlib import Path

from resnet_cifar10 import arguments, checkpoint
from resnet_cifar10.failure import fail


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint of train.py on one device.")
    parser.error = fail
    parser.add_argument(
        "-e",
        "--epoch",
        type=arguments.positive_int,
        default=80,
        help="epoch of the checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "-c",
        "--checkpoint",
        type=Path,
        default="./checkpoint",
        help="folder of the checkpoints (default: %(default)s)",
    )
    parser.add_argument("--dummy", action="store_true", help="evaluate on the generated images of train.py --dummy")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        checkpoint.check_exists(args.checkpoint, args.epoch, parts=("model",))

        # Only now: these imports take seconds
        import torch
        from torchvision.models import resnet18

        from resnet_cifar10 import data
        from resnet_cifar10.evaluation import accuracy_line, evaluate

        weights = checkpoint.read(args.checkpoint, "model", args.epoch)
        if args.dummy:
            images, labels = data.generate_split("test")
        else:
            root = Path(os.environ.get("DATA", "./data"))
            data.download_if_absent(root)
            images, labels = data.load_split(root, "test")
    except (OSError, ValueError) as error:
        fail(error)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = resnet18(num_classes=10)
    model.load_state_dict(weights)  # casts fp16 and bf16 to the fp32 of this model
    print(accuracy_line(evaluate(model.to(device), images.to(device), labels.to(device))))


if __name__ == "__main__":
    main()
