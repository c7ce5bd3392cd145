"""The elastic runtime: rendezvous, agents, workers, and the training loop's `join`.

`keepstep` itself exports the names that a training script uses.
"""

from __future__ import annotations

if __name__ != "keepstep.elastic":
    raise ImportError(f"{__name__} is a folder of keepstep's source tree; import keepstep.elastic")
