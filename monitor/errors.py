"""Defines the errors of the monitor.

Each message states what happened, to which rank or file, and what to do next.
"""

from __future__ import annotations


class MonitorError(Exception):
    """Base of all errors that the monitor raises on purpose."""


class RingUnreadable(MonitorError):
    """A file is not a telemetry ring, is truncated, or has a version that cannot be read."""


class RingUnwritable(MonitorError):
    """A worker's ring cannot be created: no space, or a directory that others could write to."""


class RecorderUnavailable(MonitorError):
    """The native recorder of operations can neither be loaded nor built."""


class DumpUnreadable(MonitorError):
    """A Flight Recorder dump is damaged, or its content is not of the documented form."""


class MonitorUnreachable(MonitorError):
    """A monitor daemon or a doctor timed out, refused the request, or sent an invalid answer."""


class RuntimeUnreachable(MonitorError):
    """The job's coordinator does not answer: it is unreachable, or has ended with the job."""


class SecretDiffers(MonitorUnreachable):
    """A doctor answers, but with a different secret than this one."""


class ProtocolViolation(MonitorError):
    """A message does not follow the protocol of keepstep's monitors."""
