"""Checkpoints: one folder, four files an epoch, written whole or not at all and checked before they are loaded.

Imports torch and ColossalAI only where it needs them: the scripts look for a checkpoint before they pay for those.
"""

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from resnet_cifar10.failure import fail_together
from resnet_cifar10.files import flush

MODEL, OPTIMIZER, LR_SCHEDULER = BOOSTER_PARTS = ("model", "optimizer", "lr_scheduler")
STATE = "state"
"""What those three cannot hold, the loss scale. Checkpoints without it, written by other programs, load as well."""
PARTS = (*BOOSTER_PARTS, STATE)
STALE_SECONDS = 3600
"""Age at which what a save has not finished is taken for that of a process that was killed."""


def path_of(folder: Path, part: str, epoch: int) -> Path:
    """The file of one of the :data:`PARTS`; epochs count from 1."""
    return folder / f"{part}_{epoch}.pth"


def epochs(folder: Path, parts: tuple[str, ...] = PARTS) -> list[int]:
    """The epochs of which ``folder`` has the files of all ``parts``, in order."""
    names = (re.fullmatch(r"model_([1-9]\d*)\.pth", path.name) for path in folder.glob("model_*.pth"))
    found = (int(name[1]) for name in names if name)
    return sorted(epoch for epoch in found if all(path_of(folder, part, epoch).is_file() for part in parts))


def check_exists(folder: Path, epoch: int, parts: tuple[str, ...] = BOOSTER_PARTS) -> None:
    """Make sure that ``folder`` has the files of ``parts`` for ``epoch``.

    Raises:
        ValueError: it has not; the message names the machine, and the epochs there are or the file that is missing.
    """
    where = f"{folder} on {socket.gethostname()}"
    missing = [path.name for part in parts if not (path := path_of(folder, part, epoch)).is_file()]
    if len(missing) == len(parts):
        there = ", ".join(map(str, epochs(folder, parts)))
        raise ValueError(f"no checkpoint of epoch {epoch} in {where}: there are {there or 'none at all'}")
    if missing:
        raise ValueError(f"the checkpoint of epoch {epoch} in {where} is incomplete: {', '.join(missing)} is missing")


def resolve_epochs(folder: Path, asked: list[int | str]) -> list[int]:
    """The epochs that ``asked`` stands for, numbers, "latest" and "all", of which ``folder`` has the model, in order.

    Raises:
        ValueError: it lacks one that is asked for.
    """
    there = epochs(folder, (MODEL,))
    found = set()
    for epoch in asked:
        if epoch not in ("latest", "all"):
            check_exists(folder, epoch, (MODEL,))
            found.add(epoch)
        elif there:
            found.update(there if epoch == "all" else there[-1:])
        else:
            raise ValueError(f"no checkpoint in {folder}")
    return sorted(found)


def agree_on_latest(folder: Path) -> int:
    """The newest epoch with a whole checkpoint, as the first process sees it; -1, and a line, where there is none."""
    import torch.distributed as dist

    found = [-1]
    if dist.get_rank() == 0:
        found = epochs(folder)[-1:] or [-1]
        print(f"resuming from epoch {found[0]}" if found != [-1] else f"no checkpoint in {folder}: starting afresh")
    dist.broadcast_object_list(found)
    return found[0]


def warn_of_later(folder: Path, epoch: int) -> None:
    """Say so where ``folder`` has checkpoints beyond ``epoch``, with which a run begins: they are another run's."""
    if later := [other for other in epochs(folder) if other > epoch]:
        print(
            f"warning: {folder} holds later epochs of another run: {', '.join(map(str, later))}; until this run has "
            "replaced them, -r latest takes them for its own",
            file=sys.stderr,
        )


def read(folder: Path, part: str, epoch: int) -> dict:
    """Read a file of a checkpoint without running any code it may hold, and check that it fits this model.

    Returns:
        What is to be loaded of it, on the CPU.

    Raises:
        ValueError: it cannot be read or does not fit; the message names the file.
    """
    return _read_file(path_of(folder, part, epoch), part, epoch)


def _read_file(path: Path, part: str, epoch: int) -> dict:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # what torch raises depends on where the file breaks
        raise ValueError(f"{path} is damaged, not a checkpoint, or would run code when loaded") from error
    try:
        return {MODEL: _model, OPTIMIZER: _optimizer, LR_SCHEDULER: _lr_scheduler, STATE: _state}[part](content, epoch)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit this model, with HybridAdam, after epoch {epoch} ({error})") from error


# Each of the following returns what is to be loaded of a file's content, whatever that may be. What is not as expected
# raises one of the errors that read() catches.


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _blank_model():
    """The model with names and shapes only."""
    import torch

    from resnet_cifar10.model import make_model

    with torch.device("meta"):
        return make_model()


def _require_like(tensor, like, name: str) -> None:
    """``tensor`` is a plain one of finite numbers, in the shape of ``like``; where that has fractions, so has it."""
    import torch

    plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    _require(plain and tensor.shape == like.shape, name)
    _require(tensor.is_floating_point() >= like.is_floating_point() and not tensor.is_complex(), name)
    _require(bool(tensor.isfinite().all()), name)


def _model(content, epoch: int) -> dict:
    blank = _blank_model().state_dict()
    for name in sorted(blank.keys() | content.keys(), key=str):
        _require(name in blank and name in content, name)
        _require_like(content[name], blank[name], name)
    return content


def _optimizer(content, epoch: int) -> dict:
    import torch

    (group,) = content["param_groups"]
    parameters = list(_blank_model().parameters())
    _require(list(group["params"]) == list(range(len(parameters))), "params")
    _require(content["state"].keys() == set(group["params"]), "state")
    options = {name: float(group[name]) for name in ("lr", "initial_lr", "eps", "weight_decay")}
    _require(all(0 <= number < 1e6 for number in options.values()), "param_groups")
    betas = tuple(float(beta) for beta in group["betas"])
    _require(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "betas")
    state = {}
    for number, parameter in enumerate(parameters):
        values = content["state"][number]
        _require(0 <= int(values["step"]) < 2**31, "step")
        for moment in ("exp_avg", "exp_avg_sq"):
            _require_like(values[moment], parameter, moment)
        # Gemini wants its step counts as tensors; the others, who save plain numbers, take both
        step = torch.tensor(int(values["step"]))
        state[number] = {"step": step, "exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"]}
    group = {**options, "betas": betas, "bias_correction": bool(group["bias_correction"]), "params": group["params"]}
    return {"state": state, "param_groups": [group]}


def _lr_scheduler(content, epoch: int) -> dict:
    _require(content["last_epoch"] == epoch, f"last_epoch is {content['last_epoch']}")
    rates = {name: [float(rate) for rate in content[name]] for name in ("base_lrs", "_last_lr")}
    _require(all(len(rate) == 1 and 0 <= rate[0] < 1e6 for rate in rates.values()), "_last_lr")
    return {**rates, "last_epoch": epoch, "_step_count": int(content["_step_count"])}


def _state(content, epoch: int) -> dict:
    numbers = {name: float(content[name]) for name in ("loss_scale", "growth_step", "hysteresis_step")}
    _require(content["epoch"] == epoch and all(0 <= number < 2**64 for number in numbers.values()), "loss_scale")
    return numbers


def _full_precision(model):
    """A block in which Gemini gathers and spreads its fp32 weights as such, and does not round them on the way.

    It would where it shards them: a model smaller than its smallest chunk, such as this one, it does not.
    """
    import torch
    from colossalai.zero import GeminiDDP

    return patch.object(model, "mixed_precision", torch.float32) if isinstance(model, GeminiDDP) else nullcontext()


def _zero_masters(model, optimizer) -> dict:
    """ZeRO's fp32 weights by name: (the parameter of the model, this process's shard of them); of others none."""
    from colossalai.zero import LowLevelZeroOptimizer

    if not isinstance(optimizer, LowLevelZeroOptimizer):
        return {}
    masters = optimizer.get_working_to_master_map()
    return {name: (weight, masters[id(weight)]) for name, weight in model.unwrap().named_parameters()}


def save(booster, model, optimizer, lr_scheduler, folder: Path, epoch: int) -> None:
    """Save what the Booster has boosted; all processes call it, for ZeRO and Gemini gather what they have scattered.

    The files get their names when all of them have been written, checked as :func:`read` does, and flushed to the disk.
    If that fails, the run ends with one line. A process killed on the way leaves the epoch as it was, complete, or
    without its state file.
    """
    import torch
    import torch.distributed as dist

    from resnet_cifar10.internals import loss_scaling

    is_master = dist.get_rank() == 0
    new = None
    with fail_together():
        if is_master:
            for old in folder.glob(".new_*"):
                if time.time() - old.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
            new = Path(tempfile.mkdtemp(prefix=".new_", dir=folder))

    def write(part: str, writer: Callable[[str], None]) -> None:
        with fail_together():  # one by one, for there are collectives in them
            try:
                writer(str(new / part if is_master else part))  # others write nothing
            except RuntimeError as error:  # so torch.save reports a folder that is gone or a disk that is full
                if not is_master:
                    raise
                raise OSError(f"cannot save {path_of(folder, part, epoch)}: {error}") from error

    def write_model(path: str) -> None:
        masters = {}
        for name, (weight, shard) in _zero_masters(model, optimizer).items():
            gathered = shard.new_empty(shard.numel() * dist.get_world_size())
            dist.all_gather_into_tensor(gathered, shard.flatten())
            masters[name] = gathered[: weight.numel()].view_as(weight).cpu()
        with _full_precision(model):
            booster.save_model(model, path)
        if is_master:
            weights = {**torch.load(path, weights_only=True), **masters}
            torch.save({name: x.float() if x.is_floating_point() else x for name, x in weights.items()}, path)

    def write_state(path: str) -> None:
        if is_master:
            torch.save({"epoch": epoch, **loss_scaling(optimizer)}, path)

    try:
        write(MODEL, write_model)
        write(OPTIMIZER, lambda path: booster.save_optimizer(optimizer, path))
        write(LR_SCHEDULER, lambda path: booster.save_lr_scheduler(lr_scheduler, path))
        write(STATE, write_state)
        with fail_together():
            if is_master:
                _check_loadable(new, epoch)
                _put_in_place(new, folder, epoch)
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)


def _check_loadable(new: Path, epoch: int) -> None:
    """A model or an optimizer that was changed in one place only is found out now, and not when it is to be resumed."""
    for part in PARTS:
        try:
            _read_file(new / part, part, epoch)
        except ValueError as error:
            raise ValueError(f"nothing is saved, for it could not be loaded again: {error}") from error


def _put_in_place(new: Path, folder: Path, epoch: int) -> None:
    """Give the files in ``new`` their names, so that no old file is ever taken for one of theirs."""
    final = {part: path_of(folder, part, epoch) for part in PARTS}
    for path in final.values():
        if path.is_dir():
            raise OSError(f"cannot save {path}: a folder is in the way")
    for part in PARTS:
        flush(new / part)
    for part in reversed(PARTS):
        final[part].unlink(missing_ok=True)
    for part in PARTS:  # the state last: with it, all are there
        (new / part).replace(final[part])
    flush(folder)


def load(booster, model, optimizer, lr_scheduler, folder: Path, epoch: int) -> None:
    """Load a checkpoint, by whichever plugin and number of processes, into what the Booster has boosted.

    All processes call it. All files are checked before anything is changed; if one does not pass, the run ends with one
    line.
    """
    import torch.distributed as dist
    from torch.nn.functional import pad

    from resnet_cifar10.internals import set_loss_scaling

    with fail_together():
        check_exists(folder, epoch)
        weights, optimizer_state, lr_scheduler_state = (read(folder, part, epoch) for part in BOOSTER_PARTS)
        state = read(folder, STATE, epoch) if path_of(folder, STATE, epoch).exists() else None

    # ColossalAI reads the file once more, by itself
    with patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"), _full_precision(model):
        booster.load_model(model, str(path_of(folder, MODEL, epoch)))
    for name, (weight, shard) in _zero_masters(model, optimizer).items():
        padded = pad(weights[name].flatten(), (0, shard.numel() * dist.get_world_size() - weight.numel()))
        shard.copy_(padded.chunk(dist.get_world_size())[dist.get_rank()].view_as(shard))
    # As booster.load_optimizer and booster.load_lr_scheduler do, but with what has been checked
    optimizer.load_state_dict(optimizer_state)
    lr_scheduler.load_state_dict(lr_scheduler_state)
    if state is not None:
        set_loss_scaling(optimizer, state)
    elif dist.get_rank() == 0:
        print(f"{path_of(folder, STATE, epoch)} is missing: a loss scale, where the plugin has one, starts afresh")
