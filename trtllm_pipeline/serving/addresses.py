"""Who can reach a server by the address it listens on. Imported to plan: nothing of a server is."""

from __future__ import annotations

import ipaddress


def reachable(host: str) -> str | None:
    """A warning for an address that others reach as well; None for this machine's own."""
    try:
        own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = host == "localhost"
    if own:
        return None
    return (
        f"the server listens on {host}: anyone who can reach it can send prompts, see its models and read its "
        "metrics, without login or encryption; docs/security.md shows how to add both with a proxy"
    )
