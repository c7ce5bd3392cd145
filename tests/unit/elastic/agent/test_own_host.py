"""Claims about the address under which a node tells others to reach it."""

import pytest

from keepstep.elastic.agent.own_host import own_host
from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Access, Address


def test_member_of_the_coordinator_that_has_lost_its_name_does_not_matter() -> None:
    address = Address(("no-such-host.invalid:1", "127.0.0.1:1"), Access.SECRET)
    assert own_host(address, None) == "127.0.0.1"
    with pytest.raises(UsageError, match="give --local-addr"):
        own_host(Address(("no-such-host.invalid:1",), Access.SECRET), None)


def test_address_towards_another_host_is_better_than_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node may resolve its own name, the first one here, to loopback."""

    class Probe:
        def __init__(self, *_: object) -> None:
            self._target = ""

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, target: tuple[str, int]) -> None:
            self._target = target[0]

        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1" if self._target.startswith("127.") else "192.0.2.1", 1)

    monkeypatch.setattr("keepstep.elastic.agent.own_host.socket.socket", Probe)
    address = Address(("127.0.1.1:1", "192.0.2.2:1"), Access.SECRET)
    assert own_host(address, None) == "192.0.2.1"
