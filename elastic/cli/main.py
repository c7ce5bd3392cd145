"""Defines the `keepstep` command. Options that torchrun has too have its names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.checkpoint.errors import CheckpointError
from keepstep.elastic.cloud.notice import CHOICES
from keepstep.elastic.errors import ElasticError, StoreUnavailable, UsageError
from keepstep.monitor.errors import MonitorError

if TYPE_CHECKING:
    from keepstep.monitor.contracts import JobRuntime

_EXIT_FAILURE = 1
_EXIT_USAGE = 2
_EXIT_AWAY = 75
"""EX_TEMPFAIL of <sysexits.h>: the coordinator does not answer, so another attempt may succeed."""
_COMMANDS_OF_OTHER_PACKAGES = {
    "ckpt": "keepstep.checkpoint.cli.ckpt",
    "doctor": "keepstep.monitor.cli.doctor",
    "monitor": "keepstep.monitor.cli.monitor",
    "top": "keepstep.monitor.cli.monitor",
}


class _Commands(click.Group):
    """A group that prints the errors of its commands as one line and sets the exit status.

    It imports commands of other packages when they are used: an agent must start fast, and does not
    need their imports.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *_COMMANDS_OF_OTHER_PACKAGES])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS_OF_OTHER_PACKAGES:
            return super().get_command(context, name)
        module = import_module(_COMMANDS_OF_OTHER_PACKAGES[name])
        command: click.Command = getattr(module, name)
        return command

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except UsageError as error:
            click.echo(f"keepstep: {error}", err=True)
            sys.exit(_EXIT_USAGE)
        except StoreUnavailable as error:
            click.echo(f"keepstep: {error}", err=True)
            sys.exit(_EXIT_AWAY)
        except (ElasticError, CheckpointError, MonitorError) as error:
            click.echo(f"keepstep: {error}", err=True)
            sys.exit(_EXIT_FAILURE)


def _torch_option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """Declare an option with dashes and with underscores in its name: torchrun accepts both."""
    spelled = [
        *names,
        *(name[:2] + name[2:].replace("-", "_") for name in names if name[2:].count("-")),
    ]
    return click.option(*dict.fromkeys(spelled), **attributes)


@click.group(cls=_Commands)
@click.version_option(package_name="keepstep")
@click.pass_context
def main(context: click.Context) -> None:
    """Run sharded PyTorch training jobs while machines fail, slow down, leave and join."""
    # `keepstep monitor`, which must not import this package, connects to the coordinator with this.
    context.obj = _runtime


def _runtime(store: str | None, job: str, secret_file: Path | None) -> JobRuntime:
    from keepstep.elastic.monitor_bridge.runtime import runtime

    return runtime(store, job, secret_file)


_SECRET_FILE = click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    envvar="KEEPSTEP_SECRET_FILE",
    help="File with the secret of a coordinator that keepstep started, the same on all nodes. "
    "Needed if its address is not loopback.",
)


@main.command(
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        # As torchrun has it: each option's default is in PET_<OPTION>, such as PET_NNODES.
        "auto_envvar_prefix": "PET",
    }
)
@_torch_option("--nnodes", default="1:1", show_default=True, help="Number of nodes: N or MIN:MAX.")
@_torch_option(
    "--nproc-per-node",
    default="1",
    show_default=True,
    help="Workers per node: N, auto, gpu or cpu.",
)
@click.option(
    "--store",
    metavar="URL",
    help="The coordinator: etcd://HOST:PORT[,HOST:PORT...], etcds:// with TLS, or "
    "keepstep://HOST:PORT for one that keepstep started. Default: one is started.",
)
@_SECRET_FILE
@click.option("--job", help="Name of the job; nodes with the same name and store form one job.")
@click.option(
    "--node", help="Name of this node, unique in the job. Default: made from the host name."
)
@_torch_option("--rdzv-id", help="Same as --job.")
@_torch_option(
    "--rdzv-endpoint",
    help="HOST:PORT of the coordinator; the node with this address starts one there. With three or "
    "five, separated by commas, each of these nodes starts a member, and it outlives each of them.",
)
@_torch_option(
    "--rdzv-backend",
    default="etcd",
    help="Accepted for compatibility with torchrun: the coordinator is always etcd.",
)
@_torch_option("--rdzv-conf", default="", help="last_call_timeout=S and join_timeout=S are used.")
@click.option(
    "--standalone",
    is_flag=True,
    help="One node with its own coordinator (the default without --store).",
)
@_torch_option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Worker failures without progress in between that end the job.",
)
@_torch_option("--master-addr", help="With --master-port: same as --rdzv-endpoint ADDR:PORT.")
@_torch_option("--master-port", type=int, help="See --master-addr.")
@_torch_option("--local-addr", help="Address under which other nodes reach this one.")
@_torch_option(
    "--node-rank",
    hidden=True,
    help="Accepted for compatibility with torchrun: ranks follow the order of arrival.",
)
@_torch_option(
    "--monitor-interval",
    hidden=True,
    help="Accepted for compatibility with torchrun: exits are detected at once.",
)
@_torch_option(
    "--start-method",
    hidden=True,
    help="Accepted for compatibility with torchrun: workers are always new processes.",
)
@_torch_option(
    "--run-path",
    is_flag=True,
    hidden=True,
    help="Accepted for compatibility with torchrun: scripts are always run by runpy.",
)
@_torch_option(
    "--event-log-handler",
    type=click.Choice(["null"]),
    hidden=True,
    help="Accepted for compatibility with torchrun: null, its default.",
)
@click.option("--role", hidden=True, help="Accepted for compatibility with torchrun, and ignored.")
@click.option("-m", "--module", is_flag=True, help="Run SCRIPT as `python -m` would.")
@_torch_option(
    "--no-python", is_flag=True, help="Run SCRIPT as a program, without warm spare processes."
)
@click.option(
    "--monitor", is_flag=True, help="Let workers record telemetry for `keepstep monitor`."
)
@_torch_option(
    "--log-dir",
    type=click.Path(),
    help="Directory for the workers' output, with --redirects or --tee.  [default: "
    "keepstep-logs/JOB]",
)
@click.option(
    "-r",
    "--redirects",
    default="0",
    help="Workers' output to files in --log-dir: 1 stdout, 2 stderr, 3 both, or by local rank, "
    "such as 0:3,1:2.",
)
@click.option(
    "-t",
    "--tee",
    default="0",
    help="As --redirects, and to the terminal too.",
)
@_torch_option(
    "--local-ranks-filter",
    default="",
    metavar="RANKS",
    help="Local ranks whose output goes to the terminal, such as 0,1; files have all.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Warm processes kept ready to replace a failed worker.",
)
@click.option(
    "--fork-workers/--no-fork-workers",
    default=True,
    show_default=True,
    help="Import PyTorch once and fork the workers, or have each worker import it.",
)
@click.option(
    "--preload",
    metavar="MODULE",
    multiple=True,
    help="Module that workers import while they warm up, such as my_project.models, so that one "
    "that replaces another does not; may be given several times.",
)
@click.option(
    "--parity",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Nodes of each group that may be lost at the same time.",
)
@_torch_option(
    "--group-size",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Nodes that protect each other's snapshots.",
)
@click.option(
    "--domain",
    default="",
    envvar="KEEPSTEP_DOMAIN",
    help="Failure domain of this node, such as its rack: groups are spread over domains.",
)
@_torch_option(
    "--exchange-limit",
    metavar="SIZE",
    help="Bytes per second that this node sends for parity, such as 500MB.",
)
@_torch_option(
    "--storage-limit",
    metavar="SIZE",
    help="Bytes per second that this node writes to storage, such as 2GB.",
)
@click.option(
    "--lease-ttl",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds after which a node that does not renew its lease is removed.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="Seconds for all workers to end a step together, evaluations included.",
)
@click.option(
    "--abort-timeout",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds for a worker to leave a failed step.",
)
@click.option(
    "--standstill-limit",
    type=click.FloatRange(min=0),
    metavar="MINUTES",
    default=30.0,
    show_default=True,
    help="Minutes without a step after which all ranks' stacks are printed and the ranks restarted "
    "from memory; a second time at the same step ends the job. Longer than an evaluation takes; "
    "0: no limit.",
)
@_torch_option(
    "--keep-state",
    metavar="TIME",
    default="5m",
    show_default=True,
    help="How long the newest snapshot stays in memory after a run that has not succeeded, such as "
    "90s, 30m or 2h: the same line, run again, goes on from it. 0: it ends with the run.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to hand over state after SIGTERM, SIGINT, SIGHUP, SIGQUIT or SIGUSR1.",
)
@click.option(
    "--notices",
    type=click.Choice(CHOICES),
    default="off",
    show_default=True,
    help="Leave as after SIGTERM before the cloud interrupts or restarts this machine: whose "
    "metadata service is asked. auto: that of the cloud which the firmware names.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> None:
    """Run SCRIPT on this node as part of an elastic job, as torchrun would.

    The variable PET_OPTION, such as PET_NNODES, has the default of an option.
    """
    # Imported here, so that other commands do not load the coordinator's client.
    from keepstep.elastic.cli.launch import launch

    sys.exit(launch(**options))


_STORE = click.option(
    "--store",
    metavar="URL",
    help="The coordinator: etcd://, etcds:// or, for one that keepstep started, keepstep://, and "
    "HOST:PORT. Default: that of the job running on this machine.",
)


@main.command()
@_STORE
@click.option("--job", help="Name of the job. Default: the only one running on this machine.")
@_SECRET_FILE
@click.option(
    "--once",
    is_flag=True,
    help="Print once instead of following, as without a terminal.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON, one object per change (or one, with --once).",
)
@click.option(
    "--if-lost",
    metavar="NODE",
    multiple=True,
    help="Print what the job would do if NODE died now, instead; may be given several times.",
)
def status(
    store: str | None,
    job: str | None,
    secret_file: Path | None,
    once: bool,
    as_json: bool,
    if_lost: tuple[str, ...],
) -> None:
    """Show members, generation, step, last snapshot and checkpoint of a running job, live."""
    from keepstep.elastic.cli.follow import find_job, follow, foretell_loss

    if if_lost:
        foretell_loss(find_job(store, job, secret_file), if_lost, as_json=as_json)
        return
    follow(find_job(store, job, secret_file), once=once, as_json=as_json)


@main.command()
@_STORE
@click.option("--job", help="Name of the job. Default: the only one running on this machine.")
@_SECRET_FILE
@click.option(
    "--reason",
    default="on request",
    show_default=True,
    help="Reason of the eviction, shown to users.",
)
@click.option("--undo", is_flag=True, help="Let an evicted node return.")
@click.argument("node")
def evict(
    store: str | None,
    job: str | None,
    secret_file: Path | None,
    reason: str,
    undo: bool,
    node: str,
) -> None:
    """Let NODE hand over its state, leave the job and stay away."""
    from keepstep.elastic.cli.follow import evict_node, find_job

    click.echo(evict_node(find_job(store, job, secret_file), node, reason, undo=undo))


@main.command()
@_STORE
@click.option(
    "--job",
    help="Name of the job.  [default: the one that has written last in this folder, else the only "
    "one running on this machine]",
)
@_SECRET_FILE
@click.option(
    "--rank", type=click.IntRange(min=0), help="The rank.  [default: the lowest with a file]"
)
@click.option("--node", help="The only node to ask.  [default: all nodes of the job]")
@click.option(
    "--since-generation",
    "since",
    type=click.IntRange(min=1),
    metavar="G",
    help="Print the output of generation G and later ones.  [default: the newest with a file]",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what it writes, until Ctrl-C.")
def logs(
    store: str | None,
    job: str | None,
    secret_file: Path | None,
    rank: int | None,
    node: str | None,
    since: int | None,
    follow: bool,
) -> None:
    """Print a rank's newest output that --redirects or --tee has sent to files.

    While the job runs, on whichever node the rank is; afterwards from keepstep-logs/JOB here.
    """
    from keepstep.elastic.cli.logs import find_directory, follow_log, local_job, print_log

    name = job if store is not None else local_job(job, Path())
    if store is not None or name is not None:
        from keepstep.elastic.cli.follow import find_job
        from keepstep.elastic.cli.job_logs import OutputChoice, print_job_output

        choice = OutputChoice(rank, node, since)
        print_job_output(find_job(store, name, secret_file), choice, follow=follow)
        return
    if node is not None:
        raise UsageError("--node is for a job that runs; give --store URL if it runs elsewhere")
    print_files = follow_log if follow else print_log
    print_files(find_directory(job, Path()), rank, since)


@main.command()
@_STORE
@_SECRET_FILE
@click.argument("job")
@click.argument("nodes", metavar="MIN:MAX")
def scale(store: str | None, secret_file: Path | None, job: str, nodes: str) -> None:
    """Change how many nodes JOB has, while it runs; those beyond the maximum go on standby."""
    from keepstep.elastic.cli.follow import find_job
    from keepstep.elastic.cli.launch import parse_nodes
    from keepstep.elastic.cli.operation import scale_job

    limits = parse_nodes(nodes, "nodes")
    click.echo(scale_job(find_job(store, job, secret_file), *limits))


@main.command()
@_STORE
@_SECRET_FILE
@click.option("--reason", default="on request", show_default=True, help="Shown to users.")
@click.argument("job")
def pause(store: str | None, secret_file: Path | None, reason: str, job: str) -> None:
    """Store a checkpoint of JOB and end its workers; its nodes wait, and may leave."""
    from keepstep.elastic.cli.follow import find_job
    from keepstep.elastic.cli.operation import pause_job

    click.echo(pause_job(find_job(store, job, secret_file), reason))


@main.command()
@_STORE
@_SECRET_FILE
@click.argument("job")
def resume(store: str | None, secret_file: Path | None, job: str) -> None:
    """Let a paused JOB go on, with the nodes that are there."""
    from keepstep.elastic.cli.follow import find_job
    from keepstep.elastic.cli.operation import resume_job

    click.echo(resume_job(find_job(store, job, secret_file)))


@main.command()
@click.argument("cloud", type=click.Choice(CHOICES[1:]), default="auto")
def notices(cloud: str) -> None:
    """Ask CLOUD once what it announces for this machine, as `run --notices CLOUD` would.

    The exit status is 1 if it does not answer.
    """
    import asyncio

    from keepstep.elastic.cloud.watch import look

    has_answered, lines = asyncio.run(look(cloud))
    click.echo("\n".join(lines))
    sys.exit(0 if has_answered else _EXIT_FAILURE)


if __name__ == "__main__":
    main()
