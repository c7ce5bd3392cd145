"""Determines the credentials with which a client authenticates itself to a coordinator.

For a user's own etcd these are etcdctl's environment variables; for one that keepstep started,
certificates derived from a secret in a file. No secret is on a command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Access, Address, is_loopback
from keepstep.private_files import NotPrivate, own_secret, read_secret, runtime_directory

SECRET_FILE_VARIABLE = "KEEPSTEP_SECRET_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials of this client for etcd.

    Args:
        user: name for etcd's access control; None if it is off.
        password: the user's password.
        authority: CA certificates (PEM) that members' certificates are verified against;
            None: the system's.
        certificate: client certificate (PEM) for members that require one; None: none.
        key: private key of `certificate` (PEM).
        server_name: name that members' certificates must have; None: the host's.
    """

    user: str | None = None
    password: str = field(default="", repr=False)
    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    @classmethod
    def for_address(cls, address: Address, environment: Mapping[str, str]) -> Credentials:
        """Return the credentials for a coordinator.

        Args:
            address: the coordinator's.
            environment: as for `of`, or with KEEPSTEP_SECRET_FILE.

        Raises:
            UsageError: as `of` and `coordinator_secret`; or a password would be sent over a network
                without TLS.
        """
        if address.access is Access.SECRET:
            return cls.from_secret(coordinator_secret(address, environment))
        credentials = cls.of(environment)
        exposed = [host for host in address.hosts if not is_loopback(host)]
        if address.access is Access.PLAIN and credentials.password and exposed:
            raise UsageError(
                f"the password of ETCDCTL_PASSWORD or ETCDCTL_USER would be sent to {exposed[0]} "
                f"without encryption; use etcds:// (TLS), or unset it if etcd asks for none"
            )
        return credentials

    @classmethod
    def from_secret(cls, secret: bytes) -> Credentials:
        """Return the credentials for a coordinator that keepstep started with this secret."""
        # Imported here: it takes a moment, and only such coordinators need it.
        from keepstep.elastic.store.certificates import SERVER_NAME, issue

        issued = issue(secret)
        return cls(
            authority=issued.authority,
            certificate=issued.certificate,
            key=issued.key,
            server_name=SERVER_NAME,
        )

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


def coordinator_secret(address: Address, environment: Mapping[str, str]) -> bytes:
    """Return the secret of a coordinator that keepstep started, or is to start.

    It is in the address's file, else in that of KEEPSTEP_SECRET_FILE, else in this user's own on
    this machine, which is created when it is first needed and serves loopback only.

    Raises:
        UsageError: the address is not loopback and no file is given; or the file cannot be read, is
            not private, or its secret is too short.
    """
    variable = environment.get(SECRET_FILE_VARIABLE)
    path = address.secret_file or (Path(variable) if variable else None)
    exposed = [host for host in address.hosts if not is_loopback(host)]
    if path is None and exposed:
        raise UsageError(
            f"{exposed[0]} is reached over a network, so its coordinator needs a secret: write one "
            f"(openssl rand -hex 32 > FILE; chmod 600 FILE), copy it to every node of the job, "
            f"and give --secret-file FILE or {SECRET_FILE_VARIABLE}"
        )
    try:
        if path is not None:
            return read_secret(path, follow_links=True)
        return own_secret(runtime_directory() / "coordinator.secret")
    except NotPrivate as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"the coordinator's secret cannot be read from {path or runtime_directory()}: "
            f"{error.strerror}"
        ) from error


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
