"""Runs a script without the seconds its imports take: its processes are forked from one that has done them.

That one, multiprocessing's fork server, ends with the process that imports this. No GPU may be visible when it starts:
ColossalAI turns to GPUs when it is imported, and forked processes cannot.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

context = multiprocessing.get_context("forkserver")  # set its preload before the first run


def run(words: list[str], processes: int | None, environment: dict, timeout: float, preexec=None):
    """Run ``python *words``, with -c, -m or neither, in this folder: as a launcher's ``processes`` or, None, as it is.

    ``preexec``, picklable, is called in each process first. When one fails, or time is up, the others are ended.
    """
    with socket.create_server(("127.0.0.1", 0)) as unused:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1])}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    variables = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes or 0)] or [{}]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_main, args=(words, {**environment, **v}, folder, preexec)) for v in variables]
        deadline, running, returncode = time.monotonic() + timeout, ranks, 0
        for rank in ranks:
            rank.start()
        try:
            while running and returncode == 0:
                timed_out = not wait([rank.sentinel for rank in running], max(0, deadline - time.monotonic()))
                running = [rank for rank in ranks if rank.exitcode is None]
                returncode = None if timed_out else next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        finally:
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.join(5)
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)  # with what it has started
        outputs = [Path(folder, stream).read_text(errors="replace") for stream in ("1", "2")]
    if returncode is None:
        raise subprocess.TimeoutExpired(words, timeout, *outputs)
    return subprocess.CompletedProcess(words, returncode, *outputs)


def _main(words: list[str], environment: dict, folder: str, preexec) -> None:
    os.setpgrp()
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os.killpg(0, signal.SIGKILL)), daemon=True).start()
    for stream in (1, 2):
        os.dup2(os.open(f"{folder}/{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    if int(environment.get("WORLD_SIZE", 1)) > 1:  # as torchrun, which sets OMP_NUM_THREADS
        sys.modules["torch"].set_num_threads(1)
    if preexec:
        preexec()
    option, *sys.argv = words if words[0] in ("-c", "-m") else [None, *words]
    folder = os.getcwd() if option else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    try:
        if option == "-c":
            exec(words[1], {"__name__": "__main__"})
        elif option == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
