"""Tests who uses a device."""

import pytest

from keepstep.monitor.node.gpu import users_of_devices


@pytest.mark.parametrize(
    ("pids", "visible", "users"),
    [
        pytest.param({0: {10}, 1: {99}}, {10, 99}, {0: (0,), 1: ()}, id="one is another job's"),
        pytest.param({0: {10, 11}}, {10, 11}, {0: (0, 1)}, id="two ranks share it"),
        pytest.param({0: set()}, set(), {0: ()}, id="nobody"),
        pytest.param({0: {99}}, {99}, {0: ()}, id="only another job"),
        pytest.param({0: {99}}, set(), {}, id="a process outside of this container"),
    ],
)
def test_users_of_devices(
    pids: dict[int, set[int]], visible: set[int], users: dict[int, tuple[int, ...]]
) -> None:
    used = {index: frozenset(device_pids) for index, device_pids in pids.items()}
    assert users_of_devices(used, {0: 10, 1: 11}, visible) == users
