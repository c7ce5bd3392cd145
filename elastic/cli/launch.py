"""Implements `keepstep run`: runs this node's agent as the command line requests.

It parses the options, connects to the coordinator or starts one, runs the agent, and converts the
job's result to an exit status.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from keepstep.checkpoint.server.limits import RateLimits
from keepstep.elastic.agent.agent import Agent
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.orphans import orphans_ended
from keepstep.elastic.agent.readmission import readmit
from keepstep.elastic.agent.supervisor import worker_environment
from keepstep.elastic.cli.coordinator import coordinator
from keepstep.elastic.cli.follow import views
from keepstep.elastic.cli.node_name import own_node_name
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.view import Keys
from keepstep.elastic.store.address import Address
from keepstep.elastic.store.contract import Store
from keepstep.elastic.store.local_jobs import registered
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.messages import Command, CommandKind
from keepstep.private_files import NotPrivate, run_directory

log = logging.getLogger("keepstep")

_EXIT_INTERRUPTED = 128


def launch(**options: Any) -> int:
    """Run this node's agent and return the exit status.

    Args:
        options: the options of `keepstep run` (`keepstep.elastic.cli.main`).

    Raises:
        UsageError: an option is invalid.
        StoreUnavailable: the coordinator does not answer.
        JobFailed: the job ended in failure.
    """
    logging.basicConfig(
        level=logging.INFO, format="[keepstep %(asctime)s] %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    command = parse_command(
        options["script"], options["arguments"], options["module"], options["no_python"]
    )
    min_nodes, max_nodes = parse_nodes(options["nnodes"])
    if options["parity"] < 0 or options["group_size"] < 1:
        raise UsageError(
            "--parity must be a number of nodes of at least 0, --group-size of at least 1"
        )
    policy = RendezvousPolicy(
        min_nodes,
        max_nodes,
        parity=options["parity"],
        group_size=options["group_size"],
        max_restarts=options["max_restarts"],
        return_s=options["lease_ttl"],
        **_settings(options["rdzv_conf"]),
    )
    workers = parse_workers(options["nproc_per_node"])
    limits = RateLimits(
        parse_rate("--exchange-limit", options["exchange_limit"]),
        parse_rate("--storage-limit", options["storage_limit"]),
    )
    return asyncio.run(_launch(options, command, policy, workers, limits))


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


def parse_command(script: str, arguments: tuple[str, ...], module: bool, program: bool) -> Command:
    """Return the command that the workers run.

    Args:
        script: path of a script, name of a module or name of a program.
        arguments: arguments of the command.
        module: `script` is a module.
        program: `script` is a program in PATH.

    Raises:
        UsageError: the script or program does not exist.
    """
    if module and program:
        raise UsageError("--module and --no-python exclude each other")
    if module:
        return Command(CommandKind.MODULE, script, arguments)
    if program:
        path = shutil.which(script)
        if path is None:
            raise UsageError(f"--no-python {script}: no such program in PATH")
        return Command(CommandKind.PROGRAM, path, arguments)
    if not Path(script).is_file():
        raise UsageError(
            f"script {script} does not exist (use -m for a module, --no-python for a program)"
        )
    return Command(CommandKind.SCRIPT, script, arguments)


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
) -> int:
    async with AsyncExitStack() as stack:
        try:
            directory = stack.enter_context(run_directory())
        except (NotPrivate, OSError) as error:
            raise UsageError(f"no directory for sockets: {error}") from error
        stop = _Signals()
        stack.callback(stop.close)
        marked = stack.enter_context(orphans_ended())
        environment = worker_environment({**_worker_environment(options), **marked}, workers)
        fork_server = None
        if options["fork_workers"] and command.kind is not CommandKind.PROGRAM:
            # Now, for it takes longer than all that comes before the first worker.
            try:
                fork_server = ForkServerProcess.start(command, environment)
                stack.push_async_callback(fork_server.close)
            except OSError as error:
                log.warning("workers are started one by one, which takes longer: %s", error)
        job = options["job"] or options["rdzv_id"]
        found = await stack.enter_async_context(coordinator(options, policy.min_nodes, directory))
        if job is None:
            job = Path(command.target).stem + (f"-{uuid.uuid4().hex[:6]}" if found.is_own else "")
        if found.is_own:
            stack.enter_context(registered(job, found.address))
        host = options["local_addr"] or _own_address(found.address)
        _check_host(host)
        try:
            node = options["node"] or stack.enter_context(own_node_name(job))
        except (NotPrivate, OSError) as error:
            raise UsageError(f"no name for this node: {error}; give --node NAME") from error
        await readmit(found.store, job, node, directory)
        agent = Agent(
            AgentConfig(
                job=job,
                node=node,
                host=host,
                workers=workers,
                command=command,
                policy=policy,
                environment=environment,
                run_directory=directory,
                digest=_digest(command, policy),
                domain=options["domain"],
                lease_ttl_s=options["lease_ttl"],
                drain_timeout_s=options["drain_timeout"],
                abort_timeout_s=options["abort_timeout"],
                grace_s=options["grace"],
                spares=options["spares"],
                limits=limits,
                is_recorded=options["monitor"],
            ),
            found.store,
            fork_server,
        )
        log.info("job %s on %s", job, found.address.url)
        if found.is_own and policy.max_nodes > 1:
            log.warning(
                "this node serves the coordinator: if it is lost, so is the job; "
                "--store with an etcd of its own outlives any node"
            )
        task = asyncio.ensure_future(agent.run())
        stop.connect(agent, task)
        try:
            succeeded = await task
        except asyncio.CancelledError:
            log.error("interrupted: workers were killed")
            succeeded = False
        else:
            if fork_server is not None:
                await fork_server.close()
            if found.is_own:
                serving = asyncio.ensure_future(_serve_others(found.store, job))
                stop.connect(agent, serving)
                try:
                    await serving
                except asyncio.CancelledError:
                    log.error("interrupted: the coordinator ends, and with it the job")
        return 0 if succeeded else _EXIT_INTERRUPTED + (stop.number or signal.SIGTERM)


async def _serve_others(store: Store, job: str) -> None:
    """Keep the coordinator that this process has started until the other nodes have left."""
    has_warned = False
    async for view in views(store, Keys(job)):
        if not view.nodes:
            return
        if view.result is None and not has_warned:
            has_warned = True
            log.warning(
                "still serving the coordinator for %s; interrupt again to end it, and their job",
                ", ".join(sorted(view.nodes)),
            )


def _print_tasks() -> None:
    """Print every task's chain of coroutines, down to the one that it waits in."""
    for task in asyncio.all_tasks():
        chain = []
        coroutine: Any = task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            chain.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            coroutine = getattr(coroutine, "cr_await", None)
        print(f"[keepstep] {task.get_name()}: {' > '.join(chain)}", file=sys.stderr)


class _Signals:
    """Handles SIGTERM and SIGINT: the first lets the agent leave, the second cancels it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._agent: Agent | None = None
        self._task: asyncio.Future[Any] | None = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        # For debugging an agent that waits.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _print_tasks)

    def connect(self, agent: Agent, task: asyncio.Future[Any]) -> None:
        self._agent, self._task = agent, task

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _receive(self, number: int) -> None:
        if self.number is None and self._agent is not None:
            self._agent.ask_to_leave()
        elif self._task is not None:
            self._task.cancel()
        self.number = number


def _own_address(address: Address) -> str:
    """Return the address of this host on its route to the coordinator."""
    endpoint = address.endpoints[0]
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"cannot determine this host's address towards {endpoint} ({error}); give --local-addr"
        ) from None


def _check_host(host: str) -> None:
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise UsageError(
            f"--local-addr {host}: {error.strerror or error}; give an address of this host"
        ) from None


def _worker_environment(options: Mapping[str, Any]) -> dict[str, str]:
    environment = dict(os.environ)
    if options["monitor"]:
        # Workers attach once they know their rank; `import torch` must not attach them before that.
        environment.pop("KEEPSTEP_MONITOR", None)
        environment[telemetry.RECORD_VARIABLE] = "1"
    directory = options["log_dir"]
    wanted = {options["redirects"], options["tee"]} - {"0"}
    if wanted and not directory:
        raise UsageError("--redirects and --tee need --log-dir DIRECTORY")
    if wanted:
        environment["KEEPSTEP_LOG_DIRECTORY"] = str(Path(directory).resolve())
        environment["KEEPSTEP_LOG_TEE"] = "1" if options["tee"] != "0" else ""
    return environment


def _digest(command: Command, policy: RendezvousPolicy) -> str:
    """Return a digest of the settings that all nodes of a job must agree on."""
    parts = (
        command.kind, Path(command.target).name, *command.arguments,
        policy.min_nodes, policy.max_nodes, policy.parity, policy.group_size,
    )  # fmt: skip
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
