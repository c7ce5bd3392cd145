"""Implements `keepstep doctor`: examines nodes and their links before a job starts."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.monitor.cli.options import Seconds, named
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.preflight.doctor import Doctor, Outcome, Participants
from keepstep.monitor.preflight.judgement import common_offset_s, names_of
from keepstep.monitor.secret import job_secret

PORT = 8434
_EXIT_FINDINGS = 1
# Ten columns that fit a terminal of 80.
_COLUMNS = (
    ("node", ""),
    ("memory", "MB/s"),
    ("products", "TFLOP/s"),
    ("disk", "MB/s"),
    ("fsync", "ms"),
    ("loopback", "MB/s"),
    ("sends", "MB/s"),
    ("receives", "MB/s"),
    ("latency", "us"),
    ("clock", "ms"),
)


@click.command()
@click.option(
    "--listen", default=f"127.0.0.1:{PORT}", show_default=True, help="HOST:PORT to listen on."
)
@click.option(
    "--address", help="HOST:PORT under which the peers reach this node. Default: as --listen."
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="HOST:PORT",
    help="Another node's doctor; may be repeated.",
)
@click.option(
    "--nodes",
    type=click.Path(path_type=Path, exists=True),
    help="File with the addresses of all doctors, one HOST:PORT a line.",
)
@click.option(
    "--node",
    callback=named,
    envvar="KEEPSTEP_NODE",
    help="Name of this node. Default: the host's name.",
)
@click.option(
    "--job",
    callback=named,
    envvar="KEEPSTEP_JOB",
    default="default",
    show_default=True,
    help="Name of the job.",
)
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    envvar="KEEPSTEP_SECRET_FILE",
    help="File with the secret, the same for all doctors.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory in which the disk is tested. Default: the one for temporary files.",
)
@click.option(
    "--patience",
    type=Seconds(1, 86400),
    default=120.0,
    show_default=True,
    help="Seconds to wait for peers to start, and to answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(
    listen: str,
    address: str | None,
    peers: tuple[str, ...],
    nodes: Path | None,
    node: str | None,
    job: str,
    secret_file: Path | None,
    directory: Path | None,
    patience: float,
    as_json: bool,
) -> None:
    """Examine this node, and its links to others, before a job starts.

    Run it on every node at about the same time, each with the addresses of all. Every doctor prints
    the same outcome, and exits with status 1 if a node or a link needs attention first.
    """
    own = address or listen
    listed = (
        [line.partition("#")[0].strip() for line in nodes.read_text().splitlines()] if nodes else []
    )
    others = [line for line in listed if line]
    if nodes and not others:
        raise MonitorError(f"--nodes {nodes} names no node: one HOST:PORT a line")
    participants = Participants.of(own, [*peers, *others])
    for participant in (listen, *participants.addresses):
        _check_address(participant)
    host, _, port = listen.rpartition(":")
    secret = job_secret(job, secret_file)
    with Doctor(
        node or socket.gethostname(), (host.strip("[]"), int(port)), secret, patience
    ) as examining:
        outcome = examining.examine(
            participants,
            directory or Path(tempfile.gettempdir()),
            lambda line: None if as_json else click.echo(f"{line} ...", err=True),
        )
    if as_json:
        click.echo(json.dumps(outcome.to_json()))
    else:
        show(outcome)
    if outcome.findings:
        sys.exit(_EXIT_FINDINGS)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise MonitorError(f"{address!r} is not an address; it must be HOST:PORT")


def show(outcome: Outcome) -> None:
    """Print the outcome as a table, and the findings as sentences."""
    console = Console()
    sick = {finding.subject for finding in outcome.findings}
    names = names_of(outcome.examinations)
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for name, unit in _COLUMNS:
        is_text = name in ("node", "products")
        table.add_column(
            f"{name}\n{unit}",
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=name != "node",
        )
    for node in outcome.examinations:
        links = list(node.links.values())
        # Measurements by other nodes count as much as this node's own.
        reverse = [
            other.links[node.address]
            for other in outcome.examinations
            if node.address in other.links
        ]
        sent = [link.send_rate for link in links] + [link.receive_rate for link in reverse]
        received = [link.receive_rate for link in links] + [link.send_rate for link in reverse]
        latencies = [link.latency_s for link in (*links, *reverse)]
        offsets = [-link.clock_offset_s for link in links]
        offsets += [link.clock_offset_s for link in reverse]
        name = names[node.address]
        table.add_row(
            Text(name, style="bold red" if name in sick else ""),
            _rate(node.memory_rate),
            "\n".join(f"{m.device} {m.flops / 1e12:.3g}" for m in node.matmuls),
            _rate(node.disk.write_rate) if node.disk else "failed",
            f"{node.disk.fsync_s * 1e3:.1f}" if node.disk else "-",
            _rate(node.loopback.send_rate) if node.loopback else "failed",
            _rate(max(sent)) if sent else "-",
            _rate(max(received)) if received else "-",
            f"{min(latencies) * 1e6:.0f}" if latencies else "-",
            f"{common_offset_s(offsets) * 1e3:+.1f}" if offsets else "-",
        )
    console.print(table)
    counts = Counter(node.name for node in outcome.examinations)
    for name in sorted(name for name, count in counts.items() if count > 1):
        warning = (
            f"{counts[name]} nodes are called {name}, so their addresses are shown; "
            "--node gives a node another name"
        )
        console.print(Text(warning, style="yellow"))
    for finding in outcome.findings:
        console.print(
            Text.assemble(
                (f"{finding.subject}: {finding.what}", "bold red"), f": {finding.evidence}"
            )
        )
    if not outcome.findings:
        count = len(outcome.examinations)
        if count == 1:
            scope = "this node; no link to another one was measured"
        elif count == 2:
            scope = "2 nodes and the link between them; two do not show which one is slow"
        else:
            scope = f"{count} nodes and the links between them"
        console.print(f"[green]healthy[/green]: {scope}")


def _rate(value: float) -> str:
    return f"{value / 1e6:.0f}"
