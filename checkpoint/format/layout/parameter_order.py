"""Represents the order in which optimizers got their parameters, if it is known. Pure.

Other tools' files number an optimizer's parameters through its groups. Shapes do not identify them:
a model has many parameters of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Groups = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class LiveOrders:
    """The optimizers to fill: names of parameters by group, by the optimizer's name.

    The script that creates them is the one that was stopped, or creates them in the same way.
    """

    groups: Mapping[str, Groups]

    def order_of(self, name: str, number: int, count: int) -> Groups | None:
        """Return the groups of the optimizer that an entry of a file belongs to; None if unknown.

        Args:
            name: the entry's name.
            number: the optimizer's number in the file.
            count: the file's number of optimizers.
        """
        if name in self.groups:
            return self.groups[name]
        if len(self.groups) == count:
            return list(self.groups.values())[number]
        return None


ParameterNames = Sequence[str] | LiveOrders | None
"""Names in the order of the groups that a caller gives, or the optimizers to fill; None for
neither."""
