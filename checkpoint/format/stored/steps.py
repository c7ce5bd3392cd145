"""Lists the committed checkpoints at a URL: only a directory with a manifest is a checkpoint."""

from __future__ import annotations

from keepstep.checkpoint.errors import CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored.object_names import MANIFEST, NEWEST, StoredStep
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.stored_json import decode
from keepstep.checkpoint.format.stored.urls import parse_url


def list_steps(storage: Storage) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints in a storage, newest first."""
    return _steps_after(storage, "")


def newest(storage: Storage) -> StoredStep | None:
    """Return the newest committed checkpoint in a storage, or None if there is none.

    Its cost does not grow with what else is stored there, as that of `list_steps` does: writers
    note what they have committed, and only what comes after it is listed.
    """
    noted = noted_newest(storage)
    if noted is not None:
        later = _steps_after(storage, noted.directory)
        if later:
            return later[0]
        if storage.exists(f"{noted.directory}/{MANIFEST}"):
            return noted
    return next(iter(_steps_after(storage, "")), None)


def is_committed(storage: Storage, stored: StoredStep) -> bool:
    """Return whether a storage has this checkpoint: it has a manifest."""
    return storage.exists(f"{stored.directory}/{MANIFEST}")


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


def choose(storage: Storage, step: int | None, generation: int | None) -> StoredStep:
    """Return the newest checkpoint of this step and generation, if these are given.

    Raises:
        CheckpointMissing: there is none.
    """
    if step is not None and generation is not None:
        try:
            return StoredStep(step, generation)
        except ValueError:
            raise missing(storage, step) from None
    if step is None and generation is None:
        chosen = newest(storage)
    else:
        matching = (
            stored
            for stored in list_steps(storage)
            if step in (None, stored.step) and generation in (None, stored.generation)
        )
        chosen = next(matching, None)
    if chosen is None:
        raise missing(storage, step)
    return chosen


def missing(storage: Storage, step: int | None) -> CheckpointMissing:
    """Return the error that says which checkpoints there are instead."""
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    present = ", ".join(str(stored.step) for stored in list_steps(storage)[:8])
    if not present:
        present = "none"
        # Of files alone: an object store may list millions of objects that have nothing to do here.
        root = parse_url(storage.url).local_path
        name = next((path.name for path in root.iterdir()), "") if root and root.is_dir() else ""
        if name:
            present += f"; {name} is there, and no complete checkpoint of a known format"
    return CheckpointMissing(f"{storage.url}: there is no {wanted} (steps there: {present})")
