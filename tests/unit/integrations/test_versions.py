import logging

import pytest

from keepstep.integrations.versions import warn_if_untried


def test_version_that_was_not_tried_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "keepstep"):
        warn_if_untried("lightning", "2.6.6", ("2.5", "2.6"))
        assert not caplog.messages
        warn_if_untried("lightning", "2.60.0", ("2.5", "2.6"))
    (warning,) = caplog.messages
    assert "was tried with lightning 2.5, 2.6, and this is 2.60.0" in warning
