"""Save and load checkpoints: four files per epoch, written whole or not at all, and checked before they are loaded."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from zipfile import is_zipfile

from resnet_cifar10.runtime import fail_together, flush

import torch
import torch.distributed as dist
from torch import Tensor, nn

MODEL, OPTIMIZER, LR_SCHEDULER = BOOSTER_PARTS = ("model", "optimizer", "lr_scheduler")
STATE = "state"
"""The loss scale. Checkpoints of other programs lack this file, and load without it."""
PARTS = (*BOOSTER_PARTS, STATE)


def path_of(folder: Path, part: str, epoch: int) -> Path:
    """The file of one of the :data:`PARTS`; epochs count from 1."""
    return folder / f"{part}_{epoch}.pth"


def epochs(folder: Path, parts: tuple[str, ...] = PARTS) -> list[int]:
    """The epochs for which ``folder`` has the files of all ``parts``, in order."""
    there = os.listdir(folder) if folder.exists() else []
    names = (re.fullmatch(r"model_([1-9]\d*)\.pth", name) for name in there)
    found = (int(name[1]) for name in names if name)
    return sorted(epoch for epoch in found if all(path_of(folder, part, epoch).is_file() for part in parts))


def resolve_epochs(folder: Path, asked: list[str], parts: tuple[str, ...] = (MODEL,)) -> list[int]:
    """Turn epoch numbers, "latest" and "all" into the numbers of epochs that ``folder`` has, in order.

    Raises:
        ValueError: one is not an epoch, or its files are missing. The message names the machine and what there is.
    """
    where = f"{folder} on {socket.gethostname()}"
    found = set()
    for epoch in asked:
        if epoch in ("latest", "all"):
            there = epochs(folder, parts)
            if not there:
                raise ValueError(f"no checkpoint in {where}")
            found.update(there if epoch == "all" else there[-1:])
            continue
        if not re.fullmatch(r"[1-9]\d{0,8}", epoch):
            raise ValueError(f"{epoch!r} is not an epoch: give a number, 1 or above, or latest")
        missing = [path.name for part in parts if not (path := path_of(folder, part, int(epoch))).is_file()]
        if len(missing) == len(parts):
            others = [folder / f"{MODEL}_{epoch}", *folder.glob(f"{MODEL}_{epoch}.*")]  # sharded, or safetensors
            others = [path.name for path in others if path.exists()]
            there = ", ".join(map(str, epochs(folder, parts))) or "none at all"
            hint = f"; {others[0]} has another format" if others else ""
            raise ValueError(f"no checkpoint of epoch {epoch} in {where}: there are {there}{hint}")
        if missing:
            raise ValueError(f"the checkpoint of epoch {epoch} in {where} is incomplete: {missing[0]} is missing")
        found.add(int(epoch))
    return sorted(found)


def resume_epoch(folder: Path, asked: str, last_epoch: int) -> int:
    """The epoch to resume from, of the checkpoints that rank 0 sees; 0 for a new run. Every process calls this.

    Args:
        asked: an epoch, "latest", or "-1" for a new run.
        last_epoch: the last epoch of this run.

    Raises:
        SystemExit: rank 0 does not see the checkpoint, or its epoch is beyond ``last_epoch``.
    """
    epoch = [0]
    with fail_together():
        if dist.get_rank() == 0 and asked == "latest":
            epoch = [max(epochs(folder), default=0)]
            print(f"resuming from epoch {epoch[0]}" if epoch[0] else f"no checkpoint in {folder}: new run")
        elif dist.get_rank() == 0 and asked != "-1":
            (epoch[0],) = resolve_epochs(folder, [asked], BOOSTER_PARTS)
        if epoch[0] > last_epoch:
            raise ValueError(f"the checkpoint to resume from is of epoch {epoch[0]}, beyond --epochs {last_epoch}")
    dist.broadcast_object_list(epoch)
    return epoch[0]


# Files are not trusted: their content is compared with the model and the optimizer before it is used.


def _check(found, like, name: str = "") -> None:
    """Raise a ValueError unless ``found`` has the keys and shapes of ``like``, and finite numbers."""
    if isinstance(like, dict):
        for names, problem in ((like.keys() - found.keys(), "missing"), (found.keys() - like.keys(), "unexpected")):
            if names:
                shown = ", ".join(sorted(f"{name}{key}" for key in names)[:3])
                raise ValueError(f"{problem}: {shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''}")
        for key in like:
            _check(found[key], like[key], f"{name}{key}." if isinstance(like[key], dict) else f"{name}{key}")
        return
    if isinstance(like, Tensor) and not isinstance(found, Tensor):
        raise ValueError(f"{name} is not a tensor")
    found, like = torch.as_tensor(found), torch.as_tensor(like)
    if found.shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(found.shape)}, not {tuple(like.shape)}")
    if found.layout != torch.strided or found.is_meta or found.is_complex():
        raise ValueError(f"{name} is not a plain tensor")
    if found.is_floating_point() < like.is_floating_point() or not found.isfinite().all():
        raise ValueError(f"{name} has NaN, infinite or other values than {like.dtype}")


@contextmanager
def _reading(path: Path) -> Iterator[dict]:
    """Yield the content of a file. An error in the block becomes a ValueError that names the file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # what torch raises depends on where the file breaks
        raise ValueError(f"{path} is damaged, not a checkpoint, or would run code when loaded") from error
    try:
        yield content
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit ({error})") from error


def read_model(folder: Path, epoch: int, model: nn.Module) -> dict[str, Tensor]:
    """Read weights for ``model``, which is not wrapped by the Booster, to the CPU.

    The names can have the prefixes of DDP and torch.compile. The weights can be nested in "state_dict" or "model".

    Raises:
        ValueError: they cannot be read or do not fit; the message names the file.
    """
    with _reading(path_of(folder, MODEL, epoch)) as content:
        for nested in ("state_dict", "model"):
            if isinstance(content.get(nested), dict):
                content = content[nested]
        weights = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in content.items()}
        _check(weights, dict(model.state_dict()))
        return weights


def read_optimizer(folder: Path, epoch: int, model: nn.Module, optimizer) -> dict:
    """Read a state that fits ``optimizer``, which has the parameters of ``model``.

    Returns:
        An argument for ``optimizer.load_state_dict``. Learning rate, betas and other numbers are those of the file, all
        other options are those of ``optimizer``.

    Raises:
        ValueError: it cannot be read or does not fit; the message names the file.
    """
    with _reading(path_of(folder, OPTIMIZER, epoch)) as content:
        groups, saved = optimizer.param_groups, content["param_groups"]
        if len(saved) != len(groups):
            raise ValueError(f"{len(saved)} parameter groups, not {len(groups)}")
        parameters = list(model.parameters()) if len(groups) == 1 else [p for group in groups for p in group["params"]]
        _check([number for group in saved for number in group["params"]], list(range(len(parameters))), "params")
        for number, values in content["state"].items():
            if number not in range(len(parameters)):
                raise ValueError(f"unexpected: {number}")
            for name, value in values.items():
                if value is None:  # SGD's momentum before the first step
                    continue
                like = parameters[number] if len(groups) == 1 and torch.as_tensor(value).dim() else value
                _check(value, like, f"{number}.{name}")
            if "step" in values:  # torch.optim needs a float tensor, Gemini an integer tensor; HybridAdam takes that
                dtype = torch.int64 if "bias_correction" in groups[0] else torch.float32
                values["step"] = torch.tensor(int(values["step"]), dtype=dtype)
        merged = []
        for group, old in zip(groups, saved):
            options = {name: type(now)(old[name]) for name, now in group.items() if isinstance(now, (float, tuple))}
            _check(options, {name: group[name] for name in options})
            merged.append({**group, **options, "params": old["params"]})
        return {"state": content["state"], "param_groups": merged}


def read_lr_scheduler(folder: Path, epoch: int, lr_scheduler) -> dict:
    """Read a state that fits ``lr_scheduler``. Entries that it does not have are left out.

    Raises:
        ValueError: it cannot be read or does not fit; the message names the file.
    """
    with _reading(path_of(folder, LR_SCHEDULER, epoch)) as content:
        now = lr_scheduler.state_dict()
        state = {name: content[name] for name in now if name in content or name == "last_epoch"}
        for name, found in state.items():
            if name in ("last_epoch", "_step_count", "base_lrs", "_last_lr"):
                _check(found, now[name], name)
            elif type(found) is not type(now[name]):
                raise ValueError(f"{name} is of type {type(found).__name__}, not {type(now[name]).__name__}")
        return state


def read_state(folder: Path, epoch: int) -> dict:
    """Read the loss scale and its counters.

    Raises:
        ValueError: they cannot be read, or are of another epoch; the message names the file.
    """
    with _reading(path_of(folder, STATE, epoch)) as content:
        _check(content, {"epoch": 0, "loss_scale": 0, "growth_step": 0, "hysteresis_step": 0})
        if content["epoch"] != epoch:
            raise ValueError(f"it belongs to epoch {content['epoch']}")
        return content


def save(booster, model, optimizer, lr_scheduler, folder: Path, epoch: int) -> None:
    """Save a boosted model, optimizer and learning rate scheduler. Every process calls this, to gather shards.

    If saving fails, the run ends with one line. If the process is killed, the old checkpoint remains, the new one is
    complete, or its state file is missing.
    """
    from resnet_cifar10.internals import full_precision, gather_masters, loss_scaling

    is_master = dist.get_rank() == 0
    new = folder / ".new"
    final = {part: path_of(folder, part, epoch) for part in PARTS}

    def save_model(path: str) -> None:
        masters = gather_masters(model, optimizer)
        with full_precision(model):
            booster.save_model(model, path)
        if is_master:
            weights = {**torch.load(path, weights_only=True), **masters}
            torch.save({name: x.float() if x.is_floating_point() else x for name, x in weights.items()}, path)

    def save_state(path: str) -> None:
        if is_master:
            torch.save({"epoch": epoch, **loss_scaling(optimizer)}, path)

    save_parts = {
        MODEL: save_model,
        OPTIMIZER: partial(booster.save_optimizer, optimizer),
        LR_SCHEDULER: partial(booster.save_lr_scheduler, lr_scheduler),
        STATE: save_state,
    }
    try:
        with fail_together():
            if is_master:
                shutil.rmtree(new, ignore_errors=True)  # from a killed run
                new.mkdir()
        for part, save_part in save_parts.items():
            with fail_together():  # after each part: the next one has collectives
                try:
                    save_part(str(new / part))
                    if is_master and not is_zipfile(new / part):  # torch.save does not report this
                        raise OSError("its last bytes were not written")
                except (OSError, RuntimeError) as error:  # RuntimeError: torch.save, where the disk is full
                    raise OSError(f"cannot save {final[part]}: is the disk full? ({error})") from error
        with fail_together():
            if is_master:
                for part in PARTS:
                    flush(new / part)
                    if final[part].is_dir():
                        raise OSError(f"cannot save {final[part]}: a folder is in the way")
                for part in reversed(PARTS):  # first, so that old and new files never mix
                    final[part].unlink(missing_ok=True)
                for part in PARTS:  # the state last: with it, a checkpoint is complete
                    (new / part).replace(final[part])
                flush(folder)
    finally:
        if is_master:
            shutil.rmtree(new, ignore_errors=True)


def load(booster, model, optimizer, lr_scheduler, folder: Path, epoch: int) -> None:
    """Load a checkpoint of any plugin and world size into a boosted model, optimizer and learning rate scheduler.

    Every process calls this. Rank 0 reads the files, so all processes load the same. Every file is checked before
    anything changes. If one does not fit, the run ends with one line.
    """
    from resnet_cifar10.internals import load_weights, set_loss_scaling

    content = [None]
    with fail_together():
        if dist.get_rank() == 0:
            weights = read_model(folder, epoch, model.unwrap())
            optimizer_state = read_optimizer(folder, epoch, model.unwrap(), optimizer)
            lr_scheduler_state = read_lr_scheduler(folder, epoch, lr_scheduler)
            path = path_of(folder, STATE, epoch)
            state = read_state(folder, epoch) if path.exists() else None
            if state is None:
                print(f"{path} is missing: a loss scale, if the plugin has one, starts from its initial value")
            content = [(weights, optimizer_state, lr_scheduler_state, state)]
    dist.broadcast_object_list(content)
    weights, optimizer_state, lr_scheduler_state, state = content[0]

    # The Booster's functions would read the files again, without the checks
    load_weights(model, optimizer, weights)
    optimizer.load_state_dict(optimizer_state)
    lr_scheduler.load_state_dict(lr_scheduler_state)
    if state:
        set_loss_scaling(optimizer, state)
