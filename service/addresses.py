"""Where a URL from a client may lead: which URLs, which hosts and which addresses. Pure; `service.fetch` asks it.

A URL is checked by its text first (`check_url`), and every address that its host turns out to have then (`is_public`).
Hosts are compared and sent as ASCII. No message repeats the URL or an address.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

from service.errors import InvalidRequest
from service.unpack import MAX_URL_CHARS
from tp.settings import UrlSettings

Address = IPv4Address | IPv6Address

_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")  # as a last label: 127.1, 0x7f000001 and 2130706433 are IPv4 addresses to C

_GLOBAL_UNICAST = ip_network("2000::/3")  # the rest of IPv6 is local, multicast, reserved or a wrapped IPv4 address
_NAT64 = ip_network("64:ff9b::/96")
# What `is_global` calls global, in some Python or in all, and a server has no business with.
_REFUSED = tuple(
    ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's platform services, a public address that answers inside its networks only
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata service
        "192.88.99.0/24",  # 6to4 relays
        "2001::/23",  # protocol assignments; Teredo, which wraps two IPv4 addresses
        "3fff::/20",  # documentation
    )
)


@dataclass(frozen=True, slots=True)
class Target:
    """One hop of a fetch, as far as its text tells allowed. The host is ASCII, lower case, without a final dot."""

    url: httpx.URL
    host: str
    port: int
    literal: Address | None  # the host, where it is an address and needs no resolving

    @property
    def host_header(self) -> str:
        """The name that the server is asked for."""
        return self.url.netloc.decode("ascii")

    def at(self, address: Address) -> httpx.URL:
        """The same resource by the address to connect to, in place of the host."""
        return self.url.copy_with(host=str(address))


def check_url(text: str, rules: UrlSettings) -> Target:
    """What the URL names. Raises InvalidRequest unless it may be fetched as far as its text tells."""
    if len(text) > MAX_URL_CHARS:
        raise InvalidRequest(f"the URL has more than {MAX_URL_CHARS} characters")
    try:
        url = httpx.URL(text)
        raw_host = url.raw_host.decode("ascii")
    except (httpx.InvalidURL, UnicodeError):
        raise _malformed() from None
    schemes = ("http", "https") if rules.allow_http else ("https",)
    if url.scheme not in schemes:
        raise InvalidRequest(f"only {' and '.join(schemes)} URLs are fetched")
    if url.userinfo:
        raise InvalidRequest("a URL with a user name or password is not fetched")
    port = _DEFAULT_PORTS[url.scheme] if url.port is None else url.port
    if port not in rules.allowed_ports:
        raise InvalidRequest("the URL has a port that nothing is fetched from")
    host, literal = read_host(raw_host.removesuffix("."))
    if rules.allowed_hosts and not any(matches(host, pattern) for pattern in rules.allowed_hosts):
        raise InvalidRequest("the URL's host is not one of those that are fetched from")
    return Target(url.copy_with(host=host, fragment=None), host, port, literal)


def follow(target: Target, location: str, rules: UrlSettings) -> Target:
    """Where a redirect leads, checked like any URL."""
    try:
        url = target.url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise _malformed() from None
    return check_url(str(url), rules)


def is_public(address: Address) -> bool:
    """Whether an address is global unicast, and the IPv4 address that it wraps, if any, is too."""
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return False
        wrapped = address.ipv4_mapped or _behind_nat64(address)
        if wrapped is not None:
            return is_public(wrapped)
        if address not in _GLOBAL_UNICAST or (address.sixtofour and not is_public(address.sixtofour)):
            return False
    if address.is_multicast or address.is_reserved or any(address in network for network in _REFUSED):
        return False
    return address.is_global


def _behind_nat64(address: IPv6Address) -> IPv4Address | None:
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in _NAT64 else None


def read_host(host: str) -> tuple[str, Address | None]:
    """A host in lower case as it is compared and sent, and as an address where it is one. Raises InvalidRequest."""
    try:
        literal = ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host) or _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise _malformed() from None
        return host, None
    return str(literal), literal


def matches(host: str, pattern: str) -> bool:
    """`*.example.org` matches every name below example.org, and not itself."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _malformed() -> InvalidRequest:
    return InvalidRequest("the URL is malformed")
