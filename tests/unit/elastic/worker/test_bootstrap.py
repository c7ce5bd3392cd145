"""Claims about what a worker shows of an exception of its script."""

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.elastic.worker.bootstrap import _script_frames


def test_error_that_explains_itself_is_shown_with_the_line_of_the_script_only() -> None:
    with pytest.raises(CheckpointError) as seen:
        open_storage("ftp://host/x")
    text = _script_frames(seen.value)
    assert "test_bootstrap.py" in text
    assert "storage.py" not in text
    assert text.endswith("ftp:// is not supported; use a path, file://, s3:// or gs://\n")


def test_other_error_is_shown_with_all_frames() -> None:
    with pytest.raises(AttributeError) as seen:
        open_storage(7)  # type: ignore[arg-type]
    assert "storage.py" in _script_frames(seen.value)
