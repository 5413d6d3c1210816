"""Which addresses a download may connect to: globally reachable unicast, after unwrapping what carries an IPv4 one.

Pure. Used by `policy.py` for literal hosts and by `transport.py` for every address that a name resolves to.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Cloud metadata and platform services; some are globally routable, so no general rule covers them.
METADATA = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
    )
)

# Unicast space that is not for reaching a host on the internet: the IANA special-purpose registry, IPv4.
_NOT_GLOBAL_V4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
    )
)
_FIRST_MULTICAST_V4 = IPv4Address("224.0.0.0")

# IPv6 is the other way round: only what IANA has given out for global unicast, less the special blocks inside it.
_GLOBAL_V6 = IPv6Network("2000::/3")
_NOT_GLOBAL_V6 = tuple(
    IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)

_MAPPED = IPv6Network("::ffff:0:0/96")
_TRANSLATED = IPv6Network("::ffff:0:0:0/96")
_COMPATIBLE = IPv6Network("::/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")


def embedded_ipv4(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that traffic to `address` may end at, by its form; empty for an ordinary one."""
    value = int(address)
    if any(address in network for network in (_MAPPED, _TRANSLATED, _COMPATIBLE, _NAT64)):
        return (IPv4Address(value & 0xFFFFFFFF),)
    if address in _6TO4:
        return (IPv4Address((value >> 80) & 0xFFFFFFFF),)
    if address in _TEREDO:
        return (IPv4Address((value >> 64) & 0xFFFFFFFF), IPv4Address(~value & 0xFFFFFFFF))
    return ()


def is_allowed(address: Address, networks: Sequence[Network] = ()) -> bool:
    """Whether a download may connect there: global unicast or inside one of `networks`; metadata services only where
    `networks` has their very address."""
    endpoints = _endpoints(address)
    if any(endpoint in METADATA for endpoint in endpoints):
        return all(_is_named(endpoint, networks) for endpoint in endpoints)
    if any(_is_inside(endpoint, networks) for endpoint in (address, *endpoints[:1])):
        return True
    return all(_is_global(endpoint) for endpoint in endpoints)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    return tuple(ip_network(text) for text in texts)


def _endpoints(address: Address) -> tuple[Address, ...]:
    """Where the traffic may end. Mapped and NAT64 forms stand for their IPv4 address; the old tunnels end at themselves
    too, and are not global."""
    if isinstance(address, IPv4Address):
        return (address,)
    inner = embedded_ipv4(address)
    if address in _MAPPED or address in _NAT64:
        return inner
    return (*inner, address)


def _is_global(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address < _FIRST_MULTICAST_V4 and not any(address in network for network in _NOT_GLOBAL_V4)
    return address in _GLOBAL_V6 and not any(address in network for network in _NOT_GLOBAL_V6)


def _is_inside(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _is_named(address: Address, networks: Sequence[Network]) -> bool:
    return any(network.num_addresses == 1 and address == network.network_address for network in networks)
