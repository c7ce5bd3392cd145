"""Implements `keepstep monitor`, `keepstep monitor analyze` and `keepstep top`."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.log_format import log_to_stderr
from keepstep.monitor.cli.options import (
    MUTE_TIME,
    Seconds,
    StepRange,
    monitor_url,
    named,
    step_range,
    webhook_address,
)
from keepstep.monitor.errors import DumpUnreadable, MonitorError
from keepstep.monitor.secret import bearer_token, job_secret
from keepstep.monitor.tree.child_registry import ChildrenFile
from keepstep.monitor.watch.verdict_notes import NoteKind, NoteRequest

if TYPE_CHECKING:
    from keepstep.monitor.contracts import JobRuntime
    from keepstep.monitor.views.webhook import WebhookAddress

PORT = 8433
_EXIT_FINDINGS = 1
_EXIT_UNREADABLE = 2
_JOB = click.option(
    "--job",
    callback=named,
    envvar="KEEPSTEP_JOB",
    default="default",
    show_default=True,
    help="Name of the job.",
)
_SECRET = click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    envvar="KEEPSTEP_SECRET_FILE",
    help="File with the job's secret. Default: $KEEPSTEP_SECRET, else a secret of this user on "
    "this machine.",
)


_URL = click.option(
    "--url",
    callback=monitor_url,
    metavar="URL",
    help="The daemon's address.  [default: that of the job's monitor on this machine, else "
    f"http://127.0.0.1:{PORT}]",
)
_RECORDED_JOB = click.option(
    "--job",
    callback=named,
    envvar="KEEPSTEP_JOB",
    help="Name of the job. Default: the only one that is recorded on this machine.",
)


@click.group(invoke_without_command=True)
@_JOB
@click.option(
    "--node",
    callback=named,
    envvar="KEEPSTEP_NODE",
    help="Name of this node. Default: the host's name.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on; 0 for any.",
)
@click.option(
    "--open-page",
    is_flag=True,
    help="Require no token of requests from this machine. Loopback only.",
)
@_SECRET
@click.option(
    "--print-token",
    is_flag=True,
    help="Print the token for the page and for Prometheus, and exit.",
)
@click.option(
    "--child",
    "children",
    callback=monitor_url,
    multiple=True,
    metavar="URL",
    help="A daemon to gather from; may be repeated.",
)
@click.option(
    "--children-file",
    type=click.Path(path_type=Path),
    help="File with URLs of daemons to gather from, one a line; read again when it changes.",
)
@click.option(
    "--gather-only",
    is_flag=True,
    help="Do not read this node's own ranks: another daemon here does.",
)
@click.option(
    "--relay",
    is_flag=True,
    help="Relay without diagnosing: for all daemons but the topmost.",
)
@click.option(
    "--store",
    metavar="URL",
    help="The job's coordinator, etcd://, etcds:// or keepstep://HOST:PORT: for the job's status, "
    "for publishing verdicts, and for --act. "
    "Default: that of the job of this name on this machine, once there is one.",
)
@click.option(
    "--act",
    type=click.Choice(["observe", "alert", "restart", "replace"]),
    default="alert",
    show_default=True,
    help="What to do about verdicts, each including the previous ones: nothing; log; restart "
    "workers; replace nodes.",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    help="File to append events to, one JSON object a line.",
)
@click.option(
    "--webhook",
    callback=webhook_address,
    envvar="KEEPSTEP_WEBHOOK",
    show_envvar=True,
    metavar="URL",
    help="Post each verdict that opens or closes to this address, as JSON; "
    "slack+https://... and hooks.slack.com get Slack's form.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="File in which verdicts survive a restart.",
)
@click.option(
    "--every",
    type=Seconds(0.05, 60),
    default=0.5,
    show_default=True,
    help="Seconds between readings.",
)
@click.pass_context
def monitor(context: click.Context, /, **options: Any) -> None:
    """Monitor the ranks of a job on this node, and diagnose them.

    Run one on every node. With --child it also gathers from other daemons: nodes under racks, racks
    under one root, which diagnoses for all. The page is at the address that is printed.
    """
    if context.invoked_subcommand is None:
        _run(context.obj, **options)


@monitor.command()
@click.argument(
    "dumps", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DUMPS..."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object; verdicts in it are as in --events.",
)
def analyze(dumps: tuple[Path, ...], as_json: bool) -> None:
    """Analyze PyTorch's Flight Recorder dumps of a job that hung.

    DUMPS are files, one of each rank, whose names end in the rank's number (such as
    /tmp/nccl_trace_rank_*), or directories of nothing else. Exit status: 0 if nothing is found, 1
    if something is, 2 if a file is not a dump.
    """
    from keepstep.monitor.cli.analyze import show

    try:
        has_findings = show(dumps, time.time(), as_json=as_json)
    except DumpUnreadable as error:
        click.echo(f"keepstep: {error}", err=True)
        sys.exit(_EXIT_UNREADABLE)
    if has_findings:
        sys.exit(_EXIT_FINDINGS)


@monitor.command()
@click.option(
    "--steps",
    callback=step_range,
    metavar="FIRST:LAST",
    help="The steps, both included; past ones, or ones to come. Default: the newest ten.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="File to write, NAME.json or NAME.json.gz; with --per-rank a directory.",
)
@click.option(
    "--per-rank",
    is_flag=True,
    help="Write one file for each rank, as torch.profiler does and HTA reads them.",
)
@_URL
@_RECORDED_JOB
@_SECRET
def trace(
    steps: StepRange | None,
    output: Path,
    per_rank: bool,
    url: str | None,
    job: str | None,
    secret_file: Path | None,
) -> None:
    """Write steps of all ranks as a trace for Perfetto (ui.perfetto.dev).

    The daemon that is asked has all ranks if it is the topmost. Past steps are in the trace as far
    as the ranks' rings hold them; steps to come are waited for.
    """
    from keepstep.monitor.cli.trace import write_trace

    if not per_rank and not output.name.endswith((".json", ".json.gz")):
        raise click.UsageError(f"{output} must end in .json or .json.gz; so viewers know it")
    address, name = _daemon_of(url, job)
    secret = job_secret(name, secret_file)
    write_trace(address, name, secret, steps, output, is_per_rank=per_rank)


_NUMBER = click.argument("number", type=click.IntRange(min=1))
_BY = click.option(
    "--by", metavar="NAME", default=getpass.getuser, help="Your name.  [default: that of your user]"
)


@monitor.command()
@_NUMBER
@click.option(
    "--for",
    "for_s",
    type=MUTE_TIME,
    required=True,
    metavar="TIME",
    help="How long, such as 30m, 2h or 3d; 30 days at most.",
)
@click.option("--reason", required=True, help="Why; shown to others.")
@_BY
@_URL
@_RECORDED_JOB
@_SECRET
def mute(
    number: int,
    for_s: float,
    reason: str,
    by: str,
    url: str | None,
    job: str | None,
    secret_file: Path | None,
) -> None:
    """Mute the verdict of this NUMBER for a time, also if it ends and opens again.

    It is shown as muted. Nobody is alerted, no worker is restarted and no node replaced because of
    it. The page and `keepstep top` show the numbers.
    """
    request = NoteRequest(NoteKind.MUTED, by, reason, for_s)
    _note(number, request, url, job, secret_file)


@monitor.command()
@_NUMBER
@click.option("--reason", required=True, help="What you do about it; shown to others.")
@_BY
@_URL
@_RECORDED_JOB
@_SECRET
def acknowledge(
    number: int, reason: str, by: str, url: str | None, job: str | None, secret_file: Path | None
) -> None:
    """Say that you look at the verdict of this NUMBER: nobody is alerted of it again.

    It holds until the verdict has ended. What `--act` allows is done all the same.
    """
    request = NoteRequest(NoteKind.ACKNOWLEDGED, by, reason)
    _note(number, request, url, job, secret_file)


@monitor.command()
@_NUMBER
@_URL
@_RECORDED_JOB
@_SECRET
def unmute(number: int, url: str | None, job: str | None, secret_file: Path | None) -> None:
    """End a mute or an acknowledgement of the verdict of this NUMBER."""
    _note(number, NoteRequest(None), url, job, secret_file)


def _note(
    number: int, request: NoteRequest, url: str | None, job: str | None, secret_file: Path | None
) -> None:
    from keepstep.monitor.cli.notes import note_verdict

    address, name = _daemon_of(url, job)
    click.echo(note_verdict(address, job_secret(name, secret_file), number, request))


@click.command()
@_URL
@_RECORDED_JOB
@_SECRET
@click.option(
    "--once",
    is_flag=True,
    help="Print once instead of following, as without a terminal.",
)
def top(url: str | None, job: str | None, secret_file: Path | None, once: bool) -> None:
    """Show live ranks, steps, step times and verdicts in the terminal."""
    from keepstep.monitor.cli.top import show

    address, name = _daemon_of(url, job)
    show(address, job_secret(name, secret_file), once=once)


def _daemon_of(url: str | None, job: str | None) -> tuple[str, str]:
    """Return the address of a daemon and the name of its job, given the options of a command."""
    from keepstep.monitor.daemon.local_monitors import local_monitors
    from keepstep.monitor.telemetry.ring_files import running_jobs

    address, _, fragment = (url or "").partition("#")
    if fragment:
        raise click.UsageError(
            "--url has a token, which every user of this machine can see in the list of processes; "
            "leave it out from the # on: it is derived from the secret (--job, --secret-file)"
        )
    running = running_jobs() if job is None else ()
    if len(running) > 1:
        raise click.UsageError(
            f"several jobs are recorded on this machine: {', '.join(running)}; give --job"
        )
    name = job or (running[0] if running else "default")
    topmost = (one.url for one in local_monitors() if one.diagnoses and one.job == name)
    return address or next(topmost, f"http://127.0.0.1:{PORT}"), name


def _run(
    find_runtime: Callable[[str | None, str, Path | None], JobRuntime] | None,
    *,
    job: str,
    node: str | None,
    host: str,
    port: int,
    open_page: bool,
    secret_file: Path | None,
    print_token: bool,
    children: tuple[str, ...],
    children_file: Path | None,
    gather_only: bool,
    relay: bool,
    store: str | None,
    act: str,
    events: Path | None,
    webhook: WebhookAddress | None,
    state: Path | None,
    every: float,
) -> None:
    secret = job_secret(job, secret_file)
    if print_token:
        click.echo(bearer_token(secret))
        return
    # These imports take a moment, and --print-token and --help do not need them.
    from keepstep.monitor.daemon.assembly import assemble
    from keepstep.monitor.daemon.daemon import Daemon
    from keepstep.monitor.daemon.local_monitors import LocalMonitor, registered
    from keepstep.monitor.daemon.otlp_settings import otlp_settings
    from keepstep.monitor.daemon.settings import Settings
    from keepstep.monitor.diagnosis.policy import EnforcementPolicy, Mode

    log_to_stderr(logging.INFO)
    name = node or socket.gethostname()
    settings = Settings(
        job=job,
        node=name,
        secret=secret,
        host=host,
        port=port,
        opens_to_loopback=open_page,
        read_every_s=every,
        events=events,
        state=state,
        otlp=otlp_settings(os.environ),
        webhook=webhook,
    )
    if webhook is not None and relay:
        raise MonitorError("--webhook is for the topmost monitor, which diagnoses: give no --relay")
    policy = EnforcementPolicy(Mode[act.upper()])
    runtime = (
        find_runtime(store, job, secret_file) if find_runtime is not None and not relay else None
    )
    if runtime is None and policy.mode in (Mode.RESTART, Mode.REPLACE):
        raise MonitorError(
            f"--act {act} is for the topmost monitor of a job of `keepstep run`: give no --relay"
        )
    components = assemble(
        job,
        name,
        diagnoses=not relay,
        reads_rings=not gather_only,
        children=_children(children, children_file),
        runtime=runtime,
        policy=policy,
    )

    async def serve() -> None:
        daemon = Daemon(settings, components)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.stop)
        running = asyncio.create_task(daemon.run())
        started_or_failed: list[asyncio.Future[Any]] = [running, daemon.address]
        await asyncio.wait(started_or_failed, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            # Browsers do not send the fragment, so the token is in no server's log; it is in no log
            # of a service manager either.
            is_shown = not open_page and sys.stdout.isatty()
            fragment = f"#token={bearer_token(secret)}" if is_shown else ""
            address = daemon.address.result()
            click.echo(f"watching job {job}: {address}/{fragment}")
            with registered(LocalMonitor(job, address, diagnoses=not relay)):
                await running
        await running

    asyncio.run(serve())


def _children(urls: Sequence[str], path: Path | None) -> Callable[[], Sequence[str]]:
    """Return a function that returns the URLs of the children: those named and those in a file."""
    if path is None:
        return lambda: tuple(urls)
    file = ChildrenFile(path)
    return lambda: tuple(dict.fromkeys((*urls, *file.urls())))
