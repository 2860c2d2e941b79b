"""Where webhooks may go: URLs that are none, and addresses that no stranger may have us ask."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from tasks.settings import Settings, SettingsError, load_settings
from tasks.webhook_addresses import refusal
from tasks.webhook_secrets import webhook_secrets
from tasks.webhook_urls import WebhookUrl, check_webhook_host, parse_webhook_url
from tests.receiver import OTHER_SECRET, SECRET

# --- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "parts", "host_header"),
    [
        ("https://example.com", ("https", "example.com", 443, "/"), "example.com"),
        ("HTTP://Example.COM:80/a%20b?c=d&e", ("http", "example.com", 80, "/a%20b?c=d&e"), "example.com"),
        ("https://example.com:8443?x=1", ("https", "example.com", 8443, "/?x=1"), "example.com:8443"),
        ("https://[2606:4700::1111]/x", ("https", "2606:4700::1111", 443, "/x"), "[2606:4700::1111]"),
        ("http://[2606:4700:0:0::1111]:81/", ("http", "2606:4700::1111", 81, "/"), "[2606:4700::1111]:81"),
        ("https://xn--bcher-kva.example./", ("https", "xn--bcher-kva.example.", 443, "/"), "xn--bcher-kva.example."),
        ("https://a_b.example.com/@path", ("https", "a_b.example.com", 443, "/@path"), "a_b.example.com"),
    ],
)
def test_a_url_is_taken_apart(url: str, parts: tuple[str, str, int, str], host_header: str) -> None:
    assert parse_webhook_url(url) == WebhookUrl(*parts)
    assert parse_webhook_url(url).host_header == host_header


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "empty"),
        ("example.com/hook", "https:// or http://"),
        ("ftp://example.com/", "https:// or http://"),
        ("file:///etc/passwd", "https:// or http://"),
        ("javascript:alert(1)", "https:// or http://"),
        ("//example.com/", "https:// or http://"),
        (" https://example.com", "blanks"),
        ("https://example.com/a b", "blanks"),
        ("https://example.com/\r\nX: y", "blanks"),
        ("https://example.com/\x00", "blanks"),
        ("https://bücher.example/", "beyond ASCII"),
        ("https://user:secret@example.com/", "credentials"),
        ("https://user@example.com/", "credentials"),
        ("https://@example.com/", "credentials"),
        ("https://example.com/#part", "fragment"),
        ("https://example.com\\@10.0.0.1/", "credentials"),
        ("https://example.com\\.evil/", "no host"),
        ("https:///path", "no host"),
        ("https://:443/", "no host"),
        ("https://example.com:/", "no host"),
        ("https://example.com:0/", "port 0"),
        ("https://example.com:65536/", "port 65536"),
        ("https://example.com:1e3/", "no host"),
        ("https://[::1", "no host"),
        ("https://[fe80::1%25eth0]/", "no host"),
        ("https://[12345::]/", "no IPv6 address"),
        ("https://exa..mple.com/", "is no name"),
        ("https://-example.com/", "is no name"),
        (f"https://{'a' * 64}.com/", "is no name"),
        (f"https://{'a.' * 127}com/", "is no name"),
        ("https://example.com/" + "a" * 2048, "2068 characters, at most 2048"),
    ],
)
def test_a_url_that_cannot_be_a_webhook_s_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_webhook_url(url)


# --- addresses --------------------------------------------------------------------------------------------------------

PUBLIC = ("1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.1.1", "2606:4700:4700::1111", "2a00:1450::1")
NEVER = {
    "0.0.0.0": "reserved",
    "0.1.2.3": "reserved",
    "169.254.169.254": "link-local",
    "100.100.100.200": "cloud metadata",
    "168.63.129.16": "cloud metadata",
    "192.0.0.192": "cloud metadata",
    "224.0.0.1": "multicast",
    "239.255.255.250": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "reserved",
    "::": "unspecified",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local",
    "ff02::1": "multicast",
    "fd00:ec2::254": "cloud metadata",
    "fd20:ce::254": "cloud metadata",
}
PRIVATE = {
    "10.0.0.1": "private",
    "172.16.0.1": "private",
    "172.31.255.255": "private",
    "192.168.1.1": "private",
    "100.64.0.1": "carrier-grade NAT",
    "100.127.255.254": "carrier-grade NAT",
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "192.0.2.1": "documentation",
    "198.18.0.1": "benchmarking",
    "198.51.100.7": "documentation",
    "203.0.113.7": "documentation",
    "::1": "loopback",
    "fc00::1": "private",
    "fd12:3456::1": "private",
    "::ffff:8.8.8.8": "IPv4-mapped",
    "::ffff:127.0.0.1": "IPv4-mapped",
    "::ffff:0:8.8.8.8": "IPv4-translated",
    "::8.8.8.8": "reserved",
    "64:ff9b::808:808": "NAT64",
    "64:ff9b:1::a00:1": "NAT64",
    "2002:808:808::1": "6to4",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "Teredo",
    "2001:db8::1": "documentation",
    "3fff::1": "documentation",
    "fec0::1": "reserved",
    "100::1": "reserved",
    "4000::1": "reserved",
}
#: Addresses that carry one which no webhook goes to.
CARRIERS = (
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "::ffff:0:a9fe:a9fe",
    "::169.254.169.254",
    "2001:0:1:2:3:4:5601:5601",
)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert refusal(ipaddress.ip_address(address), allow_private=False) is None


@pytest.mark.parametrize(("address", "what"), [*NEVER.items(), *PRIVATE.items()])
def test_an_address_that_is_not_public_is_refused_and_its_kind_named(address: str, what: str) -> None:
    assert refusal(ipaddress.ip_address(address), allow_private=False) == what


@pytest.mark.parametrize("address", [*PUBLIC, *PRIVATE])
def test_private_addresses_can_be_allowed(address: str) -> None:
    assert refusal(ipaddress.ip_address(address), allow_private=True) is None


@pytest.mark.parametrize("address", [*NEVER, *CARRIERS])
def test_some_addresses_are_refused_whatever_is_allowed(address: str) -> None:
    assert refusal(ipaddress.ip_address(address), allow_private=True) is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "127.0.0.1.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:7f00:1]",
        "10.1",
        "169.254.169.254",
        "localhost",
        "LOCALHOST.",
        "a.localhost",
    ],
)
def test_what_can_be_seen_to_be_private_is_refused_before_it_is_accepted(host: str) -> None:
    with pytest.raises(ValueError, match="webhooks go to public ones"):
        check_webhook_host(parse_webhook_url(f"http://{host}/"), allow_private=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "[::1]", "localhost", "example.com"])
def test_private_hosts_can_be_allowed(host: str) -> None:
    check_webhook_host(parse_webhook_url(f"http://{host}/"), allow_private=True)


def test_metadata_is_refused_also_where_private_hosts_are_allowed() -> None:
    with pytest.raises(ValueError, match="link-local"):
        check_webhook_host(parse_webhook_url("http://169.254.169.254/latest/"), allow_private=True)


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_without_a_secret_there_is_none() -> None:
    assert webhook_secrets(Settings()) == ()


def test_several_secrets_stand_side_by_side_in_the_setting_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"{SECRET}\n{OTHER_SECRET}\n")
    assert webhook_secrets(Settings(webhook_secret=f"{SECRET} {OTHER_SECRET}")) == (SECRET, OTHER_SECRET)
    assert webhook_secrets(Settings(webhook_secret_file=file)) == (SECRET, OTHER_SECRET)


@pytest.mark.parametrize("secret", ["hunter2hunter2hunter2hunter2hunter2", "whsec_", "whsec_c2hvcnQ=", "whsec_!" * 5])
def test_a_secret_that_is_none_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(SettingsError) as caught:
        webhook_secrets(Settings(webhook_secret=f"{SECRET} {secret}"))
    assert str(caught.value) == (
        "CARPOOL_WEBHOOK_SECRET: secret 2 is not whsec_ and 24 to 64 bytes in base64. "
        "Make one with: echo whsec_$(openssl rand -base64 32)"
    )


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), ("", "holds no secret"), ("x", "is not whsec_")]
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "secrets"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=reason) as caught:
        webhook_secrets(Settings(webhook_secret_file=file))
    assert str(file) in str(caught.value)


def test_two_places_for_secrets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="both set"):
        webhook_secrets(Settings(webhook_secret=SECRET, webhook_secret_file=tmp_path / "secrets"))


def test_no_message_about_settings_and_no_repr_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SECRET not in repr(Settings(webhook_secret=SECRET))
    assert Settings(webhook_secret=SECRET).renders_as_environment["CARPOOL_WEBHOOK_SECRET"] == SECRET
    monkeypatch.setenv("CARPOOL_WEBHOOK_SECRETS", SECRET)
    with pytest.raises(SettingsError, match="Did you mean CARPOOL_WEBHOOK_SECRET") as caught:
        load_settings()
    assert SECRET not in str(caught.value)


def test_a_model_cannot_have_the_name_of_the_webhooks_queue() -> None:
    with pytest.raises(ValueError, match="the name of the webhooks' queue"):
        Settings(served_model_name="webhooks")
