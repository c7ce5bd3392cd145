"""Who we are to an etcd that asks, from the environment variables that etcdctl reads too: no secret on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.elastic.errors import UsageError


@dataclass(frozen=True, slots=True)
class Credentials:
    """What to show to etcd.

    Args:
        user: for etcd's own access control; None if it has none.
        password: the user's.
        authority: certificates (PEM) of who vouches for the members; None for the system's.
        certificate: our own (PEM), where members ask for one, with
        key: its private key.
    """

    user: str | None = None
    password: str = field(default="", repr=False)
    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Credentials:
        """Return what ETCDCTL_USER (`NAME` or `NAME:PASSWORD`), ETCDCTL_PASSWORD, ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY say.

        Raises:
            UsageError: a file cannot be read, or of certificate and key only one is given.
        """
        user, _, password = environment.get("ETCDCTL_USER", "").partition(":")
        authority, certificate, key = (
            _content(environment, f"ETCDCTL_{name}") for name in ("CACERT", "CERT", "KEY")
        )
        if (certificate is None) != (key is None):
            raise UsageError(
                "of ETCDCTL_CERT and ETCDCTL_KEY only one is set; a certificate and its key belong together"
            )
        return cls(
            user or None, environment.get("ETCDCTL_PASSWORD", password), authority, certificate, key
        )


def _content(environment: Mapping[str, str], variable: str) -> bytes | None:
    path = environment.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{variable}={path}: {error.strerror}; name a file in PEM format"
        ) from None
