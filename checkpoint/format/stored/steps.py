"""Lists the committed checkpoints at a URL: only a directory with a manifest is a checkpoint."""

from __future__ import annotations

from keepstep.checkpoint.errors import CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored.object_names import MANIFEST, NEWEST, StoredStep
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.stored_json import decode


def list_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first."""
    return _steps_after(open_storage(url), "")


def newest(url: str) -> StoredStep | None:
    """Return the newest committed checkpoint at a URL, or None if there is none.

    Its cost does not grow with what else is stored there, as that of `list_steps` does: writers
    note what they have committed, and only what comes after it is listed.
    """
    return newest_in(open_storage(url))


def newest_in(storage: Storage) -> StoredStep | None:
    """Return the newest committed checkpoint in a storage, as `newest` does."""
    noted = noted_newest(storage)
    if noted is not None:
        later = _steps_after(storage, noted.directory)
        if later:
            return later[0]
        if storage.exists(f"{noted.directory}/{MANIFEST}"):
            return noted
    return next(iter(_steps_after(storage, "")), None)


def is_committed(url: str, stored: StoredStep) -> bool:
    """Return whether there is this checkpoint at a URL: it has a manifest."""
    return open_storage(url).exists(f"{stored.directory}/{MANIFEST}")


def _steps_after(storage: Storage, directory: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints whose directories come after this name, newest first."""
    parsed = map(StoredStep.parse, storage.directories_with(MANIFEST, after=directory))
    steps = (step for step in parsed if step is not None)
    return tuple(sorted(steps, key=lambda s: (s.step, s.generation), reverse=True))


def noted_newest(storage: Storage) -> StoredStep | None:
    """Return the checkpoint that was noted as the newest; a later one may have been committed."""
    try:
        content = decode(storage.read(NEWEST), NEWEST)
    except CheckpointError:
        return None
    directory = content.get("directory") if isinstance(content, dict) else None
    return StoredStep.parse(directory) if isinstance(directory, str) else None


def choose(url: str, step: int | None, generation: int | None) -> StoredStep:
    """Return the newest checkpoint of this step and generation, if these are given.

    Raises:
        CheckpointMissing: there is none.
    """
    if step is not None and generation is not None:
        try:
            return StoredStep(step, generation)
        except ValueError:
            raise missing(url, step) from None
    if step is None and generation is None:
        chosen = newest(url)
    else:
        matching = (
            stored
            for stored in list_steps(url)
            if step in (None, stored.step) and generation in (None, stored.generation)
        )
        chosen = next(matching, None)
    if chosen is None:
        raise missing(url, step)
    return chosen


def missing(url: str, step: int | None) -> CheckpointMissing:
    """Return the error that says which checkpoints there are instead."""
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    present = ", ".join(str(stored.step) for stored in list_steps(url)[:8]) or "none"
    return CheckpointMissing(f"{url}: there is no {wanted} (steps there: {present})")
