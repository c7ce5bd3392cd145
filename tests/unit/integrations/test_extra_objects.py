import pytest

from keepstep.elastic.errors import UsageError
from keepstep.integrations.extra_objects import joined_extra


def test_users_objects_never_replace_the_frameworks() -> None:
    assert joined_extra({"scaler": 1}, None) == {"scaler": 1}
    assert joined_extra({"scaler": 1}, {"average": 2}) == {"scaler": 1, "average": 2}
    with pytest.raises(UsageError, match="extra='scaler' is the name of a part of the framework"):
        joined_extra({"scaler": 1}, {"scaler": 2})
