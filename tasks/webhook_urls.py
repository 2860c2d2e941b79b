"""Where a webhook goes: a URL, taken apart once and strictly, so that what is checked is what is connected to."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Final

from tasks.webhook_addresses import Address, refusal

MAX_URL_CHARACTERS: Final = 2048
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")
_URL: Final = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<target>[^#]*)", re.IGNORECASE)
_AUTHORITY: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """A URL in its parts.

    Attributes:
        host: a name, or an address without brackets; in lower case.
        target: path and query, as the request line has them.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def literal(self) -> Address | None:
        """The address that stands in place of a name, also in the forms of C libraries (`127.1`, `0x7f000001`)."""
        host = self.host.rstrip(".")
        try:
            return ipaddress.ip_address(host)
        except ValueError:
            pass
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None


def parse_webhook_url(url: str) -> WebhookUrl:
    """Take a URL apart.

    Raises:
        ValueError: it cannot be a webhook's; the message says why and what would do.
    """
    if len(url) > MAX_URL_CHARACTERS:
        raise ValueError(f"a URL of {len(url)} characters, at most {MAX_URL_CHARACTERS} are possible")
    if not _PRINTABLE.fullmatch(url):
        raise ValueError(
            "it is empty, or has blanks or characters beyond ASCII: percent-encode the path, write the host as xn--…"
        )
    found = _URL.match(url)
    if found is None:
        raise ValueError("it has to begin with https:// or http://")
    if found.end() != len(url):
        raise ValueError("it has a fragment (#…), which is never sent: leave it out")
    if "@" in found["authority"]:
        raise ValueError("it has credentials before the host, which is not supported: the signature says who sends")
    authority = _AUTHORITY.fullmatch(found["authority"])
    if authority is None:
        raise ValueError("what stands between // and the path is no host with an optional port")
    scheme = found["scheme"].lower()
    port = int(authority["port"]) if authority["port"] else _DEFAULT_PORTS[scheme]
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port} does not exist: take one from 1 to 65535")
    target = found["target"]
    return WebhookUrl(
        scheme, _host(authority["host"].lower()), port, target if target.startswith("/") else f"/{target}"
    )


def check_webhook_host(url: WebhookUrl, *, allow_private: bool) -> None:
    """Refuse what can be seen to be refused without asking for the name; the rest is checked at every delivery.

    Raises:
        ValueError: the host is an address that no webhook goes to, or a name of this machine.
    """
    literal = url.literal
    name = url.host.rstrip(".")
    what = refusal(literal, allow_private=allow_private) if literal is not None else None
    if not allow_private and (name == "localhost" or name.endswith(".localhost")):
        what = "loopback"
    if what is not None:
        raise ValueError(
            f"the host {url.host[:80]!r} is a {what} address, and webhooks go to public ones"
            + ("" if allow_private else " (CARPOOL_WEBHOOK_ALLOW_PRIVATE lets them into a private network)")
        )


def _host(host: str) -> str:
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise ValueError(f"the host {host[:80]!r} is no IPv6 address") from None
    name = host.removesuffix(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"the host {host[:80]!r} is no name")
    return host
