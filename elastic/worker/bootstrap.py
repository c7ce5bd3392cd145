"""Runs one worker process: warms up, waits for an assignment, runs the user's script as `__main__`.

A worker starts the same way whether it is one of the first of a job or a spare that takes over: it
imports slow modules, reports that it is warm, and knows nothing more until it is assigned. So a
spare replaces a lost worker in the time that its script needs, not in the time that importing
PyTorch needs.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from keepstep.elastic.worker import telemetry, warm_up
from keepstep.elastic.worker.log_files import VARIABLE as OUTPUTS_VARIABLE
from keepstep.elastic.worker.log_files import Outputs, redirect
from keepstep.elastic.worker.messages import (
    Command,
    CommandKind,
    Exiting,
    Warm,
    sendable,
)
from keepstep.elastic.worker.script_failure import (
    failure_of,
    flush_output,
    line_of,
    show,
    without_launcher,
)
from keepstep.elastic.worker.script_modules import import_modules
from keepstep.elastic.worker.session import Session, open_session
from keepstep.elastic.worker.tracker_environment import tracker_variables
from keepstep.log_format import log_to_stderr_unless_configured
from keepstep.notices import leave_notices, restore_notices
from keepstep.processes import die_with_parent

# By name: the script's imports are loaded early, and nothing here uses them.
_WARM_MODULES = (
    "torch.distributed.fsdp",
    "torch.utils.data",
    "keepstep.checkpoint.live.copier",
    "keepstep.checkpoint.format.stored.reader",
    "keepstep.checkpoint.snapshot.memory.memory_source",
    "keepstep.elastic.trainer.join",
)

_EXIT_OUTPUT_LOST = 120
"""Python's exit status where it cannot flush a script's output."""


def main() -> None:
    """Run one worker, from warm-up to exit."""
    leave_notices()
    log_to_stderr_unless_configured()
    die_with_parent(int(os.environ.pop("KEEPSTEP_AGENT_PID")))
    command = Command.decode(os.environ.pop("KEEPSTEP_COMMAND"))
    is_recorded = bool(os.environ.pop(telemetry.RECORD_VARIABLE, ""))
    outputs = os.environ.pop(OUTPUTS_VARIABLE, "")
    if command.kind is not CommandKind.PROGRAM:
        _warm_up(command)
        if is_recorded:
            telemetry.prepare()
    session = open_session()
    session.script = Path(command.target).name
    session.report(Warm())
    while modules := session.wait_for_start():
        import_modules(modules)
    assignment = session.wait_for_assignment(0)
    os.environ.update(assignment.environment())
    os.environ.update(tracker_variables(assignment, os.environ))
    if outputs:
        redirect(Outputs.decode(outputs), assignment)
    restore_notices()
    if command.kind is CommandKind.PROGRAM:
        if is_recorded:
            os.environ.update(telemetry.environment(assignment))
        os.execvp(command.target, [command.target, *command.arguments])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    session.own_modules = frozenset(sys.modules)
    if is_recorded:
        telemetry.attach(assignment)
    _run(session, command)
    _end(0)


def _end(status: int) -> NoReturn:
    """End the process as the interpreter would, except for native threads.

    Native threads of process groups that the script still refers to abort some interpreters at a
    normal exit, which would look like a failure.
    """
    # It also wakes the threads of executors that nobody has shut down, which would never end.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    is_written = flush_output()
    os._exit(status if status or is_written else _EXIT_OUTPUT_LOST)


def import_early() -> None:
    """Import a training script's usual modules, and those that PyTorch imports only at first use.

    Nothing is computed, for a fork server calls this (`keepstep.elastic.worker.fork_server`).
    """
    # Imported modules stay, so looking for garbage in them is in vain: it takes a seventh of the
    # time, and another 0.13 s while the state is restored.
    gc.disable()
    try:
        for name in _WARM_MODULES:
            importlib.import_module(name)
        import torch

        # PyTorch imports its compiler when the first optimizer is constructed.
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def import_preloaded(command: Command) -> None:
    """Import the modules that the user has named, with the script's path and arguments.

    Raises:
        ImportError: there is no such module.
    """
    if not command.preload:
        return
    directory, own_arguments = _directory(command), sys.argv
    sys.path.insert(0, directory)
    sys.argv = [command.target, *command.arguments]
    try:
        for name in command.preload:
            importlib.import_module(name)
    finally:
        sys.argv = own_arguments
        # The script gets it once it runs. A module may have set another path.
        with suppress(ValueError):
            sys.path.remove(directory)
    gc.collect()
    gc.freeze()


def _directory(command: Command) -> str:
    """Return the directory in which Python looks first for the script's imports."""
    if command.kind is CommandKind.MODULE:
        return os.getcwd()
    return str(Path(command.target).resolve().parent)


def _warm_up(command: Command) -> None:
    """Import a script's usual modules, and let PyTorch compute a step, after which it is faster."""
    import_early()
    import_preloaded(command)
    warm_up.compute_step()


def _run(session: Session, command: Command) -> None:
    sys.argv = [command.target, *command.arguments]
    try:
        # Started with -P: the interpreter has put no folder of a script at the front.
        sys.path.insert(0, _directory(command))
        if command.kind is CommandKind.MODULE:
            runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        else:
            # Absolute, so that `__file__` stays right when the script changes its directory.
            runpy.run_path(os.path.abspath(command.target), run_name="__main__")
        session.end_script()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            with suppress(Exception):  # The script may have closed it.
                print(stop.code, file=sys.stderr)
        if status == 0:
            _end_script(session)
        # Before its peers report their broken collectives.
        session.report(Exiting(status=status, place=sendable(line_of(without_launcher(stop)))))
        _end(status)
    except BaseException as error:  # noqa: BLE001 - reported, and it ends the process
        _fail(session, error)


def _end_script(session: Session) -> None:
    """Do what a script that ends by `sys.exit(0)` leaves to its end."""
    try:
        session.end_script()
    except BaseException as error:  # noqa: BLE001 - reported, and it ends the process
        _fail(session, error)


def _fail(session: Session, error: BaseException) -> NoReturn:
    """Report an exception that ends the script, and end the process."""
    session.end_script_by(error)
    error = without_launcher(error)
    show(error)
    # At once: exit handlers may take long.
    session.report(failure_of(error))
    _end(1)


if __name__ == "__main__":
    main()
