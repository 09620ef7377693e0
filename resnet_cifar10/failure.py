"""Ending a run over something the user can mend: one line on standard error, the same exit code everywhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def fail(message: object) -> NoReturn:
    """End the run with exit code 1 and ``message`` as one line on standard error.

    Every process of a node calls it; the first of them speaks.

    Raises:
        SystemExit: always.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # A launcher ends all processes once one has failed: leaving before the first has spoken would silence it
        time.sleep(10)
    sys.exit("error: " + " ".join(str(message).split()))


@contextmanager
def fail_clearly() -> Iterator[None]:
    """Let an :class:`OSError` or :class:`ValueError` in the block end this process, by :func:`fail`."""
    try:
        yield
    except (OSError, ValueError) as error:
        fail(error)


@contextmanager
def fail_together() -> Iterator[None]:
    """Let an :class:`OSError` or :class:`ValueError` that any process raises in the block end all of them.

    Otherwise the others would wait for ever for the one that left. Like a collective, the block must be run by every
    process of the default process group, and none leaves it before all have reached its end.

    Raises:
        SystemExit: in every process, by :func:`fail`, with the message of the lowest rank that raised.
    """
    import torch.distributed as dist

    error = None
    try:
        yield
    except (OSError, ValueError) as raised:
        error = str(raised)
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for message in errors:
        if message is not None:
            fail(message)
