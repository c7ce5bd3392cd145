"""Leaves signals that announce a node's end to the agent, once a script has joined the job.

From then on the agent alone answers them: it has the newest state stored or handed over. A handler
that the script has installed, before or after, is called as in any process. Processes of the script
begin as they would without keepstep: exec(2) resets handlers for programs, and a function that is
registered here resets them in forked processes.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from keepstep.notices import NOTICES


def leave_notices_to_agent() -> None:
    """Ignore them where the script has left them to Python. Only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        return
    # Blocked around a fork: Python forgets a signal that comes before its handler is removed.
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore() -> None:
        _restore()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
    for number in NOTICES:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _ignore)
            # Waits in native code are not interrupted.
            signal.siginterrupt(number, False)


def end_unless_handled() -> None:
    """End this process, as SIGTERM from its agent would, unless the script handles that itself.

    Called on any thread, because the main one may wait in a collective.
    """
    if signal.getsignal(signal.SIGTERM) is _ignore:
        os._exit(128 + signal.SIGTERM)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Not SIG_IGN, which programs that the script starts would inherit."""


def _restore() -> None:
    for number in NOTICES:
        if signal.getsignal(number) is _ignore:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
