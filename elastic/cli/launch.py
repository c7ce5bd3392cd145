"""Implements `keepstep run`: runs this node's agent as the command line requests.

It parses the options, starts the fork server, lets `keepstep.elastic.cli.node` run the agent, and
converts the job's result to an exit status.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from keepstep.checkpoint.snapshot.isal import isal
from keepstep.checkpoint.snapshot.server.limits import RateLimits
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.orphans import orphans_ended
from keepstep.elastic.agent.supervisor import worker_environment
from keepstep.elastic.cli.signals import Signals
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.log_files import DEFAULT_DIRECTORY, Outputs
from keepstep.elastic.worker.log_files import VARIABLE as OUTPUTS_VARIABLE
from keepstep.elastic.worker.messages import Command, CommandKind
from keepstep.log_format import log_to_stderr
from keepstep.private_files import NotPrivate, run_directory
from keepstep.processes import allow_all_descriptors, open_standard_descriptors

log = logging.getLogger("keepstep")

_EXIT_INTERRUPTED = 128


def launch(**options: Any) -> int:
    """Run this node's agent and return the exit status.

    Args:
        options: the options of `keepstep run` (`keepstep.elastic.cli.main`).

    Raises:
        UsageError: an option is invalid.
        CheckpointError: parity is on, and ISA-L, which computes it, cannot be loaded.
        StoreUnavailable: the coordinator does not answer.
        JobFailed: the job ended in failure.
    """
    open_standard_descriptors()
    log_to_stderr(logging.INFO)
    command = parse_command(
        options["script"],
        options["arguments"],
        options["module"],
        options["no_python"],
        options["preload"],
    )
    min_nodes, max_nodes = parse_nodes(options["nnodes"])
    if options["parity"]:
        # Else the first failure that needs it would be the first to say that it is missing.
        isal()
    policy = RendezvousPolicy(
        min_nodes,
        max_nodes,
        parity=options["parity"],
        group_size=options["group_size"],
        max_restarts=options["max_restarts"],
        return_s=options["lease_ttl"],
        standstill_s=options["standstill_limit"] * 60.0,
        **_settings(options["rdzv_conf"]),
    )
    workers = parse_workers(options["nproc_per_node"])
    keep_s = parse_time("--keep-state", options["keep_state"])
    limits = RateLimits(
        parse_rate("--exchange-limit", options["exchange_limit"]),
        parse_rate("--storage-limit", options["storage_limit"]),
    )
    allow_all_descriptors()
    return asyncio.run(_launch(options, command, policy, workers, limits, keep_s))


def parse_nodes(text: str, name: str = "--nnodes") -> tuple[int, int]:
    """Return the least and greatest number of nodes in `N` or `MIN:MAX`.

    Args:
        text: what the user gave.
        name: name of the option, for the error message.

    Raises:
        UsageError: the text has another form, or MIN exceeds MAX.
    """
    least_text, _, greatest_text = text.partition(":")
    try:
        least, greatest = int(least_text), int(greatest_text or least_text)
    except ValueError:
        raise UsageError(f"{name} {text}: give a number, or MIN:MAX such as 1:4") from None
    if not 1 <= least <= greatest:
        raise UsageError(
            f"{name} {text}: the first number is the least, the second the greatest; "
            "both are at least 1"
        )
    return least, greatest


def parse_rate(name: str, text: str | None) -> int:
    """Return the bytes per second in `500MB`, `2GB` or a plain number; 0 for None.

    Args:
        name: name of the option, for the error message.
        text: the option's value.

    Raises:
        UsageError: the text has another form.
    """
    if text is None:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?(?:/s)?", text.strip())
    bytes_per_s = int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " ")) if match else 0
    if not bytes_per_s:
        raise UsageError(f"{name} {text}: give bytes per second, such as 500MB or 2GB")
    return bytes_per_s


def parse_time(name: str, text: str) -> float:
    """Return the seconds in `90s`, `30m`, `2h` or `0`.

    Args:
        name: name of the option, for the error message.
        text: the option's value.

    Raises:
        UsageError: the text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])|0", text.strip())
    if match is None:
        raise UsageError(f"{name} {text}: give a time such as 90s, 30m or 2h, or 0")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match[1] else 0.0


def parse_workers(text: str) -> int:
    """Return the number of workers that `--nproc-per-node` requests.

    Args:
        text: `N`, `cpu` (number of cores), `gpu` (number of accelerators), or `auto`: as `gpu`
            if there are accelerators, else as `cpu`.

    Raises:
        UsageError: the text has another form, or is `gpu` and there are no accelerators.
    """
    if text in ("auto", "gpu", "cpu"):
        accelerators = _count_accelerators() if text != "cpu" else 0
        if text == "gpu" and accelerators == 0:
            raise UsageError("--nproc-per-node gpu: PyTorch finds no GPU; give cpu or a number")
        return accelerators or os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--nproc-per-node {text}: give a number of at least 1, or auto, gpu, cpu")
    return int(text)


def parse_command(
    script: str,
    arguments: tuple[str, ...],
    module: bool,
    program: bool,
    preload: tuple[str, ...] = (),
) -> Command:
    """Return the command that the workers run.

    Args:
        script: path of a script, name of a module or name of a program.
        arguments: arguments of the command.
        module: `script` is a module.
        program: `script` is a program in PATH.
        preload: names of modules that workers import while they warm up.

    Raises:
        UsageError: the script or program does not exist, or a program has modules to import.
    """
    if module and program:
        raise UsageError("--module and --no-python exclude each other")
    if module:
        return Command(CommandKind.MODULE, script, arguments, preload)
    if program:
        if preload:
            raise UsageError("--preload needs a Python script, and --no-python runs a program")
        path = shutil.which(script)
        if path is None:
            raise UsageError(f"--no-python {script}: no such program in PATH")
        return Command(CommandKind.PROGRAM, path, arguments)
    if not Path(script).is_file():
        raise UsageError(
            f"script {script} does not exist (use -m for a module, --no-python for a program)"
        )
    return Command(CommandKind.SCRIPT, script, arguments, preload)


def _count_accelerators() -> int:
    # Counted in another process: the agent never loads PyTorch.
    code = (
        "from torch import accelerator\n"
        "print(accelerator.device_count() if accelerator.is_available() else 0)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return int(completed.stdout) if completed.returncode == 0 else 0


def _settings(text: str) -> dict[str, float]:
    """Parse torchrun's `--rdzv-conf key=value,key=value` to policy fields; ignore other keys."""
    fields = {"last_call_timeout": "last_call_s", "join_timeout": "quorum_timeout_s"}
    settings = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key.strip() not in fields:
            continue
        try:
            settings[fields[key.strip()]] = float(value)
        except ValueError:
            raise UsageError(f"--rdzv-conf {item}: give key=number") from None
    return settings


async def _launch(
    options: Mapping[str, Any],
    command: Command,
    policy: RendezvousPolicy,
    workers: int,
    limits: RateLimits,
    keep_s: float,
) -> int:
    async with AsyncExitStack() as stack:
        try:
            directory = stack.enter_context(run_directory())
        except (NotPrivate, OSError) as error:
            raise UsageError(f"no directory for sockets: {error}") from error
        stop = Signals()
        stack.callback(stop.close)
        marked = stack.enter_context(orphans_ended())
        environment = worker_environment({**_worker_environment(options), **marked}, workers)
        fork_server = None
        if options["fork_workers"] and command.kind is not CommandKind.PROGRAM:
            # Started now: it takes longer than everything else before the first worker.
            try:
                fork_server = ForkServerProcess.start(command, environment)
                stack.push_async_callback(fork_server.close)
            except OSError as error:
                log.warning("workers are started one by one, which takes longer: %s", error)
        # Imported now: the coordinator's client takes long as well, and the fork server is another
        # process, which imports PyTorch meanwhile.
        from keepstep.elastic.cli.node import NodeStart, run_node

        if options["notices"] != "off":
            from keepstep.elastic.cloud.watch import start_watch

            watch = start_watch(options["notices"], options["grace"], stop.announce)
            if watch is not None:
                stack.callback(watch.cancel)
        # Imported modules stay: no garbage collection has to look at them again.
        gc.collect()
        gc.freeze()
        start = NodeStart(
            options=options,
            command=command,
            policy=policy,
            workers=workers,
            limits=limits,
            keep_s=keep_s,
            environment=environment,
            directory=directory,
            fork_server=fork_server,
        )
        try:
            succeeded = await run_node(start, stop)
        except asyncio.CancelledError:
            if stop.number is None:
                raise
            name = signal.Signals(stop.number).name
            log.warning("ended by %s before this node took part in a job", name)
            succeeded = False
        return 0 if succeeded else _EXIT_INTERRUPTED + (stop.number or signal.SIGTERM)


def _worker_environment(options: Mapping[str, Any]) -> dict[str, str]:
    environment = dict(os.environ)
    if options["monitor"]:
        # Workers attach once they know their rank; `import torch` must not attach them before that.
        environment.pop("KEEPSTEP_MONITOR", None)
        environment[telemetry.RECORD_VARIABLE] = "1"
    directory = Path(options["log_dir"] or _log_directory(options)).resolve()
    try:
        outputs = Outputs(
            str(directory), options["redirects"], options["tee"], options["local_ranks_filter"]
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if outputs.has_files and not options["log_dir"]:
        log.info("workers' output is in %s", directory)
    if outputs.has_files or outputs.shown:
        environment[OUTPUTS_VARIABLE] = outputs.encode()
    return environment


def _log_directory(options: Mapping[str, Any]) -> Path:
    """Return the directory for workers' output if --log-dir names no other."""
    job = options["job"] or options["rdzv_id"] or Path(options["script"]).stem
    return Path(DEFAULT_DIRECTORY) / job
