"""Claims about how a leak of the GPU's memory is recognized."""

from ops.gpu.rebuilding_groups import fall


def test_memory_that_others_free_is_no_leak() -> None:
    assert fall([100, 500, 480]) == 0


def test_memory_that_is_not_given_back_is_one() -> None:
    assert fall([100, 90, 80]) == 20
    assert fall([100, 90, 500]) == 10
