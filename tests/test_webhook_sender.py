"""One POST to a receiver that a stranger named: where it goes, what it takes, and what bounds it."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tasks.webhook_urls import parse_webhook_url
from tests.receiver import OTHER_SECRET, SECRET, Receiver, Reply, raw_server
from worker.webhooks.backoff import retry_after_seconds, wait_before_next
from worker.webhooks.event import MAX_EVENT_BYTES, event_body, signed_headers
from worker.webhooks.hosts import Hosts
from worker.webhooks.resolver import SocketAddress, resolve
from worker.webhooks.sender import Answer, DeliveryError, Sender

CERTIFICATE = Path(__file__).with_name("receiver.pem")
HEADERS = [("Content-Type", "application/json")]


class Names:
    """A resolver that a test answers for; counts what it is asked."""

    def __init__(self, *answers: Sequence[str], port: int | None = None) -> None:
        self.answers = list(answers)
        self.port = port
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, timeout_s: float) -> list[SocketAddress]:
        self.asked.append(host)
        hosts = self.answers.pop(0)
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [
            SocketAddress(
                family[":" in one], (one, self.port or port, 0, 0) if ":" in one else (one, self.port or port)
            )
            for one in hosts
        ]


def sender(timeout_s: float = 5, *, allow_private: bool = True, **more: object) -> Sender:
    return Sender(timeout_s, allow_private=allow_private, **more)  # type: ignore[arg-type] # of the test's own


def post(sender: Sender, url: str, body: bytes = b"{}") -> Answer:
    return sender.post(parse_webhook_url(url), HEADERS, body)


def refused(sender: Sender, url: str) -> str:
    with pytest.raises(DeliveryError) as caught:
        post(sender, url)
    return str(caught.value)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_post_arrives_as_it_was_sent() -> None:
    body = json.dumps({"text": "ä" * 200_000}).encode()
    with Receiver() as receiver:
        answer = post(sender(), f"{receiver.url}/a%20b?x=1&y", body)
        (request,) = receiver.requests
    assert answer == Answer(200, "")
    assert (request.path, request.body) == ("/hook/a%20b?x=1&y", body)
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["content-type"] == "application/json"


@pytest.mark.parametrize("status", [200, 204, 299, 301, 307, 400, 404, 410, 429, 500, 503])
def test_a_status_is_told_and_a_redirect_not_followed(status: int) -> None:
    with Receiver() as other, Receiver() as receiver:
        headers = {"Location": other.url, "Retry-After": "7"}
        receiver.reply = lambda number, request: Reply(status, headers, b"")
        assert post(sender(), receiver.url) == Answer(status, "7")
        assert len(receiver.requests) == 1
        assert not other.requests


def test_informational_answers_are_passed_over() -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3 + b"HTTP/1.1 202 Fine\r\n\r\n")

    with raw_server(serve) as port:
        assert post(sender(), f"http://127.0.0.1:{port}/").status_code == 202


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as proxy, Receiver() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        post(sender(), receiver.url)
        assert (len(proxy.requests), len(receiver.requests)) == (0, 1)


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "localhost", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"],
)
def test_this_machine_is_refused_in_every_spelling_and_nothing_is_sent(host: str) -> None:
    with Receiver() as receiver:
        message = refused(sender(allow_private=False), f"http://{host}:{receiver.port}/")
        assert message.startswith("address_refused: ")
        assert not receiver.requests


def test_a_name_is_refused_when_any_of_its_addresses_is() -> None:
    find = Names(["93.184.216.34", "10.0.0.7"])
    message = refused(sender(allow_private=False, find=find), "https://receiver.test/")
    assert message == "address_refused: the host has a private address, and webhooks go to public ones"
    assert "10.0.0.7" not in message


def test_a_name_is_asked_once_and_the_connection_goes_to_that_very_address() -> None:
    with Receiver() as receiver:
        # asked again, the name would mean another address: what was looked at is what is connected to
        find = Names(["127.0.0.1"], ["192.0.2.1"], port=receiver.port)
        assert post(sender(find=find), "http://receiver.test:8080/hook").status_code == 200
        assert find.asked == ["receiver.test"]
        assert receiver.requests[0].headers["host"] == "receiver.test:8080"


def test_a_second_address_is_tried_where_the_first_does_not_answer() -> None:
    with Receiver() as receiver:
        find = Names(["127.0.0.2", "127.0.0.1"], port=receiver.port)  # nobody listens at the first
        assert post(sender(find=find), "http://receiver.test/").status_code == 200


def test_a_family_that_leads_nowhere_does_not_use_up_all_tries() -> None:
    with Receiver() as receiver:
        nowhere = [f"fd00::{number:x}" for number in range(1, 9)]
        find = Names([*nowhere, "127.0.0.1"], port=receiver.port)
        assert post(sender(20, find=find), "http://receiver.test/").status_code == 200


def test_a_name_that_does_not_exist_is_told() -> None:
    assert refused(sender(), "http://nothing.invalid/").startswith("dns: ")


def test_a_name_without_an_address_is_told() -> None:
    assert refused(sender(find=Names([])), "http://receiver.test/") == "dns: the name has no address"


def test_a_name_that_nobody_answers_for_does_not_hold_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(30) and [])
    began = time.monotonic()
    assert refused(sender(0.3), "http://receiver.test/") == "dns: the name was not resolved in time"
    assert time.monotonic() - began < 5
    release.set()


def test_addresses_stand_as_numbers_so_that_nothing_is_asked_again() -> None:
    assert {address.host for address in resolve("127.1", 80, 5)} == {"127.0.0.1"}


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secure_receiver() -> Receiver:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return Receiver(tls=context)


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def test_the_certificate_is_that_of_the_name_although_we_connect_to_an_address(secure_receiver: Receiver) -> None:
    with secure_receiver as receiver:
        find = Names(["127.0.0.1"], port=receiver.port)
        assert post(sender(find=find, tls=trusting()), "https://receiver.test/hook").status_code == 200
        assert receiver.requests[0].headers["host"] == "receiver.test"


@pytest.mark.parametrize(("name", "trusted"), [("other.test", True), ("receiver.test", False)])
def test_another_name_s_certificate_and_an_unknown_authority_s_are_refused(
    secure_receiver: Receiver, name: str, trusted: bool
) -> None:
    with secure_receiver as receiver:
        find = Names(["127.0.0.1"], port=receiver.port)
        context = trusting() if trusted else ssl.create_default_context()
        assert refused(sender(find=find, tls=context), f"https://{name}/").startswith("tls: ")
        assert not receiver.requests


def test_plain_http_where_tls_is_spoken_is_told() -> None:
    with Receiver() as receiver:
        assert refused(sender(), f"https://127.0.0.1:{receiver.port}/").startswith("tls: ")


# --- bounds -----------------------------------------------------------------------------------------------------------


def silent(connection: socket.socket) -> None:
    while connection.recv(65536):  # until the other side gives up
        pass


def dripping_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-Again: yes\r\n")
        time.sleep(0.05)


def dripping_hints(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


def deaf(connection: socket.socket) -> None:
    time.sleep(10)  # never reads, so that the buffers fill up


@pytest.mark.parametrize("serve", [silent, dripping_head, dripping_hints, deaf])
def test_one_bound_holds_for_everything_a_slow_receiver_does(serve: object) -> None:
    with raw_server(serve) as port:  # type: ignore[arg-type]
        began = time.monotonic()
        with pytest.raises(DeliveryError, match=r"^timeout: no answer within 0\.5 s$|^protocol: "):
            post(sender(0.5), f"http://127.0.0.1:{port}/", b"x" * 2**25)
        assert time.monotonic() - began < 3


def test_a_receiver_that_is_silent_before_tls_is_bounded_too() -> None:
    with raw_server(silent) as port:
        assert refused(sender(0.5), f"https://127.0.0.1:{port}/").startswith("timeout: ")


def test_a_huge_body_is_not_read() -> None:
    sent = []

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            sent.append(connection.send(b"x" * 65536))

    with raw_server(serve) as port:
        began = time.monotonic()
        assert post(sender(), f"http://127.0.0.1:{port}/").status_code == 200
        assert time.monotonic() - began < 3
    assert sum(sent) < 2**25, "what fits into the sockets' buffers, and no more"


def test_a_body_that_drips_is_not_waited_for() -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    with raw_server(serve) as port:
        began = time.monotonic()
        assert post(sender(30), f"http://127.0.0.1:{port}/").status_code == 200
        assert time.monotonic() - began < 5


def test_a_head_without_an_end_is_not_read() -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            connection.sendall(b"x" * 65536)

    with raw_server(serve) as port:
        assert refused(sender(), f"http://127.0.0.1:{port}/").startswith("protocol: ")


@pytest.mark.parametrize("answer", [b"", b"hello\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_an_answer_that_is_none_is_told(answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with raw_server(serve) as port:
        assert refused(sender(), f"http://127.0.0.1:{port}/").startswith(("protocol: ", "connection_lost: "))


def test_a_port_where_nobody_listens_is_told_without_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        message = refused(sender(), f"http://127.0.0.1:{unused.getsockname()[1]}/")
    assert message == "connect: connection refused"


# --- the event --------------------------------------------------------------------------------------------------------

JOB = {"id": "1f0c", "object": "job", "status": "succeeded", "text": " \u2028 ü", "webhook": {"attempts": [1]}}


def test_an_event_says_what_has_happened_and_is_the_same_at_every_attempt() -> None:
    body = event_body(JOB, 1_796_082_018_475)
    assert json.loads(body) == {
        "id": "evt_1f0c",
        "type": "job.succeeded",
        "timestamp": "2026-11-30T23:40:18.475Z",
        "text_omitted": False,
        "data": {"id": "1f0c", "object": "job", "status": "succeeded", "text": " \u2028 ü"},
    }
    assert event_body({**JOB, "webhook": {"attempts": [1, 2]}}, 1_796_082_018_475) == body


def test_an_event_has_a_bound_and_a_text_beyond_it_is_left_out() -> None:
    body = event_body({**JOB, "text": "ä" * MAX_EVENT_BYTES}, 0)
    assert len(body) < 1000
    event = json.loads(body)
    assert (event["text_omitted"], event["data"]["text"], event["data"]["id"]) == (True, None, "1f0c")


def test_each_secret_signs_so_that_one_can_take_the_other_s_place() -> None:
    now = datetime.now(UTC)
    body = event_body(JOB, 0)
    headers = dict(signed_headers([SECRET, OTHER_SECRET], "evt_1f0c", body, now))
    for secret in (SECRET, OTHER_SECRET):
        assert Webhook(secret).verify(body, headers)["id"] == "evt_1f0c"
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + "A" * 43 + "=").verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body.replace(b"1f0c", b"1f0d"), headers)


# --- when again -------------------------------------------------------------------------------------------------------


def test_waits_double_up_to_an_hour_and_are_drawn_from_their_upper_half() -> None:
    for number, longest in ((1, 5), (2, 10), (3, 20), (10, 2560), (11, 3600), (1000, 3600)):
        waits = {wait_before_next(number, 5) for _ in range(200)}
        assert longest / 2 <= min(waits) < max(waits) <= longest
        assert len(waits) > 100, "what failed together does not come back together"


def test_a_receiver_that_asks_for_time_gets_it() -> None:
    assert wait_before_next(1, 5, 120) == 120
    assert wait_before_next(10, 5, 120) >= 1280


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        ("0", 0),
        ("", 0),
        ("soon", 0),
        ("-5", 0),
        ("1.5", 0),
        ("9" * 400, 86400),
        ("Tue, 01 Dec 2026 00:01:00 GMT", 60),
        ("Mon, 30 Nov 2026 00:00:00 GMT", 0),
        ("Tue, 01 Dec 2026 00:01:00", 60),
        ("Tue, 99 Dec 2026 00:01:00 GMT", 0),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(header: str, seconds: float) -> None:
    assert retry_after_seconds(header, datetime(2026, 12, 1, tzinfo=UTC)) == seconds


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_answer_has_its_share_and_no_more() -> None:
    hosts = Hosts(2)
    with hosts.enter("slow", "a") as first, hosts.enter("slow", "b") as second:
        assert (first, second) == (0, 0)
        with hosts.enter("slow", "c") as third, hosts.enter("other", "d") as other:
            assert third > 0
            assert other == 0
    with hosts.enter("slow", "c") as again:
        assert again == 0


def test_what_is_put_off_comes_back_one_after_the_other() -> None:
    hosts = Hosts(1)
    with hosts.enter("slow", "first"):
        waits = [put_off(hosts, str(number)) for number in range(50)]
        assert waits == sorted(waits)
        assert waits[-1] > 10 * waits[0]
        assert [put_off(hosts, str(number)) for number in range(50)] == [waits[-1]] * 50, "each counts once"


def put_off(hosts: Hosts, job: str) -> float:
    with hosts.enter("slow", job) as wait_s:
        return wait_s
