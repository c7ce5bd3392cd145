"""Who may talk to a monitor: whoever knows the job's secret.

The secret itself never travels: a bearer token is derived from it, one per purpose, so that a token that leaks from a scrape
configuration opens nothing but the monitor. Traffic is not encrypted: it belongs on the cluster's own network.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

MONITOR = "monitor"
DOCTOR = "doctor"


def bearer_token(secret: bytes, purpose: str = MONITOR) -> str:
    """Return the token that opens one purpose's door: HMAC-SHA256 of the purpose under the job's secret, in hexadecimal."""
    return hmac.new(secret, b"keepstep bearer " + purpose.encode(), hashlib.sha256).hexdigest()


def is_authorized(header: str | None, secret: bytes, purpose: str = MONITOR) -> bool:
    """Return whether an `Authorization` header carries the token. Takes as long for a near miss as for a far one."""
    scheme, _, token = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        token.strip().encode("utf-8", "replace"), bearer_token(secret, purpose).encode()
    )


def is_loopback(host: str) -> bool:
    """Return whether a host, as it stands in an address or a `Host` header, is this machine's loopback.

    Only literal addresses and `localhost` count: a name that resolves to loopback today may be somebody's trick (DNS rebinding).
    """
    bare = host.strip()
    if bare.startswith("["):
        bare = bare[1:].partition("]")[0]
    elif bare.count(":") == 1:
        bare = bare.partition(":")[0]
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
