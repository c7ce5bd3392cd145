"""Claims about the environment variables that workers get for NCCL."""

from keepstep.elastic.agent.supervisor import worker_environment
from keepstep.elastic.worker.device_environment import DEVICE_VARIABLES, set_device_variables
from keepstep.elastic.worker.messages import Assignment


def test_every_variable_is_set_and_what_the_user_has_set_stays() -> None:
    environment = {"HOME": "/home", "NCCL_NVLS_ENABLE": "1"}
    set_device_variables(environment)
    expected = {it.name: it.value for it in DEVICE_VARIABLES}
    assert environment == {**expected, "HOME": "/home", "NCCL_NVLS_ENABLE": "1"}


def test_agent_sets_none_for_scripts_that_may_not_join() -> None:
    """Nobody else than PyTorch's watchdog would end their hung collectives."""
    assert not worker_environment({}, 2).keys() & {it.name for it in DEVICE_VARIABLES}


def test_every_variable_has_a_name_of_its_own_and_a_reason() -> None:
    assert len({it.name for it in DEVICE_VARIABLES}) == len(DEVICE_VARIABLES)
    assert all(it.reason for it in DEVICE_VARIABLES)


def test_a_new_place_changes_values_and_adds_no_name() -> None:
    """A new name may move the environment that threads of PyTorch read at that moment."""
    fields = {
        "job": "job",
        "node": "a",
        "rank": 0,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "node_count": 1,
        "world_size": 1,
        "generation": 1,
        "store_host": "h",
        "store_port": 1,
        "server": "unix:/none",
        "secret": "",
        "max_restarts": 3,
    }
    names = set(Assignment(**fields).environment())
    later = Assignment(**{**fields, "generation": 2, "rank": 7, "node": "b", "world_size": 9})
    assert set(later.environment()) == names
