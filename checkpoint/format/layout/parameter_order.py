"""The order in which optimizers were given their parameters, as far as somebody knows it. Pure.

Other tools' files number an optimizer's parameters through its groups. Shapes do not prove which is
which: a model has many parameters of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Groups = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class LiveOrders:
    """The optimizers that are to be filled: names of parameters by group, by the optimizer's name.

    The script that makes them is the one that was stopped, or does as that did.
    """

    groups: Mapping[str, Groups]

    def order_of(self, name: str, number: int, count: int) -> Groups | None:
        """Return the groups of the optimizer that an entry of a file is of; None if unknown.

        Args:
            name: the entry's name.
            number: which of the file's optimizers it is.
            count: how many the file has.
        """
        if name in self.groups:
            return self.groups[name]
        if len(self.groups) == count:
            return list(self.groups.values())[number]
        return None


ParameterNames = Sequence[str] | LiveOrders | None
"""Names in the order of the groups that a caller gives, or the optimizers to fill; None for
neither."""
