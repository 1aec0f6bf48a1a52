import errno
import os
import secrets
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.coordinator import handshake as module
from foretrain.comm.coordinator.addresses import local_address
from foretrain.comm.coordinator.handshake import Listener, connect
from foretrain.comm.coordinator.link import BODY_LIMIT, Link, LinkError, LinkMessage
from foretrain.errors import ConfigError
from tests.comm.collectives.test_ring import nothing_is_left_behind
from tests.waiting import until

__all__ = ["nothing_is_left_behind"]

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
PATIENCE = 300.0
"""Seconds until a test that hangs fails instead."""


@contextmanager
def beside(call, *arguments, **named):
    """A call that runs in another thread; gone, whatever happens, at the end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *arguments, **named)


@contextmanager
def linked(**named):
    """Both ends of an authenticated link: the listener's, and that of rank 1."""
    with Listener("127.0.0.1", SECRET, expected=[1], **named) as listener:
        with beside(connect, listener.address, SECRET, 1, PATIENCE, **named) as other:
            ours = listener.accept(PATIENCE)[1]
        with closing(ours), closing(other.result()) as theirs:
            yield ours, theirs


@contextmanager
def wired():
    """A link, and the bare socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare = socket.create_connection(server.getsockname())
        with bare, closing(Link(server.accept()[0], 7)) as ours:
            yield ours, bare


def receive(ours, count):
    """Exactly so many messages."""
    got = []
    while len(got) < count:
        more = ours.receive(PATIENCE)
        assert more, f"only {len(got)} of {count} messages came"
        got += more
    assert len(got) == count
    return got


def flood(ours, size=0):
    """Send until the link ends; TCP takes the first messages even when nobody is there."""
    while True:
        ours.send(1, body=bytes(size))


def drain(ours):
    """Receive until the link ends."""
    while ours.receive(PATIENCE):
        pass
    raise AssertionError("the link neither speaks nor ends")


def frame(kind, flag, value, body):
    return struct.pack("<BBHII", kind, flag, 0, value, len(body)) + body


# Messages


def test_a_message_arrives_as_it_was_sent():
    with linked() as (ours, theirs):
        assert (ours.peer, theirs.peer) == (1, 0)
        ours.send(3, 4, 5, b"six")
        theirs.send(254, 255, 2**32 - 1)
        assert theirs.receive(PATIENCE) == [LinkMessage(3, 4, 5, b"six")]
        assert ours.receive(None) == [LinkMessage(254, 255, 2**32 - 1, b"")]
        assert ours.receive(0.01) == ours.receive(0) == ours.read() == []


def test_an_echo_is_no_message():
    with linked() as (ours, theirs):
        theirs.expect_losses()
        for value in range(3):
            theirs.send(1, 0, value)
        assert [message.value for message in receive(ours, 3)] == [0, 1, 2]
        assert ours.receive(0.01) == []
        with pytest.raises(ConfigError, match="kind: 255 is the link's own"):
            ours.send(255)


@pytest.mark.parametrize("size", [65_524, 65_525, BODY_LIMIT])
def test_large_bodies_arrive(size):
    body = secrets.token_bytes(size)
    with linked() as (ours, theirs), beside(theirs.send, 1, body=body) as sent:
        assert receive(ours, 1) == [LinkMessage(1, 0, 0, body)]
        sent.result()


def test_messages_of_several_threads_keep_whole_and_in_order():
    threads, each = 4, 500
    with linked() as (ours, theirs):

        def work(thread):
            for number in range(each):
                theirs.send(thread, 0, number, bytes([thread]) * (number % 97 + 20_000 * (number % 50 == 0)))

        with ThreadPoolExecutor(threads) as pool:
            done = [pool.submit(work, thread) for thread in range(threads)]
            got = receive(ours, threads * each)
            for future in done:
                future.result()
    assert all(set(message.body) <= {message.kind} for message in got)
    for thread in range(threads):
        assert [message.value for message in got if message.kind == thread] == list(range(each))


messages = st.builds(
    LinkMessage, st.integers(0, 254), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=40)
)


@settings(max_examples=50)
@given(st.lists(messages, max_size=8), st.lists(st.integers(0, 500)))
def test_messages_do_not_depend_on_how_the_bytes_are_cut(sent, cuts):
    data = b"".join(frame(each.kind, each.flag, each.value, each.body) for each in sent)
    with wired() as (ours, bare):
        got = []
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
            bare.sendall(data[start:stop])
            got += ours.read()
        got += receive(ours, len(sent) - len(got))
    assert got == sent


def test_fields_that_do_not_fit_the_header_are_refused():
    with linked() as (ours, theirs):
        for fields in [(256, 0, 0), (-1, 0, 0), (0, 256, 0), (0, 0, 2**32)]:
            with pytest.raises(ConfigError, match="does not fit"):
                ours.send(*fields)
        with pytest.raises(ConfigError, match="too large"):
            ours.send(0, body=bytes(BODY_LIMIT + 1))
        ours.send(1)
        assert receive(theirs, 1) == [LinkMessage(1, 0, 0, b"")]


# The end of a link


def test_messages_before_the_end_are_received_before_the_error():
    with linked() as (ours, theirs):
        theirs.send(1)
        theirs.close()
        assert receive(ours, 1)
        for _ in range(2):
            with pytest.raises(LinkError, match="link to rank 1 is closed: the peer ended it;") as caught:
                ours.receive(PATIENCE)
            assert caught.value.peer == 1
        with pytest.raises(LinkError, match="closed"):
            ours.read()
        with pytest.raises(LinkError, match="closed"):
            flood(ours)


@pytest.mark.parametrize(("linger", "reason"), [(0, "middle of a message"), (1, "reset")])
def test_an_end_in_the_middle_of_a_message_and_a_reset_are_told(linger, reason):
    with wired() as (ours, bare):
        bare.sendall(frame(1, 2, 3, b"four")[:-1])
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
        bare.close()
        with pytest.raises(LinkError, match=reason):
            ours.receive(PATIENCE)


def announced(size, reserved=0):
    return struct.pack("<BBHII", 1, 0, reserved, 0, size)


@pytest.mark.parametrize("bad", [announced(BODY_LIMIT + 1), announced(2**32 - 1), announced(0, reserved=1)])
def test_a_malformed_message_ends_the_link_after_earlier_messages(bad):
    with wired() as (ours, bare):
        bare.sendall(frame(1, 2, 3, b"good") + bad)
        assert receive(ours, 1) == [LinkMessage(1, 2, 3, b"good")]
        with pytest.raises(LinkError, match="no message"):
            ours.receive(PATIENCE)
        with pytest.raises(LinkError, match="no message"):
            ours.send(1)
        bare.settimeout(PATIENCE)
        assert bare.recv(1) == b""


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_on_a_link_are_messages_or_a_link_error(data):
    with wired() as (ours, bare):
        bare.sendall(data)
        bare.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError):
            drain(ours)


@pytest.mark.parametrize("sends", [True, False])
def test_close_wakes_a_blocked_call(sends):
    with linked() as (ours, _), beside(*((flood, ours, 1 << 20) if sends else (ours.receive, None))) as blocked:
        time.sleep(0.05)  # the call is probably blocked by now; it raises in any case
        ours.close()
        with pytest.raises(LinkError, match="closed on this side"):
            blocked.result(PATIENCE)
        ours.close()
        assert ours.fileno() == -1
        for call in (ours.read, lambda: ours.receive(1), lambda: ours.send(1)):
            with pytest.raises(LinkError, match="closed on this side"):
                call()


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_peer_that_reads_nothing_ends_the_link(size):
    with linked(send_timeout=0.2) as (ours, theirs):
        with pytest.raises(LinkError, match="takes nothing"):
            flood(ours, size)
        with pytest.raises(LinkError, match="takes nothing"):
            ours.send(1)
        with pytest.raises(LinkError, match="closed"):  # what is whole is received, the half message is not
            drain(theirs)


def test_a_selector_says_when_to_read_and_wakes_at_a_shutdown():
    with linked() as (ours, theirs), module.selectors.DefaultSelector() as selector:
        selector.register(ours, module.selectors.EVENT_READ)
        theirs.send(1)
        assert selector.select(PATIENCE)
        assert ours.read() == [LinkMessage(1, 0, 0, b"")]
        assert selector.select(0) == []
        with beside(selector.select, PATIENCE) as blocked:
            ours.shutdown()
            assert blocked.result(PATIENCE)
        with pytest.raises(LinkError, match="closed on this side"):
            ours.read()


def test_a_forked_child_has_no_part_in_a_link():
    with linked() as (ours, theirs), beside(ours.receive, PATIENCE) as received:
        child = os.fork()
        if not child:
            # Its copies of the locks may be held by a thread that only the parent has.
            ours.close()
            try:
                theirs.send(1)
            except LinkError as error:
                told = "belongs to the process that was forked" in str(error)
                os._exit(0 if told and ours.fileno() == theirs.fileno() == -1 else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        theirs.send(1)
        assert received.result() == [LinkMessage(1, 0, 0, b"")]


# Who is let in


def test_every_expected_rank_is_accepted_under_its_own_number():
    ranks = range(1, 9)
    with Listener("127.0.0.1", SECRET, expected=ranks) as listener, ThreadPoolExecutor(8) as pool:
        waiting = {rank: pool.submit(connect, listener.address, SECRET, rank, PATIENCE) for rank in ranks}
        links = listener.accept(PATIENCE)
        theirs = {rank: future.result() for rank, future in waiting.items()}
    assert links.keys() == set(ranks)
    for rank in ranks:
        theirs[rank].send(9, value=rank)
        assert receive(links[rank], 1)[0].value == rank == links[rank].peer
        theirs[rank].close()
        links[rank].close()
    assert listener.refused == 0


def test_accept_returns_the_present_ranks_and_goes_on_when_called_again():
    with Listener("127.0.0.1", SECRET, expected=[]) as listener:
        assert listener.accept(PATIENCE) == {}
    with Listener("127.0.0.1", SECRET, expected=[1, 2]) as listener:
        assert listener.accept(0) == {}
        with beside(connect, listener.address, SECRET, 2, PATIENCE) as other:
            while not (links := listener.accept(0.1)):
                assert not other.done()
        assert links.keys() == {2}
        with beside(connect, listener.address, SECRET, 1, PATIENCE) as another:
            both = listener.accept(PATIENCE)
        assert both.keys() == {1, 2}
        assert both[2] is links[2]
        for each in (*both.values(), other.result(), another.result()):
            each.close()


@contextmanager
def unused():
    """An address where nobody listens, and which the system gives to no other process meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()


def test_a_rank_may_come_before_its_listener():
    with unused() as address, beside(connect, address, SECRET, 1, PATIENCE) as early:
        time.sleep(0.1)
        with Listener("127.0.0.1", SECRET, port=address[1], expected=[1]) as listener:
            assert listener.address == address
            links = listener.accept(PATIENCE)
        links[1].close()
        early.result().close()


@contextmanager
def open_to_strangers(expected=(1,), last=(1,)):
    """A listener that accepts in another thread until it has everybody; the ``last`` are let in at the end."""
    with Listener("127.0.0.1", SECRET, expected=expected) as listener:
        with beside(listener.accept, PATIENCE) as accepted:
            yield listener
            for rank in last:
                connect(listener.address, SECRET, rank, PATIENCE).close()
        links = accepted.result()
        assert links.keys() == set(expected)
        for each in links.values():
            each.close()


@pytest.mark.parametrize(
    ("secret", "rank", "reason"),
    [(OTHER, 1, "it does not know the job's secret"), (SECRET, 2**32 - 1, "rank 4294967295 is not expected")],
)
def test_a_wrong_secret_or_rank_is_refused_and_logged(caplog, secret, rank, reason):
    with open_to_strangers() as listener:
        with pytest.raises(LinkError, match=rf"rank {rank} is not linked .*refused us.*does not expect"):
            connect(listener.address, secret, rank, PATIENCE)
        until(lambda: listener.refused == 1)
    (record,) = caplog.records
    assert record.name == "foretrain.link"
    assert "127.0.0.1" in record.getMessage()
    assert record.getMessage().endswith(reason)
    for secret in (SECRET, OTHER):
        assert secret.hex() not in caplog.text
        assert repr(secret) not in caplog.text


def test_a_second_process_of_the_same_rank_is_refused(caplog):
    with open_to_strangers(expected=(1, 2), last=(2,)) as listener:
        first = connect(listener.address, SECRET, 1, PATIENCE)
        with pytest.raises(LinkError, match="has linked it already"):
            connect(listener.address, SECRET, 1, PATIENCE)
        until(lambda: listener.refused == 1)
        first.send(5)
        until(lambda: 1 in listener._links)
        assert receive(listener._links[1], 1)[0].kind == 5
        first.close()
    assert "rank 1 is here already" in caplog.text


def test_a_replayed_handshake_is_refused():
    with open_to_strangers() as listener, socket.create_server(("127.0.0.1", 0)) as tap:
        # The handshake of a good rank, which a tap passes on until it has seen the answer and keeps.
        with beside(connect, tap.getsockname(), SECRET, 1, PATIENCE) as good:
            with tap.accept()[0] as towards_rank, socket.create_connection(listener.address) as towards_listener:
                towards_rank.sendall(towards_listener.recv(40, socket.MSG_WAITALL))
                answer = towards_rank.recv(68, socket.MSG_WAITALL)
            with pytest.raises(LinkError):
                good.result()
        assert len(answer) == 68
        until(lambda: listener.refused == 1)
        with socket.create_connection(listener.address) as thief:
            thief.settimeout(PATIENCE)
            thief.sendall(answer)
            assert len(thief.recv(4096, socket.MSG_WAITALL)) == 40  # the challenge, and then the end
        until(lambda: listener.refused == 2)


def test_silent_connections_block_no_rank_and_are_refused_in_time(monkeypatch, caplog):
    """Also when they are more than may be pending at once: a rank then waits until some are refused."""
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT", 1.0)
    monkeypatch.setattr(module, "PENDING_LIMIT", 2)
    with open_to_strangers(expected=(1, 2), last=(2,)) as listener:
        silent = [socket.create_connection(listener.address) for _ in range(3)]
        connect(listener.address, SECRET, 1, PATIENCE).close()
        until(lambda: listener.refused == 3)
        for each in silent:
            each.close()
    assert caplog.text.count("did not say who it is within 1 s") == 3


def test_a_closed_listener_ends_pending_handshakes_and_links_that_accept_has_not_returned():
    with Listener("127.0.0.1", SECRET, expected=[1]) as listener:
        with socket.create_connection(listener.address) as silent, ThreadPoolExecutor(1) as pool:
            other = pool.submit(connect, listener.address, SECRET, 1, PATIENCE)
            # As accept, up to where an interrupt may end it before it has returned.
            while not (listener._links and listener._pending):
                for key, _ in listener._selector.select():
                    listener._hear(key.data) if key.data else listener._greet()
            listener.close()
            silent.settimeout(PATIENCE)
            assert len(silent.recv(4096)) == 40
            assert silent.recv(1) == b""
        listener.close()
    assert listener.refused == 1
    with closing(other.result()) as theirs, pytest.raises(LinkError, match="closed"):
        theirs.receive(PATIENCE)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_arbitrary_bytes_are_refused_and_expected_ranks_accepted(throws):
    with open_to_strangers() as listener:
        for data in throws:
            with socket.create_connection(listener.address) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
        until(lambda: listener.refused == len(throws))
        assert listener.refused == len(throws)


# Whom a rank believes


@contextmanager
def answering(*parts):
    """An address where somebody says these bytes, or what a function makes of the answer, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work():
            with server.accept()[0] as accepted:
                for part in parts:
                    accepted.sendall(part if isinstance(part, bytes) else part(accepted.recv(68, socket.MSG_WAITALL)))
                if len(parts) < 2:
                    accepted.settimeout(PATIENCE)
                    accepted.recv(1)

        with beside(work) as done:
            yield server.getsockname()
            done.result()


NONCE = bytes(32)
CHALLENGE = b"ftlink1\n" + NONCE


def prove(secret):
    def proof(answer):
        rank, theirs, _ = struct.unpack("<I32s32s", answer)
        return module._link_proof(secret, module._LISTENER_ROLE, rank, theirs, NONCE)

    return proof


@pytest.mark.parametrize("proof", [prove(OTHER), lambda answer: answer[-32:], lambda _: bytes(32)])
def test_a_listener_that_does_not_know_the_secret_is_not_believed(proof):
    with (
        answering(CHALLENGE, proof) as address,
        pytest.raises(LinkError, match=r"rank 1 is not linked to 127\.0\.0\.1:\d+: .*does not know the job's secret"),
    ):
        connect(address, SECRET, 1, PATIENCE)


@pytest.mark.parametrize(
    ("parts", "timeout", "reason"),
    [
        ([b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"], PATIENCE, "no foretrain listener"),
        ([b"220 hello\r\n"], 0.3, "did not answer"),
        ([b"", b""], PATIENCE, "hung up"),
    ],
)
def test_another_service_is_no_listener(parts, timeout, reason):
    with answering(*parts) as address, pytest.raises(LinkError, match=reason):
        connect(address, SECRET, 1, timeout)


def test_where_nobody_listens_a_rank_gives_up_in_time():
    said = r"rank 3 cannot connect to 127\.0\.0\.1:\d+: .*refused.*waited 0.2 s"
    with unused() as address, pytest.raises(LinkError, match=said):
        connect(address, SECRET, 3, 0.2)
    with pytest.raises(LinkError, match=r"cannot connect to no-such-host\.invalid:1"):
        connect(("no-such-host.invalid", 1), SECRET, 1, 1.0)


def test_a_network_that_comes_a_moment_later_is_waited_for(monkeypatch):
    class Unreachable(socket.socket):
        left = 3

        def connect(self, address):
            Unreachable.left -= 1
            if Unreachable.left > 0:
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
            super().connect(address)

    with unused() as address:
        monkeypatch.setattr(module.socket, "socket", Unreachable)
        with pytest.raises(LinkError, match="refused"):
            connect(address, SECRET, 1, 0.2)
    assert Unreachable.left <= 0


def test_a_port_dialled_from_itself_is_not_a_listener(monkeypatch):
    class FromItself(socket.socket):
        """Binds to the port it will dial: TCP connects it to itself."""

        def connect(self, address):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            super().connect(address)

    with unused() as address:
        monkeypatch.setattr(module.socket, "socket", FromItself)
        with pytest.raises(LinkError, match="refused"):
            connect(address, SECRET, 1, 0.05)


# What the caller got wrong


def test_a_short_secret_is_refused_and_not_shown():
    for call in (lambda: Listener("127.0.0.1", b"hush", expected=[]), lambda: connect(("127.0.0.1", 1), b"hush", 1, 1)):
        with pytest.raises(ConfigError, match="secret: '4 bytes' is too short") as caught:
            call()
        assert "hush" not in str(caught.value)


def test_addresses_that_cannot_be_listened_on_and_ranks_that_are_none_are_refused():
    for host in ("", "0.0.0.0"):
        with pytest.raises(ConfigError, match="every address"):
            Listener(host, SECRET, expected=[1])
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0' cannot be listened on"):
        Listener("192.0.2.1", SECRET, expected=[1])
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        Listener("127.0.0.1", SECRET, port=taken.getsockname()[1], expected=[1])
    for rank in (-1, 2**32):
        with pytest.raises(ConfigError, match="is not a rank"):
            connect(("127.0.0.1", 1), SECRET, rank, 1)


# Which address to listen on

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_interface_in_the_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_the_address_is_an_interface_s_or_the_one_a_host_is_reached_from():
    assert local_address("lo", ("192.0.2.1", 1)) == "127.0.0.1"
    assert local_address(None, ("127.0.0.1", 9)) == "127.0.0.1"
    assert local_address(None, ("::1", 9)) in ("::1", "127.0.0.1")  # the latter where there is no IPv6
    assert local_address(None, ("no-such-host.invalid", 9)) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"interface: 'nope0' is no interface .*lo \(127\.0\.0\.1\)"):
        local_address("nope0", None)


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_environment_names_an_interface(monkeypatch, variable):
    for pattern in ("^docker0", "=nope0", "nope0,nope1", "nope0:1", ""):
        monkeypatch.setenv(variable, pattern)
        assert local_address(None, None) == "127.0.0.1"
    monkeypatch.setenv(variable, "lo")
    assert local_address(None, ("192.0.2.1", 1)) == "127.0.0.1"
    monkeypatch.setenv(variable, "nope0")
    with pytest.raises(ConfigError, match=f"{variable}: 'nope0'"):
        local_address(None, None)
