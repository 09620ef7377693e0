"""Types of command-line arguments that refuse bad values with a line that says what is wanted."""

import argparse
from collections.abc import Callable
from pathlib import Path


def _checked(convert: Callable, holds: Callable, wanted: str) -> Callable:
    """An argparse ``type``: ``convert`` the text, refuse what does not convert or for which ``holds`` is false."""

    def parse(text: str):
        try:
            value = convert(text)
            if holds(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


positive_int = _checked(int, lambda n: n > 0, "a whole number above 0")
natural_int = _checked(int, lambda n: n >= 0, "a whole number, 0 or above")
batch_size = _checked(int, lambda n: n > 1, "a whole number above 1 (BatchNorm takes at least two images)")
learning_rate = _checked(float, lambda x: 0 < x <= 1, "a learning rate above 0 and up to 1")
accuracy = _checked(float, lambda x: 0 < x <= 1, "an accuracy above 0 and up to 1 (0.84 stands for 84 %)")
seed = _checked(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295")
resume_epoch = _checked(
    lambda text: text if text == "latest" else int(text),
    lambda epoch: epoch == "latest" or epoch == -1 or epoch > 0,
    'an epoch (1 or above), "latest", or -1 for none',
)
epoch = _checked(
    lambda text: text if text in ("latest", "all") else int(text),
    lambda epoch: epoch in ("latest", "all") or epoch > 0,
    'an epoch (1 or above), "latest", or "all"',
)
png = _checked(Path, lambda path: path.suffix == ".png" and not path.is_dir(), "the name of a file that ends in .png")
