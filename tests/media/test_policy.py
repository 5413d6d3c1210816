"""The URL policy, case by case: every spelling of an inside address, every way to confuse a second parser."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import SourcePolicy
from triptych.core.errors import ForbiddenSource, InvalidRequest
from triptych.media.addresses import is_allowed, parse_networks
from triptych.media.policy import Policy

OPEN = Policy(SourcePolicy(schemes=("https", "http", "data"), ports=(443, 8080)))
DEFAULT = Policy(SourcePolicy())

INSIDE_ADDRESSES = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",  # Azure's platform, globally routable
    "100.100.100.200",
    "192.0.0.192",
    "::",
    "::1",
    "::7f00:1",  # IPv4-compatible
    "::808:808",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",  # IPv4-translated
    "64:ff9b::a9fe:a9fe",  # NAT64 of the metadata address
    "64:ff9b::7f00:1",
    "64:ff9b:1::a00:1",
    "2002:a00:1::1",  # 6to4 of 10.0.0.1
    "2002:808:808::1",
    "2001:0:5ef5:79fd:0:0:80ff:fffe",  # Teredo whose client is 127.0.0.1
    "2001:db8::1",
    "3fff::1",
    "100::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "4000::1",
]
PUBLIC_ADDRESSES = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("text", INSIDE_ADDRESSES)
def test_inside_addresses_are_refused(text):
    """What is not global unicast is refused, wherever an IPv4 address hides."""
    assert not is_allowed(ip_address(text))


@pytest.mark.parametrize("text", PUBLIC_ADDRESSES)
def test_public_addresses_are_allowed(text):
    """Global unicast is allowed, and so are the forms that stand for it."""
    assert is_allowed(ip_address(text))


@pytest.mark.parametrize("text", INSIDE_ADDRESSES)
def test_inside_addresses_are_refused_in_urls(text):
    """A literal host is judged before any connection."""
    host = f"[{text}]" if ":" in text else text
    with pytest.raises(ForbiddenSource):
        OPEN.check_url(f"http://{host}/a.png")


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",  # decimal
        "017700000001",  # octal
        "0x7f000001",  # hexadecimal
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.1",  # short forms
        "127.0.1",
        "127.0.0.01",
        "127.0.0.1.",  # trailing dot
        "127.0.0.1..",
        "①②⑦.⓪.⓪.①",  # Unicode digits
        "１２７.０.０.１",
        "127。0。0。1",  # ideographic full stops
        "127.0.0.1%2f.example.com",
        "127.0.0.1%00.example.com",
        "%31%32%37.0.0.1",
        "[::1%25eth0]",  # zone id
        "[fe80::1%eth0]",
        "[::1",
        "[::1]x",
        "[127.0.0.1]",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "ｌocalhost",
        "a.localhost",
        "printer.local",
        "db.internal",
        "metadata.google.internal",
        "metadata.goog",
        "kubernetes.default.svc",
        "kubernetes",
        "1.2.3",
        "1.2.3.4.5",
        "999.1.1.1",
        "0x",
        "",
        ".",
        "-a.com",
        "a..com",
        "xn--a.com",  # not what punycode may hold
        "a" * 64 + ".com",
        "exa mple.com",
        "a\\b.com",
        "user@example.com",
        "user:secret@example.com",
        "example.com@127.0.0.1",
        "example.com:443@127.0.0.1",
    ],
)
def test_hosts_that_hide_or_confuse_are_refused(host):
    """Other notations, names of inside networks, credentials and malformed hosts."""
    with pytest.raises(ForbiddenSource):
        OPEN.check_url(f"http://{host}/a.png")


@pytest.mark.parametrize(
    "url",
    [
        "http:/example.com/a",
        "http:example.com/a",
        "http:\\\\example.com\\a",
        "http://example.com\\@127.0.0.1/",
        "http://127.0.0.1\\.example.com/",
        "http://example.com/\r\nHost: inside",
        "http://example.com/a b",
        "http://example.com\t/a",
        "http://example.com/\x00",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:-1/",
        "http://example.com:8080x/",
        "http://example.com:٤٤٣/",
        "http://example.com:22/",
        "http://exam\u200bple.com:6379/",
        "http://example.com/" + "a" * 4096,
    ],
)
def test_malformed_urls_are_refused(url):
    """What two parsers might read in two ways is not repaired."""
    with pytest.raises(ForbiddenSource):
        OPEN.check_url(url)


@pytest.mark.parametrize("scheme", ["http", "file", "ftp", "gopher", "jar", "dict", "ldap", "unix", "javascript", "ws"])
def test_default_takes_https_and_data_only(scheme):
    """Other schemes are refused by name."""
    with pytest.raises(ForbiddenSource, match=scheme):
        DEFAULT.scheme_of(f"{scheme}://example.com/a")


@pytest.mark.parametrize("source", ["", "image.png", "/etc/passwd", "//example.com/a", "://", "1http://a"])
def test_what_is_no_url_is_an_invalid_request(source):
    """A path or a bare word is answered as a mistake, not as an attack."""
    with pytest.raises(InvalidRequest):
        DEFAULT.scheme_of(source)


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("https://Example.COM/a.png", "example.com", 443, "/a.png"),
        ("HTTPS://example.com", "example.com", 443, "/"),
        ("https://example.com.:443/a?b=c&d=%20#frag", "example.com", 443, "/a?b=c&d=%20"),
        ("https://example.com?x=@y", "example.com", 443, "/?x=@y"),
        ("https://bücher.example/ü", "xn--bcher-kva.example", 443, "/%C3%BC"),
        ("https://[2606:4700:4700::1111]/", "2606:4700:4700::1111", 443, "/"),
        ("https://8.8.8.8/", "8.8.8.8", 443, "/"),
        ("https://a_b.example.com/", "a_b.example.com", 443, "/"),
    ],
)
def test_good_urls_are_read_as_written(text, host, port, target):
    """Host, port and request target of ordinary URLs."""
    url = DEFAULT.check_url(text)

    assert (url.host, url.port, url.target) == (host, port, target)


def test_port_80_comes_with_http():
    """Ports are the configured ones, and 80 where http is allowed."""
    assert OPEN.check_url("http://example.com/").port == 80
    with pytest.raises(ForbiddenSource, match="port 80"):
        DEFAULT.check_url("https://example.com:80/")


@pytest.mark.parametrize(
    ("location", "joined"),
    [
        ("https://other.example/x", "https://other.example/x"),
        ("//other.example/x", "https://other.example/x"),
        ("/x", "https://example.com/x"),
        ("?q", "https://example.com/a/b?q"),
        ("c", "https://example.com/a/c"),
        ("file:///etc/passwd", "file:///etc/passwd"),
    ],
)
def test_redirect_targets_are_joined(location, joined):
    """A location becomes a text that the same parser reads."""
    assert DEFAULT.check_url("https://example.com/a/b?c").joined(location) == joined


def test_allowed_hosts_exclude_all_others():
    """With an allow list, only listed hosts and what is below a starred one."""
    policy = Policy(SourcePolicy(allowed_hosts=("images.example.com", "*.cdn.example")))

    assert policy.check_url("https://images.example.com/a").host == "images.example.com"
    assert policy.check_url("https://eu.cdn.example/a").host == "eu.cdn.example"
    for host in ("example.com", "cdn.example", "evilcdn.example", "images.example.com.evil.example", "8.8.8.8"):
        with pytest.raises(ForbiddenSource, match="allowed hosts"):
            policy.check_url(f"https://{host}/a")


def test_allowed_networks_open_inside_addresses_but_not_metadata():
    """A listed network may be reached; a metadata address inside it only when it stands there by itself."""
    networks = parse_networks(["169.254.0.0/16", "10.0.0.0/8"])

    assert is_allowed(ip_address("10.1.2.3"), networks)
    assert is_allowed(ip_address("::ffff:10.1.2.3"), networks)
    assert not is_allowed(ip_address("10.1.2.3"), parse_networks(["10.2.0.0/16"]))
    assert not is_allowed(ip_address("169.254.169.254"), networks)
    assert is_allowed(ip_address("169.254.169.254"), parse_networks(["169.254.169.254/32"]))


def test_errors_name_neither_path_nor_address():
    """What a caller reads holds the host alone, cut short."""
    secret = "https://10.0.0.7/private?token=abc"
    with pytest.raises(ForbiddenSource) as caught:
        DEFAULT.check_url(secret)

    assert "token" not in caught.value.message
    assert "private" not in caught.value.message.replace("public", "")


@given(st.integers(0, 2**32 - 1))
def test_no_ipv6_form_says_more_than_its_ipv4_address(value):
    """Mapped and NAT64 forms are allowed exactly when the IPv4 address is; tunnels never."""
    v4 = ip_address(value)

    assert is_allowed(ip_address(0xFFFF << 32 | value)) == is_allowed(v4)
    assert is_allowed(ip_address(0x64FF9B << 96 | value)) == is_allowed(v4)
    assert not is_allowed(ip_address(value << 80 | 0x2002 << 112))
    assert not is_allowed(ip_address(0x20010000 << 96 | value))


@given(st.text(max_size=60))
def test_any_text_is_judged_without_a_crash(text):
    """Whatever is written after https://, the answer is a URL or a refusal."""
    try:
        url = DEFAULT.check_url(f"https://{text}")
    except (ForbiddenSource, InvalidRequest):
        return
    assert url.host.isascii()
    assert url.target.isascii()
    assert url.host == url.host.lower()
