"""Claims about the rendezvous options that torchrun passes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Access
from keepstep.elastic.torchrun.settings import Settings, parse_settings

TIMEOUT = {"timeout": 900}
"""torchrun always passes it."""


def settings(
    endpoint: str = "h1:2379,h2:2379",
    run_id: str = "run7",
    nodes: tuple[int, int] = (1, 4),
    **config: object,
) -> Settings:
    environment = {"ETCDCTL_USER": "u"}
    return parse_settings(endpoint, run_id, nodes, None, TIMEOUT | config, environment, 2)


def test_several_endpoints_and_limits_of_nodes_are_taken() -> None:
    parsed = settings()
    assert parsed.coordinator.endpoints == ("h1:2379", "h2:2379")
    assert parsed.coordinator.access is Access.PLAIN
    assert (parsed.policy.min_nodes, parsed.policy.max_nodes) == (1, 4)
    assert parsed.policy.quorum_timeout_s == 900
    assert parsed.lease_ttl_s == 5.0
    assert parsed.environment == {"ETCDCTL_USER": "u"}


def test_times_are_taken_as_torchrun_and_as_we_name_them() -> None:
    parsed = settings(join_timeout="60", last_call_timeout="2", lease_ttl_s="3.5", grace="90")
    assert parsed.policy.quorum_timeout_s == 60
    assert parsed.policy.last_call_s == 2
    assert parsed.lease_ttl_s == 3.5
    assert parsed.grace_s == 90
    assert settings().grace_s == 30


@pytest.mark.parametrize(
    ("endpoint", "config", "access"),
    [
        ("h:1", {"secret_file": "/s"}, Access.SECRET),
        ("keepstep://h:1", {}, Access.SECRET),
        ("h:1", {"ca_cert": "/ca"}, Access.TLS),
        ("etcds://h:1", {}, Access.TLS),
        ("etcds://h:1", {"ssl_cert": "/c", "ssl_cert_key": "/k"}, Access.TLS),
        ("etcd://h:1", {}, Access.PLAIN),
    ],
)
def test_access_follows_from_the_scheme_or_from_what_authenticates(
    endpoint: str, config: Mapping[str, Any], access: Access
) -> None:
    assert settings(endpoint, **config).coordinator.access is access


def test_files_reach_the_credentials() -> None:
    parsed = settings(ca_cert="/ca", ssl_cert="/c", ssl_cert_key="/k", secret_file="/s")
    assert parsed.coordinator.secret_file == Path("/s")
    assert parsed.environment == {
        "ETCDCTL_USER": "u",
        "ETCDCTL_CACERT": "/ca",
        "ETCDCTL_CERT": "/c",
        "ETCDCTL_KEY": "/k",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"is_host": "1"}, r"--rdzv-conf is_host: .* no such option; it has lease_ttl_s, "),
        ({"lease_ttl_s": "soon"}, "lease_ttl_s=soon: give a number of seconds above 0"),
        ({"join_timeout": "0"}, "join_timeout=0"),
        ({"last_call_timeout": "nan"}, "last_call_timeout=nan"),
        ({"endpoint": ""}, "needs --rdzv-endpoint HOST:PORT"),
        ({"endpoint": "http://h:1"}, "give etcd://HOST:PORT"),
        ({"run_id": "none"}, "give --rdzv-id, a name for this job"),
        ({"nproc": "0"}, "nproc=0: give a whole number of at least 1"),
        ({"parity": "-1"}, "parity=-1: give a whole number of at least 0"),
    ],
)
def test_what_is_unknown_missing_or_invalid_is_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**given)


def test_nodes_with_other_limits_are_no_nodes_of_the_same_job() -> None:
    assert settings().digest == settings("other:1", lease_ttl_s="2").digest
    assert settings().digest != settings(nodes=(1, 5)).digest
    assert settings().digest != settings(parity="0").digest


def test_workers_are_those_of_the_command_line_unless_an_option_says_otherwise() -> None:
    assert settings().workers == 2
    assert settings(nproc="4").workers == 4
    unknown = parse_settings("h:1", "run7", (1, 4), None, TIMEOUT, {}, None)
    assert (unknown.workers, unknown.policy.parity) == (None, 0)
    assert (settings().policy.parity, settings(parity="2").policy.parity) == (1, 2)


def test_notices_of_a_cloud_are_followed_if_asked_for() -> None:
    assert settings().notices == "off"
    assert settings(notices="gcp").notices == "gcp"
    with pytest.raises(UsageError, match="notices=ibm: give one of off, auto, aws, gcp, azure"):
        settings(notices="ibm")
