"""Parses torchrun's rendezvous options. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.elastic.cloud.notice import CHOICES
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.store.address import Access, Address, parse_address

_NUMBERS = ("lease_ttl_s", "last_call_timeout", "join_timeout", "timeout", "grace")
_CERTIFICATES = {"ca_cert": "CACERT", "ssl_cert": "CERT", "ssl_cert_key": "KEY"}
_KNOWN = (*_NUMBERS, "nproc", "parity", *_CERTIFICATES, "secret_file", "notices")
_NO_ID = ("", "none")
"""torchrun's own value if --rdzv-id is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings with which a torchrun agent takes part in a job.

    Attributes:
        job: the job's name.
        coordinator: etcd.
        environment: from which this client's credentials are read.
        policy: the job's limits.
        local_addr: address under which other nodes reach this one; None: to be determined.
        lease_ttl_s: how long after its last sign of life the node is declared gone.
        workers: how many workers torchrun starts on this node; None: that is unknown, so that
            nothing is kept in memory.
        grace_s: how long the node may take to hand over what it holds when it leaves.
        notices: whose notices are followed, as `keepstep run --notices`.
    """

    job: str
    coordinator: Address
    environment: Mapping[str, str]
    policy: RendezvousPolicy
    local_addr: str | None
    lease_ttl_s: float
    workers: int | None
    grace_s: float
    notices: str

    @property
    def digest(self) -> str:
        """A digest of the settings that all nodes of a job must agree on."""
        parts = ("torchrun", self.policy.min_nodes, self.policy.max_nodes, self.policy.parity)
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def parse_settings(
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    local_addr: str | None,
    config: Mapping[str, Any],
    environment: Mapping[str, str],
    workers: int | None,
) -> Settings:
    """Parse the options of torchrun.

    Args:
        endpoint: `--rdzv-endpoint`: as `keepstep run --store`. Without a scheme it is keepstep://
            with a secret_file, etcds:// with certificates, and else etcd://.
        run_id: `--rdzv-id`.
        nodes: `--nnodes`, the least and the greatest number.
        local_addr: `--local-addr`.
        config: `--rdzv-conf`.
        environment: may have etcdctl's variables and KEEPSTEP_SECRET_FILE.
        workers: how many torchrun starts on this node; None: unknown, unless `config` has it.

    Raises:
        UsageError: an option is missing, unknown or invalid.
    """
    unknown = [key for key in config if key not in _KNOWN]
    if unknown:
        raise UsageError(
            f"--rdzv-conf {unknown[0]}: the back end keepstep has no such option; it has "
            f"{', '.join(_KNOWN)}"
        )
    if not endpoint:
        raise UsageError(
            "the back end keepstep needs --rdzv-endpoint HOST:PORT[,HOST:PORT...] of an etcd"
        )
    if run_id in _NO_ID:
        raise UsageError(
            "give --rdzv-id, a name for this job: other jobs may use the same etcd, and nodes "
            "that name none would form one job"
        )
    numbers = {key: _number(key, config[key]) for key in _NUMBERS if key in config}
    lease_ttl_s = numbers.get("lease_ttl_s", 5.0)
    if "nproc" in config:
        workers = _count("nproc", config["nproc"], least=1)
    parity = _count("parity", config.get("parity", 1), least=0)
    notices = str(config.get("notices", "off"))
    if notices not in CHOICES:
        raise UsageError(f"--rdzv-conf notices={notices}: give one of {', '.join(CHOICES)}")
    certificates = {
        f"ETCDCTL_{name}": str(config[key]) for key, name in _CERTIFICATES.items() if key in config
    }
    secret_file = config.get("secret_file")
    if "://" not in endpoint:
        access = Access.SECRET if secret_file else Access.TLS if certificates else Access.PLAIN
        endpoint = f"{access}://{endpoint}"
    return Settings(
        job=run_id,
        coordinator=parse_address(endpoint, Path(secret_file) if secret_file else None),
        environment={**environment, **certificates},
        policy=RendezvousPolicy(
            *nodes,
            parity=parity if workers is not None else 0,
            return_s=lease_ttl_s,
            last_call_s=numbers.get("last_call_timeout", 30.0),
            quorum_timeout_s=numbers.get("join_timeout", numbers.get("timeout", 900.0)),
        ),
        local_addr=local_addr,
        lease_ttl_s=lease_ttl_s,
        workers=workers,
        grace_s=numbers.get("grace", 30.0),
        notices=notices,
    )


def _number(key: str, value: object) -> float:
    convert: Callable[[str], float] = float
    try:
        number = convert(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--rdzv-conf {key}={value}: give a number of seconds above 0")
    return number


def _count(key: str, value: object, least: int) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"--rdzv-conf {key}={value}: give a whole number of at least {least}")
    return int(text)
