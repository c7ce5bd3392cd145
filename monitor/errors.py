"""The errors of the monitor. Each message says what happened, to which rank or file, and what to do next."""

from __future__ import annotations


class MonitorError(Exception):
    """Base of all errors that the monitor raises on purpose."""


class RingUnreadable(MonitorError):
    """A file is no telemetry ring, is cut short, or was written by a version that this one cannot read."""


class RingUnwritable(MonitorError):
    """A worker's ring cannot be created: no room, or a directory that others could write to."""


class RecorderUnavailable(MonitorError):
    """The native recorder of operations can neither be loaded nor built."""


class DumpUnreadable(MonitorError):
    """A Flight Recorder dump is damaged, or holds what such dumps do not hold."""


class MonitorUnreachable(MonitorError):
    """A monitor daemon or a doctor could not be reached in time, refused us, or answered what is no answer."""


class RuntimeUnreachable(MonitorError):
    """What runs the job (its coordinator) does not answer: it is away, or has ended with the job."""


class SecretDiffers(MonitorUnreachable):
    """A doctor answers, and has another secret than this one."""


class ProtocolViolation(MonitorError):
    """What came over a connection is not what keepstep's monitors say to each other."""
