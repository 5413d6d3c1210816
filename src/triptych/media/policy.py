"""The URL policy: one strict parser whose result is both judged here and connected to by `fetch.py`. Pure.

Anything that two parsers might read differently is refused rather than repaired: backslashes, white space, credentials,
percent signs in the host, IPv4 addresses in any notation but the plain one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote

import idna

from triptych.core.config import SourcePolicy
from triptych.core.errors import ForbiddenSource, InvalidRequest
from triptych.media.addresses import Address, is_allowed, parse_networks

DEFAULT_PORTS = {"https": 443, "http": 80}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2028\u2029\ufeff\ud800-\udfff]")
_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")

# Names that stand for this machine or its network by convention, whatever they resolve to.
_INSIDE_NAMES = frozenset({"localhost", "local", "localdomain", "internal", "intranet", "lan", "home", "corp", "arpa"})
_INSIDE_HOSTS = frozenset({"metadata.google.internal", "metadata.goog", "kubernetes.default.svc"})


@dataclass(frozen=True, slots=True)
class Url:
    """An http or https URL, read once. `target` goes into the request line; `address` is set for a literal host."""

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None = None

    @property
    def origin(self) -> str:
        """Safe to show: no path, no query."""
        return f"{self.scheme}://{self.host_header}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host + ("" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}")

    def joined(self, location: str) -> str:
        """The text of a redirect's target, relative to this URL. It is parsed and judged like any other URL."""
        if _SCHEME.match(location):
            return location
        if location.startswith("//"):
            return f"{self.scheme}:{location}"
        path = self.target.split("?", 1)[0]
        if location.startswith("/"):
            return self.origin + location
        if location.startswith("?"):
            return f"{self.origin}{path}{location}"
        return f"{self.origin}{path.rsplit('/', 1)[0]}/{location}"


class Policy:
    """Judges URLs and addresses by a `SourcePolicy`. Immutable; safe to share."""

    def __init__(self, config: SourcePolicy) -> None:
        self.config = config
        self.networks = parse_networks(config.allowed_networks)
        self.ports = frozenset(config.ports) | ({80} if "http" in config.schemes else set())
        self.hosts = tuple(host.lower().rstrip(".") for host in config.allowed_hosts)

    def scheme_of(self, source: str) -> str:
        """The scheme in lower case. Raises InvalidRequest for what is no URL, ForbiddenSource for a refused scheme."""
        match = _SCHEME.match(source)
        if match is None:
            raise InvalidRequest("a media source must be a URL with a scheme, such as https: or data:")
        scheme = match[1].lower()
        allowed = (*self.config.schemes, *(("file",) if self.config.local_root else ()))
        if scheme not in allowed:
            raise ForbiddenSource(f"URLs of scheme {scheme[:20]!r} are not allowed here; allowed: {', '.join(allowed)}")
        return scheme

    def check_url(self, text: str) -> Url:
        """Parse and judge an http or https URL. Raises ForbiddenSource, InvalidRequest."""
        scheme = self.scheme_of(text)
        if scheme not in DEFAULT_PORTS:
            raise ForbiddenSource(f"a redirect may not lead to a URL of scheme {scheme[:20]!r}")
        if len(text) > self.config.max_url_chars:
            raise ForbiddenSource(f"the URL has {len(text)} characters, max_url_chars is {self.config.max_url_chars}")
        url = _parse(scheme, text[len(scheme) + 1 :])
        self._check_port(url)
        self._check_host(url)
        if url.address is not None:
            self.check_address(url.address, url)
        return url

    def check_address(self, address: Address, url: Url) -> None:
        """Judge an address that is about to be connected to. Raises ForbiddenSource, which does not name it."""
        if not is_allowed(address, self.networks):
            place = "the address in the URL" if url.address is not None else f"{url.host[:80]!r}"
            raise ForbiddenSource(f"{place} is not public; this server fetches from public addresses")

    def _check_port(self, url: Url) -> None:
        if url.port not in self.ports:
            allowed = ", ".join(str(port) for port in sorted(self.ports))
            raise ForbiddenSource(f"port {url.port} is not allowed in URLs; allowed: {allowed}")

    def _check_host(self, url: Url) -> None:
        is_listed = any(_matches(url.host, pattern) for pattern in self.hosts)
        if self.hosts and not is_listed:
            raise ForbiddenSource(f"host {url.host[:80]!r} is not among the allowed hosts")
        if url.address is None and not is_listed and _is_inside_name(url.host):
            raise ForbiddenSource(f"host {url.host[:80]!r} is a name of an inside network")


def _matches(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _is_inside_name(host: str) -> bool:
    return "." not in host or host in _INSIDE_HOSTS or host.rsplit(".", 1)[1] in _INSIDE_NAMES


def _parse(scheme: str, rest: str) -> Url:
    """`rest` is what follows `scheme:`."""
    if _UNSAFE.search(rest):
        raise ForbiddenSource("a URL may not hold white space, control characters or backslashes")
    if not rest.startswith("//"):
        raise ForbiddenSource(f"an {scheme} URL needs // after its scheme")
    authority, path = re.fullmatch(r"([^/?#]*)([^#]*)(?:#.*)?", rest[2:], re.DOTALL).groups()  # type: ignore[union-attr]
    if "@" in authority:
        raise ForbiddenSource("a URL may not hold credentials")
    host, address, port_text = _split_authority(authority)
    port = _port(port_text, DEFAULT_PORTS[scheme])
    target = quote(path if path.startswith("/") else f"/{path}", safe="!#$%&'()*+,/:;=?@[]~|^`{}\"<>")
    return Url(scheme, host, port, target, address)


def _split_authority(authority: str) -> tuple[str, Address | None, str | None]:
    if authority.startswith("["):
        literal, closing, tail = authority[1:].partition("]")
        if not closing or (tail and not tail.startswith(":")):
            raise ForbiddenSource("the URL's host is malformed")
        literal_address = _ipv6(literal)
        return str(literal_address), literal_address, tail[1:] if tail else None
    name, colon, port_text = authority.partition(":")
    host, address = _host(name)
    return host, address, port_text if colon else None


def _ipv6(literal: str) -> IPv6Address:
    if "%" in literal:
        raise ForbiddenSource("an address in a URL may not have a zone id")
    try:
        return IPv6Address(literal)
    except AddressValueError:
        raise ForbiddenSource("the URL's host is not an IPv6 address") from None


def _host(name: str) -> tuple[str, Address | None]:
    """A host name in lower-case ASCII, and its address where it is an IPv4 literal."""
    host = _ascii_host(name)
    host = host[:-1] if host.endswith(".") else host
    if not _HOST_NAME.fullmatch(host) or len(host) > 253:
        raise ForbiddenSource("the URL's host is not a host name")
    if not _NUMERIC_LABEL.fullmatch(host.rsplit(".", 1)[-1]):
        return host, None
    try:
        return host, IPv4Address(host)
    except AddressValueError:
        raise ForbiddenSource("an IPv4 address in a URL must be four plain decimal numbers") from None


def _ascii_host(name: str) -> str:
    if "%" in name:
        raise ForbiddenSource("a URL's host may not hold percent signs")
    if name.isascii() and "xn--" not in name.lower():
        return name.lower()
    try:
        return idna.encode(name, uts46=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        raise ForbiddenSource("the URL's host is not a valid international name") from None


def _port(text: str | None, default: int) -> int:
    if not text:
        return default
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65_535:
        raise ForbiddenSource("the URL's port is not a number between 1 and 65535")
    return int(text)
