"""Claims about coordinator URLs."""

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import parse_address


@pytest.mark.parametrize(
    ("text", "host", "endpoint"),
    [
        ("etcd://[2001:db8::5]:24379", "2001:db8::5", "[2001:db8::5]:24379"),
        ("[::1]", "::1", "[::1]:2379"),
        ("node7", "node7", "node7:2379"),
    ],
)
def test_address_of_ipv6_has_its_host_without_brackets(text: str, host: str, endpoint: str) -> None:
    address = parse_address(text)
    assert address.hosts == (host,)
    assert address.endpoints == (endpoint,)


@pytest.mark.parametrize("text", ["::1", "2001:db8::5:24379", "etcd://fe80::1"])
def test_address_of_ipv6_without_brackets_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match=r"in brackets, such as \["):
        parse_address(text)
