"""Compares the names in a checkpoint with those that a state takes, in both directions.

Pure. A state asks for top-level names: `model`, `optim` where it has an optimizer, and its own.
Under each of these, everything in the checkpoint is to be taken, and everything in the state is to
be filled. The checkpoint's other names are left alone, and can be listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import Tie, slot_key, stored_parameter, tie_of
from keepstep.checkpoint.format.layout.documents import GROUPS, SCALARS, TIED, VALUES, WITHOUT_SLOTS
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX, parameter_of
from keepstep.checkpoint.format.layout.source import Source

MODEL, OPTIMIZER = MODEL_PREFIX.rstrip("/"), OPTIMIZER_PREFIX.rstrip("/")

_NAMES_OF_PARAMETERS = "param_names"
"""Names that PyTorch keeps in a group in addition to hyperparameters, if an optimizer got names."""

_MOST_NAMES = 4
"""Number of names in a line, which counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The names that a state asks a checkpoint for.

    Attributes:
        names: top-level names; a name may have slashes.
        parameters: names of the parameters that this rank's optimizers update; None without an
            optimizer, or where its groups and numbers are not compared.
        elsewhere: names that other ranks take, such as other stages of a pipeline: see
            `taken_names`.
        left_out: requested names in the checkpoint that the source does not carry, each with the
            reason.
    """

    names: frozenset[str]
    parameters: frozenset[str] | None = None
    elsewhere: Collection[str] = ()
    left_out: Sequence[tuple[str, str]] = ()

    def covers(self, key: str) -> bool:
        """Return whether a key is a requested name, or lies under one."""
        return key in self.names or any(
            key[:end] in self.names for end, letter in enumerate(key) if letter == "/"
        )


ONLY_MODEL = Requested(names=frozenset({MODEL}))


def shortened(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Return the first names in words, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{', '.join(listed[:most])}{more}"


def taken_names(
    filled: Iterable[str], documents: Mapping[str, Json], requested: Requested
) -> set[str]:
    """Return the names that a rank takes; other ranks need not take them.

    Args:
        filled: keys of its tensors.
        documents: its documents.
        requested: the names that it asks for.
    """
    tied: Mapping[str, Json] = documents.get(TIED) or {}
    updated = {*(requested.parameters or ())}
    updated.update(
        alias
        for alias in tied
        if (tie := tie_of(tied, f"{MODEL_PREFIX}{alias}")) and _name_of(tie) in updated
    )
    return {
        *filled,
        *(f"{MODEL_PREFIX}{alias}" for alias in tied),
        *(documents.get(VALUES) or ()),
        *(f"{OPTIMIZER_PREFIX}{name}" for name in updated),
    }


def differences(
    filled: Mapping[str, str | None],
    documents: Mapping[str, Json],
    source: Source,
    requested: Requested,
) -> list[str]:
    """Return the source's names that a state leaves, and the state's unfilled names, in words.

    Args:
        filled: the keys of the state's tensors, each with the key of the source's tensor that fills
            it; None if none does.
        documents: the state's documents.
        source: the source to read.
        requested: the names that the state asks for.

    Returns:
        One line for each kind of difference.
    """
    compared = _Comparison(filled, documents, source, requested)
    return [f"{shortened(names)}: {reason}" for names, reason in compared.lines() if names]


def leaves_anything(
    filled: Iterable[str], documents: Mapping[str, Json], source: Source, requested: Requested
) -> bool:
    """Return whether a rank leaves anything that it asks for; then other ranks may take it.

    Args:
        filled: keys of its tensors.
        documents: its documents.
        source: the source to read.
        requested: the names that it asks for.
    """
    compared = _Comparison({key: key for key in filled}, documents, source, requested)
    return bool(compared.left_tensors() or compared.left_values() or compared.left_parameters())


def has_optimizer_state(source: Source) -> bool:
    """Return whether a source has anything of an optimizer."""
    return bool(
        source.documents.get(GROUPS)
        or source.documents.get(SCALARS)
        or any(key.startswith(OPTIMIZER_PREFIX) for key in source.known_keys())
    )


def not_requested(source: Source, requested: Requested) -> str:
    """Return a source's other names, in words: each top-level name with a count; "" for none."""
    counts: dict[str, list[int]] = {}
    for number, keys in enumerate((source.tensors, source.documents.get(VALUES) or ())):
        for key in keys:
            if not requested.covers(key):
                counts.setdefault(key.partition("/")[0], [0, 0])[number] += 1
    return shortened(
        f"{name} ({' and '.join(_counted(counted))})" for name, counted in sorted(counts.items())
    )


def _counted(counts: Iterable[int]) -> Iterator[str]:
    for count, noun in zip(counts, ("tensor", "value"), strict=True):
        if count:
            yield f"{count} {noun}{'s' if count > 1 else ''}"


class _Comparison:
    """Holds the names that `differences` compares, and their lookups."""

    def __init__(
        self,
        filled: Mapping[str, str | None],
        documents: Mapping[str, Json],
        source: Source,
        requested: Requested,
    ) -> None:
        self._filled = filled
        self._documents = documents
        self._source = source
        self._requested = requested
        self._elsewhere = requested.elsewhere
        self._taken = {*filled, *(key for key in filled.values() if key is not None)}
        self._tied: Mapping[str, Json] = documents.get(TIED) or {}

    def lines(self) -> Iterator[tuple[list[str], str]]:
        """Yield names with the reason why they differ."""
        # The reason for leaving a name out says more than that it is missing.
        reasons = dict.fromkeys(reason for _, reason in self._requested.left_out)
        for reason in reasons:
            yield (
                [name for name, why in self._requested.left_out if why == reason],
                (f"left out of the source, because {reason}"),
            )
        yield (
            [key for key, origin in self._filled.items() if origin is None],
            ("missing in the source"),
        )
        left = self.left_tensors()
        for top, reason in (
            (MODEL, "in the source, but not in the model"),
            (OPTIMIZER, "in the source, but of no parameter of the state's optimizers"),
            (None, "in the source, but not in the state"),
        ):
            yield [key for key in left if _part_of(key) == top], reason
        own_values = self._documents.get(VALUES) or ()
        stored_values = self._stored_values()
        yield (
            [name for name in own_values if name not in stored_values],
            ("a value that is missing in the source"),
        )
        yield self.left_values(), "a value in the source, but not in the state"
        if self._requested.parameters is not None:
            yield from self._optimizers({parameter_of(key) for key in left})

    def left_tensors(self) -> list[str]:
        """Return the tensors of the source that the state asks for, and no rank takes."""
        # Tied tensors are stored once in the source, and are in the model under each of their
        # names.
        ties = self._source.documents.get(TIED) if MODEL in self._requested.names else None
        aliases = (f"{MODEL_PREFIX}{alias}" for alias in ties or ())
        keys = dict.fromkeys([*self._source.known_keys(), *aliases])
        return [key for key in keys if not self._is_taken(key)]

    def left_values(self) -> list[str]:
        """Return the values of the source that the state asks for, and no rank takes."""
        taken = {*(self._documents.get(VALUES) or ()), *self._elsewhere}
        stored = self._stored_values()
        return [name for name in stored if self._requested.covers(name) and name not in taken]

    def _stored_values(self) -> Mapping[str, Json]:
        if not self._documents.get(VALUES) and self._requested.names <= {MODEL, OPTIMIZER}:
            # A job's state has none: then shards that nobody else needs are not read for them.
            return {}
        return self._source.documents.get(VALUES) or {}

    def left_parameters(self) -> list[str]:
        """Return the parameters of the source's optimizers that no optimizer here has.

        A parameter that was never updated has only its group's hyperparameters. Where others take
        the same ones, nothing is left: frozen parameters may be in a group or in none.
        """
        if self._requested.parameters is None:
            return []
        own = self._own_parameters()
        ties = (self._tie(name, own) for name in own if name not in self._options)
        for_own = {*own, *(_name_of(tie) for tie in ties if tie)}
        left = [
            name
            for name in sorted(self._named)
            if name not in for_own
            and self._first(name) not in for_own
            and f"{OPTIMIZER_PREFIX}{name}" not in self._elsewhere
        ]
        if not left:
            return []
        unique = {id(options): options for options in self._options.values()}
        taken = {id(options) for name, options in self._options.items() if name not in left}
        taken_options = [unique[number] for number in taken]
        return [
            name
            for name in left
            if name in self._updated or self._options[name] not in taken_options
        ]

    @cached_property
    def _options(self) -> Mapping[str, Mapping[str, Json]]:
        """The hyperparameters in the source, by the names of parameters."""
        groups = self._source.documents.get(GROUPS) or ()
        return {name: group["options"] for group in groups for name in group["parameters"]}

    @cached_property
    def _updated(self) -> Collection[str]:
        """The parameters whose slots or numbers the source has."""
        scalars: Mapping[str, Json] = self._source.documents.get(SCALARS) or {}
        keys = (key for key in self._source.known_keys() if key.startswith(OPTIMIZER_PREFIX))
        return {
            *(path.rpartition("/")[0] for path in scalars),
            *(parameter_of(key).removeprefix(MODEL_PREFIX) for key in keys),
        }

    @cached_property
    def _named(self) -> Collection[str]:
        """The parameters for which the source has any optimizer state."""
        return {*self._options, *self._updated}

    def _is_taken(self, key: str) -> bool:
        if key in self._taken or key in self._elsewhere or not self._requested.covers(key):
            return True
        if not key.startswith((MODEL_PREFIX, OPTIMIZER_PREFIX)):
            return False
        is_slot = key.startswith(OPTIMIZER_PREFIX)
        name = parameter_of(key).removeprefix(MODEL_PREFIX)
        first = self._first(name)
        if first is not None:
            # Other tools, and models that do not tie them, have a tensor under each name. Their
            # values are compared elsewhere.
            parameter = f"{MODEL_PREFIX}{first}"
            slot = key.rpartition("/")[2]
            if (slot_key(parameter, slot) if is_slot else parameter) in self._taken:
                return True
            name = first
        # A rank makes all slots that the source has of the parameters that it updates.
        return (
            is_slot
            and name not in (self._requested.parameters or ())
            and f"{OPTIMIZER_PREFIX}{name}" in self._elsewhere
        )

    def _optimizers(self, reported: Collection[str]) -> Iterator[tuple[list[str], str]]:
        """Yield the differences of groups and numbers.

        Args:
            reported: keys of parameters whose slots were already reported as left.
        """
        own = self._own_parameters()
        if own and not self._named:
            yield (
                [OPTIMIZER],
                "the source has no optimizer state; to load the rest, pass no optimizer",
            )
            return
        yield (
            [f"{OPTIMIZER_PREFIX}{name}" for name in self._lacking_parameters()],
            "a parameter without optimizer state in the source",
        )
        yield (
            [
                f"{OPTIMIZER_PREFIX}{name}"
                for name in self.left_parameters()
                if f"{MODEL_PREFIX}{name}" not in reported
            ],
            "a parameter in the source, but of no optimizer of the state",
        )
        yield from self._numbers(self._source.documents.get(SCALARS) or {})
        yield from self._hyperparameters(self._options)

    def _lacking_parameters(self) -> Iterator[str]:
        """Yield the parameters of the state's optimizers that the source does not have.

        A parameter that never has slots needs only its group's hyperparameters, which may be those
        of others in the group.
        """
        own = self._own_parameters()
        without_slots = frozenset(self._documents.get(WITHOUT_SLOTS) or ())
        for group in self._documents.get(GROUPS) or ():
            members: list[str] = group["parameters"]
            lacking = [
                name
                for name in members
                if name not in self._named
                and ((tie := self._tie(name, own)) is None or _name_of(tie) not in self._named)
            ]
            is_known = len(lacking) < len(members)
            yield from (name for name in lacking if not (is_known and name in without_slots))

    def _own_parameters(self) -> list[str]:
        groups: list[Mapping[str, Json]] = self._documents.get(GROUPS) or []
        return [name for group in groups for name in group["parameters"]]

    def _tie(self, name: str, own: Collection[str]) -> Tie | None:
        return stored_parameter(self._source.documents.get(TIED), name, own)

    def _numbers(self, stored: Mapping[str, Json]) -> Iterator[tuple[list[str], str]]:
        """Yield slots that are numbers here and not there, and those of tied names that differ."""
        own: Mapping[str, Json] = self._documents.get(SCALARS) or {}
        yield (
            [
                f"{OPTIMIZER_PREFIX}{path}"
                for path in own
                if path not in stored
                # An annotation of a tensor.
                and f"{OPTIMIZER_PREFIX}{path}" not in self._filled
                and not self._has_number(path, stored)
            ],
            "missing in the source",
        )
        members = frozenset(self._own_parameters())
        for path, value in stored.items():
            name, _, slot = path.rpartition("/")
            first = None if name in members else self._first(name)
            if first is not None and stored.get(f"{first}/{slot}", value) != value:
                yield (
                    [f"{OPTIMIZER_PREFIX}{path}"],
                    (f"differs from that of {first}, to which the model ties {name}"),
                )

    def _has_number(self, path: str, stored: Mapping[str, Json]) -> bool:
        name, _, slot = path.rpartition("/")
        tie = self._tie(name, self._own_parameters())
        return tie is not None and f"{_name_of(tie)}/{slot}" in stored

    def _hyperparameters(
        self, stored: Mapping[str, Mapping[str, Json]]
    ) -> Iterator[tuple[list[str], str]]:
        """Yield the hyperparameters that the source lacks, and those of tied names that differ.

        A switch that the source lacks stays as it is: later releases of PyTorch add some.
        """
        lacking: dict[str, None] = {}
        for group in self._documents.get(GROUPS) or ():
            known = next((stored[name] for name in group["parameters"] if name in stored), None)
            if known is not None:
                lacking |= dict.fromkeys(
                    f"{OPTIMIZER}: {option}"
                    for option, value in group["options"].items()
                    if option not in known
                    and option != _NAMES_OF_PARAMETERS
                    and not isinstance(value, bool | None)
                )
        yield list(lacking), "a hyperparameter that is missing in the source"
        members = frozenset(self._own_parameters())
        for name, options in stored.items():
            first = None if name in members else self._first(name)
            if first is not None and stored.get(first, options) != options:
                yield (
                    [f"{OPTIMIZER_PREFIX}{name}"],
                    (f"has other hyperparameters than {first}, to which the model ties it"),
                )

    def _first(self, name: str) -> str | None:
        """Return the parameter that the state ties a name to; None if it does not."""
        tie = tie_of(self._tied, f"{MODEL_PREFIX}{name}")
        return None if tie is None else _name_of(tie)


def _name_of(tie: Tie) -> str:
    return tie.key.removeprefix(MODEL_PREFIX)


def _part_of(key: str) -> str | None:
    """Return the top-level part of a key, `model` or `optim`; None for the caller's own names."""
    top = key.partition("/")[0]
    return top if top in (MODEL, OPTIMIZER) else None
