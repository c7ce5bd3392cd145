"""Decides a leader's actions while the manifest of a checkpoint is written. Pure.

Storage may take long for a manifest, or hang. Meanwhile the leader goes on: a generation in which
something has failed is closed at once. Only the next one waits, for a while, so that a checkpoint
which storage has committed is recorded as such before the request to store it is dropped.

Invariant: at most one manifest is written at a time, and its outcome is recorded before anything
    else is decided, as long as the request stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep.elastic.rendezvous import checkpoint_schedule
from keepstep.elastic.rendezvous.actions import CancelPersist, Open, Publish
from keepstep.elastic.rendezvous.decision import Decision
from keepstep.elastic.rendezvous.view import View

OPENING_WAITS_S = 10.0
"""Seconds that the next generation waits for a manifest; workers have drained by then."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A manifest that this leader has written.

    Attributes:
        action: the decision to publish.
        failure: why it was not written; "" once it is; None while it is being written.
        delays_since_s: since when the next generation waits for it, in monotonic seconds.
    """

    action: Publish
    failure: str | None = None
    delays_since_s: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether it is still being written."""
        return self.failure is None

    def stands(self, view: View) -> bool:
        """Whether the request that it answers does."""
        return view.revisions.get("persist", 0) == self.action.revision


def conclude(publication: Publication | None, view: View) -> Publish | CancelPersist | None:
    """Return the action that records a manifest's outcome; None while there is none."""
    if publication is None or publication.is_under_way or not publication.stands(view):
        return None
    if publication.failure:
        return checkpoint_schedule.cancel_persist(
            view, publication.action.request, publication.failure
        )
    return publication.action


def follow(
    publication: Publication | None, decision: Decision, view: View, now_s: float
) -> tuple[Publication | None, Decision]:
    """Return the manifest to be written, and the part of a decision that is performed meanwhile.

    Args:
        publication: the last result of `follow`, with its outcome.
        decision: the leader's decision on `view`.
        view: the coordinator's content.
        now_s: monotonic seconds.
    """
    if publication is not None and not publication.stands(view):
        publication = None
    match decision.action:
        case Publish() as action:
            # The same decision again, while it is under way.
            return publication or Publication(action), replace(decision, action=None)
        case CancelPersist() if publication is not None:
            # A holder that had written its part is gone: the manifest decides.
            return publication, replace(decision, action=None)
        case Open() if publication is not None:
            since_s = now_s if publication.delays_since_s is None else publication.delays_since_s
            until_s = since_s + OPENING_WAITS_S
            publication = replace(publication, delays_since_s=since_s)
            if now_s < until_s:
                return publication, replace(decision, action=None, again_at_s=until_s)
            url = publication.action.request.url
            failure = (
                f"{url} had not taken the manifest when the next generation had waited for it "
                f"for {OPENING_WAITS_S:.0f} s"
            )
            publication = replace(publication, failure=failure)
            return publication, replace(decision, action=conclude(publication, view))
    return publication, decision
