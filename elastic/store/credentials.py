"""Reads etcd credentials from etcdctl's environment variables: no secret is on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.elastic.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What this client authenticates to etcd with.

    Args:
        user: name for etcd's access control; None if it is off.
        password: the user's password.
        authority: CA certificates (PEM) that members' certificates are verified against;
            None: the system's.
        certificate: client certificate (PEM) for members that require one; None: none.
        key: private key of `certificate` (PEM).
    """

    user: str | None = None
    password: str = field(default="", repr=False)
    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Credentials:
        """Return the credentials in an environment.

        Args:
            environment: may set ETCDCTL_USER (`NAME` or `NAME:PASSWORD`), ETCDCTL_PASSWORD,
                ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY.

        Raises:
            UsageError: a file cannot be read, or only one of certificate and key is given.
        """
        user, _, password = environment.get("ETCDCTL_USER", "").partition(":")
        authority, certificate, key = (
            _read_file(environment, f"ETCDCTL_{name}") for name in ("CACERT", "CERT", "KEY")
        )
        if (certificate is None) != (key is None):
            raise UsageError(
                "only one of ETCDCTL_CERT and ETCDCTL_KEY is set; "
                "give both, a certificate and its key"
            )
        return cls(
            user=user or None,
            password=environment.get("ETCDCTL_PASSWORD", password),
            authority=authority,
            certificate=certificate,
            key=key,
        )


def _read_file(environment: Mapping[str, str], variable: str) -> bytes | None:
    path = environment.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{variable}={path}: {error.strerror}; name a file in PEM format"
        ) from None
