"""Checkpoints: one folder, three files an epoch, written whole or not at all and checked before they are loaded.

Imports torch and ColossalAI only where it needs them: the scripts look for a checkpoint before they pay for those.
"""

import os
import re
from pathlib import Path

from resnet_cifar10.failure import fail_together

PARTS = ("model", "optimizer", "lr_scheduler")


def path_of(folder: Path, part: str, epoch: int) -> Path:
    """The file of one of the :data:`PARTS`; epochs count from 1."""
    return folder / f"{part}_{epoch}.pth"


def check_exists(folder: Path, epoch: int, parts: tuple[str, ...] = PARTS) -> None:
    """Make sure that ``folder`` has the files of ``parts`` for ``epoch``.

    Raises:
        ValueError: it has not; the message names the epochs there are, or the file that is missing.
    """
    missing = [path.name for part in parts if not (path := path_of(folder, part, epoch)).is_file()]
    if len(missing) == len(parts):
        names = (re.fullmatch(r"model_([1-9]\d*)\.pth", path.name) for path in folder.glob("model_*.pth"))
        there = sorted(int(name[1]) for name in names if name)
        epochs = f"there are epochs {', '.join(map(str, there))}" if there else "there are none at all"
        raise ValueError(f"no checkpoint of epoch {epoch} in {folder}: {epochs}")
    if missing:
        raise ValueError(f"the checkpoint of epoch {epoch} in {folder} is incomplete: {', '.join(missing)} is missing")


def make_folder(folder: Path) -> None:
    """Make ``folder``, unless it is there, and make sure that files can be written to it.

    Raises:
        ValueError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".trial_{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ValueError(f"cannot write checkpoints to {folder}: {error.strerror}") from error


def read(folder: Path, part: str, epoch: int) -> dict:
    """Read a file of a checkpoint without running any code it may hold, and check that it is what its name says.

    Raises:
        ValueError: it cannot be read, or does not fit this model; the message names the file.
    """
    import torch

    path = path_of(folder, part, epoch)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on where the file breaks
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is damaged or not a checkpoint: {reason}") from error
    {"model": _check_model, "optimizer": _check_optimizer, "lr_scheduler": _check_lr_scheduler}[part](path, content)
    return content


def _blank_model():
    """The model with shapes and names only."""
    import torch
    from torchvision.models import resnet18

    with torch.device("meta"):
        return resnet18(num_classes=10)


def _check_model(path: Path, content: object) -> None:
    wanted = {name: tensor.shape for name, tensor in _blank_model().state_dict().items()}
    found = {name: getattr(tensor, "shape", None) for name, tensor in content.items()} if _is_dict(content) else {}
    if odd := [name for name in sorted(wanted.keys() | found.keys(), key=str) if wanted.get(name) != found.get(name)]:
        raise ValueError(f"{path} does not hold a ResNet-18 for ten classes: see {odd[0]}")


def _check_optimizer(path: Path, content: object) -> None:
    shapes = [parameter.shape for parameter in _blank_model().parameters()]
    try:
        order = [number for group in content["param_groups"] for number in group["params"]]
        moments = [content["state"][number][moment] for number in order for moment in ("exp_avg", "exp_avg_sq")]
        fits = [moment.shape for moment in moments] == [shape for shape in shapes for _ in range(2)]
        fits = fits and all(int(content["state"][number]["step"]) >= 0 for number in order)
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{path} does not hold HybridAdam's state for a ResNet-18 for ten classes")


def _check_lr_scheduler(path: Path, content: object) -> None:
    if not _is_dict(content) or not {"last_epoch", "milestones", "gamma", "_last_lr"} <= content.keys():
        raise ValueError(f"{path} does not hold the state of a MultiStepLR")


def _is_dict(content: object) -> bool:
    return isinstance(content, dict)


def save(booster, model, optimizer, lr_scheduler, folder: Path, epoch: int) -> None:
    """Save what the Booster has boosted; all processes call it, for ZeRO and Gemini gather what they have scattered.

    The files get their names when all of them have been written and flushed. If that fails, the run ends with one line.
    """
    from colossalai.cluster import DistCoordinator

    is_master = DistCoordinator().is_master()
    new = {part: folder / f".{part}_{epoch}.new" for part in PARTS}

    def write(save, boosted, path: Path) -> None:
        with fail_together():  # one by one, for there are collectives in each
            try:
                save(boosted, str(path))
            except RuntimeError as error:  # so torch.save reports a folder that is gone or a disk that is full
                raise OSError(f"cannot write {path}: {error}") from error

    try:
        write(booster.save_model, model, new["model"])
        write(booster.save_optimizer, optimizer, new["optimizer"])
        write(booster.save_lr_scheduler, lr_scheduler, new["lr_scheduler"])
        with fail_together():
            if is_master:
                for path in new.values():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                for part, path in new.items():
                    path.replace(path_of(folder, part, epoch))
    finally:
        if is_master:
            for path in new.values():
                path.unlink(missing_ok=True)


def load(booster, model, optimizer, lr_scheduler, folder: Path, epoch: int) -> None:
    """Load a checkpoint into what the Booster has boosted, once all its files have been checked, on all processes.

    If they do not pass, the run ends with one line.
    """
    import torch

    with fail_together():
        check_exists(folder, epoch)
        _, optimizer_state, lr_scheduler_state = (read(folder, part, epoch) for part in PARTS)
    booster.load_model(model, str(path_of(folder, "model", epoch)))
    # What booster.load_optimizer and booster.load_lr_scheduler do, but with what has been checked, and with step counts
    # as tensors: Gemini insists on those and saves them, and the others, which save plain numbers, take both.
    for state in optimizer_state["state"].values():
        state["step"] = torch.as_tensor(state["step"])
    optimizer.load_state_dict(optimizer_state)
    lr_scheduler.load_state_dict(lr_scheduler_state)
