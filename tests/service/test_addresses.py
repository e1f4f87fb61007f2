from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.addresses import Target, check_url, follow, is_public
from service.errors import InvalidRequest, ServiceError
from tp.settings import SettingsError, UrlSettings, load_settings

ANY = UrlSettings(fetch="on")
LISTED = UrlSettings(fetch="on", allowed_hosts=("images.example", "*.cdn.example", "xn--mller-kva.example"))


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",  # AWS, GCP, Azure
        "100.64.0.1",
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "168.63.129.16",  # Azure
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::8.8.8.8",  # NAT64 of the local network
        "100::1",
        "2001::1",  # Teredo
        "2001:0:808:808::f7f7:f7f7",  # Teredo, 8.8.8.8 inside
        "2001:db8::1",
        "2002:7f00:1::",  # 6to4, 127.0.0.1 inside
        "2002:a00:1::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",  # AWS
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1111%1",
        "::ffff:8.8.8.8%1",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ],
)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "8.8.8.8",
        "1.1.1.1",
        "172.32.0.1",
        "100.128.0.1",
        "2606:4700::1111",
        "2a00:1450::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2002:808:808::1",
    ],
)
def test_addresses_that_are_public(text: str) -> None:
    assert is_public(ip_address(text))


@given(st.ip_addresses(v=4))
def test_wrapping_an_address_changes_nothing(address: object) -> None:
    for wrapped in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(ip_address(wrapped)) == is_public(ip_address(str(address)))


@given(st.ip_addresses())
def test_public_addresses_are_global(address: object) -> None:
    given_address = ip_address(str(address))
    if is_public(given_address) and not getattr(given_address, "ipv4_mapped", None):
        assert given_address.is_global and not given_address.is_multicast and not given_address.is_link_local


@pytest.mark.parametrize(
    ("url", "host", "asked"),
    [
        ("https://images.example", "images.example", "https://8.8.8.8"),
        ("https://Images.EXAMPLE.:443/a?b=c#d", "images.example", "https://8.8.8.8/a?b=c"),
        ("https://images.example:80/", "images.example", "https://8.8.8.8:80/"),
        ("https://müller.example/ä", "xn--mller-kva.example", "https://8.8.8.8/%C3%A4"),
        ("https://a_b-c.example/%2e%2e/x", "a_b-c.example", "https://8.8.8.8/%2e%2e/x"),
        ("https://[2001:DB8::1]/", "2001:db8::1", "https://8.8.8.8/"),
        ("https://127.0.0.1/", "127.0.0.1", "https://8.8.8.8/"),
    ],
)
def test_a_url_by_the_address_of_its_host(url: str, host: str, asked: str) -> None:
    target = check_url(url, ANY)
    assert (target.host, str(target.at(ip_address("8.8.8.8")))) == (host, asked)


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("https://Images.example./a#b", "images.example"),
        ("https://images.example:80/", "images.example:80"),
        ("https://[2001:db8::1]/", "[2001:db8::1]"),
    ],
)
def test_the_server_is_asked_by_name(url: str, header: str) -> None:
    target = check_url(url, ANY)
    assert target.host_header == header
    assert str(target.at(ip_address("2606:4700::1111"))).startswith("https://[2606:4700::1111]")


@pytest.mark.parametrize(
    "url",
    ["https://127.0.0.1/", "https://127。0。0。1/", "https://[::ffff:127.0.0.1]/", "https://[fe80::1%25eth0]/"],
)
def test_addresses_in_urls_are_judged_like_resolved_ones(url: str) -> None:
    literal = check_url(url, ANY).literal
    assert literal is not None and not is_public(literal)


def refusal(url: str, rules: UrlSettings = ANY) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_url(url, rules)
    assert "example" not in caught.value.message and "127" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/",
        "file:///etc/hostname",
        "ftp://images.example/",
        "gopher://images.example/",
        "/etc/hostname",
        "//images.example/",
        "etc",
        "",
    ],
)
def test_only_https(url: str) -> None:
    assert refusal(url) == "only https URLs are fetched"


def test_http_where_it_is_allowed() -> None:
    rules = UrlSettings(allow_http=True)
    assert check_url("http://images.example/", rules).port == 80
    assert refusal("file:///etc/hostname", rules) == "only http and https URLs are fetched"


@pytest.mark.parametrize(
    "url",
    [
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.0.0.1/",
        "https://0177.0.0.1/",
        "https://017700000001/",
        "https://127.0.0.0x1/",
        "https://127.0.0.1.1/",
        "https://127.0.0.1../",
        "https://127%2e0.0.1/",
        "https://１２７.０.０.１/",
        "https://127.0.0.1%00.example/",
        "https://[127.0.0.1]/",
        "https://[::1/",
        "https://[fe80::1%25eth0]é]/",
        "https://a..example/",
        "https://.example/",
        "https://*/",
        "https://a,b.example/",
        "https://exa mple/",
        "https://example/\r\nHost: x",
        "https://example\t/",
        f"https://{'a' * 64}.example/",
        f"https://{'a.' * 130}example/",
        "https://example:x/",
        "https:///a",
        "https:example/a",
        "https://",
    ],
)
def test_malformed_urls(url: str) -> None:
    assert refusal(url) == "the URL is malformed"


@pytest.mark.parametrize(
    "url",
    [
        "https://user@images.example/",
        "https://user:pass@images.example/",
        "https://:pass@images.example/",
        "https://images.example\\@127.0.0.1/",
        "https://images.example%2f@127.0.0.1/",
    ],
)
def test_user_names_are_refused(url: str) -> None:
    assert "user name" in refusal(url)


@pytest.mark.parametrize("port", [0, 22, 8000, 65535, 65979])
def test_odd_ports_are_refused(port: int) -> None:
    assert "port" in refusal(f"https://images.example:{port}/")
    assert check_url("https://images.example:8443/", UrlSettings(allowed_ports=(8443,))).port == 8443


def test_long_urls_are_refused() -> None:
    path = "a" * (2048 - len("https://images.example/"))
    assert check_url(f"https://images.example/{path}", ANY).port == 443
    assert "2048" in refusal(f"https://images.example/{path}a")


@pytest.mark.parametrize("host", ["images.example", "IMAGES.example.", "a.cdn.example", "a.b.cdn.example"])
def test_hosts_on_the_list(host: str) -> None:
    assert check_url(f"https://{host}/", LISTED)
    assert check_url("https://müller.example/", LISTED)


@pytest.mark.parametrize("host", ["cdn.example", "acdn.example", "images.example.evil", "ximages.example", "127.0.0.1"])
def test_hosts_off_the_list(host: str) -> None:
    assert "not one of those" in refusal(f"https://{host}/", LISTED)


def redirected(location: str, rules: UrlSettings = ANY) -> Target:
    return follow(check_url("https://images.example/a/b?c#d", rules), location, rules)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("x", "https://images.example/a/x"),
        ("/x?y", "https://images.example/x?y"),
        ("//other.example/x", "https://other.example/x"),
        ("https://other.example/#f", "https://other.example/"),
        ("../../../x", "https://images.example/x"),
    ],
)
def test_redirects(location: str, url: str) -> None:
    assert str(redirected(location).url) == url


@pytest.mark.parametrize(
    "location",
    [
        "http://images.example/",
        "file:///etc/hostname",
        "//user@images.example/",
        "https://2130706433/",
        "//x:22/",
        "https://[::1",
        "x" * 2048,
        "https://[::1]]/",
        "\x00",
    ],
)
def test_redirects_are_checked_like_urls(location: str) -> None:
    with pytest.raises(InvalidRequest):
        redirected(location)


@given(st.text(max_size=40))
def test_any_text_is_a_target_or_refused(text: str) -> None:
    for url in (text, f"https://{text}", f"https://images.example/{text}"):
        try:
            assert check_url(url, ANY).host.isascii()
        except ServiceError as error:
            assert error.status == 400
    try:
        redirected(text)
    except ServiceError as error:
        assert error.status == 400


@pytest.mark.parametrize("value", [True, False, "on", "off"])
def test_fetch_is_on_or_off_however_yaml_reads_it(value: object) -> None:
    name = "TPVISION_URLS__FETCH"
    text = str(value).lower()
    expected = "on" if text in ("true", "on") else "off"
    assert load_settings(environ={name: text}).settings.urls.fetch == expected


@pytest.mark.parametrize("host", ["*", "müller.example", "https://a.example", "a..b", "a.example/", "*.*.example"])
def test_patterns_that_would_never_match_stop_the_start(host: str) -> None:
    with pytest.raises(SettingsError, match="allowed_hosts"):
        load_settings(flags={"urls.allowed_hosts": host})
