"""Renews leases over one stream to a member of etcd.

The stream stays open between renewals: a new one for each would cost the agent and the member
several times as much as the renewal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from keepstep.elastic.store.etcd_messages import rpc


class RenewalStream:
    """Renews leases, one at a time. `close` ends the stream; so does a renewal that fails.

    Args:
        begin: begins a call of etcd's `LeaseKeepAlive`.
        answer_s: seconds in which the member must answer.
    """

    def __init__(self, begin: Callable[[], Any], answer_s: float) -> None:
        self._call = begin()
        self._answer_s = answer_s
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        """Whether a renewal needs another stream: the member may have ended this one as well."""
        return self._is_closed or self._call.done()

    async def renew(self, lease: int) -> Any:
        """Renew a lease; return etcd's answer, whose `TTL` is 0 if the lease has ended.

        Raises:
            grpc.aio.AioRpcError: the member did not answer in time, or refused.
        """
        is_answered = False
        try:
            # Requests that are iterated over are sent by a task, which can outlive the call.
            async with asyncio.timeout(self._answer_s):
                await self._call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                answer = await self._call.read()
            is_answered = answer is not grpc.aio.EOF
        except TimeoutError:
            raise _error(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer for {self._answer_s:.0f} s"
            ) from None
        finally:
            if not is_answered:
                # A late answer would be taken for the answer to the next request.
                self.close()
        if not is_answered:
            raise _error(grpc.StatusCode.UNAVAILABLE, "the stream ended")
        return answer

    def close(self) -> None:
        """End the stream."""
        self._is_closed = True
        self._call.cancel()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details)
