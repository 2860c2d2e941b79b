"""Which addresses a webhook may go to: by default public ones alone, or strangers could have us ask our own network.

After IANA's registries of special-purpose addresses (RFC 6890 and its updates). An address that carries another one in
it (IPv4-mapped, NAT64, 6to4, Teredo) is not a public one either: it would reach what it carries.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Final

Address = IPv4Address | IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Table = tuple[tuple[_Network, str], ...]


def _table(rows: Iterable[tuple[str, str]]) -> _Table:
    return tuple((ipaddress.ip_network(network), what) for network, what in rows)


#: No webhook goes there, whatever the settings say.
_NEVER: Final = _table(
    (
        ("0.0.0.0/8", "reserved"),
        ("169.254.0.0/16", "link-local"),  # the metadata of most clouds too
        ("100.100.100.200/32", "cloud metadata"),
        ("168.63.129.16/32", "cloud metadata"),
        ("192.0.0.192/32", "cloud metadata"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("fe80::/10", "link-local"),
        ("ff00::/8", "multicast"),
        ("fd00:ec2::/32", "cloud metadata"),
        ("fd20:ce::254/128", "cloud metadata"),
    )
)
#: Only where private addresses are allowed.
_NOT_PUBLIC: Final = _table(
    (
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "IPv4-mapped"),
        ("::ffff:0:0:0/96", "IPv4-translated"),
        ("64:ff9b::/96", "NAT64"),
        ("64:ff9b:1::/48", "NAT64"),
        ("2001::/32", "Teredo"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "documentation"),
        ("fc00::/7", "private"),
    )
)
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")


def refusal(address: Address, *, allow_private: bool) -> str | None:
    """What kind of address it is, where no webhook goes to it; None where one may."""
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        address = IPv6Address(int(address))
    never = _kind(_NEVER, address)
    if never is not None:
        return never
    if allow_private:
        carried = _carried(address)
        return _kind(_NEVER, carried) if carried is not None else None
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return _kind(_NOT_PUBLIC, address) or "reserved"
    return _kind(_NOT_PUBLIC, address)


def _kind(table: _Table, address: Address) -> str | None:
    return next((what for network, what in table if address in network), None)


def _carried(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 address stands for."""
    if isinstance(address, IPv4Address) or address.is_loopback:
        return None
    if address.ipv4_mapped is not None or address.sixtofour is not None:
        return address.ipv4_mapped or address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    kind = _kind(_NOT_PUBLIC, address)
    is_compatible = int(address) >> 32 == 0
    return IPv4Address(int(address) & 0xFFFFFFFF) if kind in ("NAT64", "IPv4-translated") or is_compatible else None
