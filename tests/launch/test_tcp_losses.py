"""What the kernel counts of this process's TCP connections, and what that means for bounded loss."""

import socket

import pytest

from foretrain.launch.tcp_losses import loss_advice, sent_again


def test_the_kernel_counts_what_this_process_sends():
    again, before = sent_again()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            for _ in range(5):
                sender.sendall(b"x")
                assert receiver.recv(1) == b"x"
            now, sent = sent_again()
            assert sender.send(b"x") == 1  # looking at it has not closed it
    assert sent >= before + 5
    assert now >= again


@pytest.mark.parametrize(
    ("again", "sent", "recommended"), [(0, 0, False), (0, 1000, False), (1, 10_000, False), (10, 1000, True)]
)
def test_bounded_loss_is_recommended_only_where_packets_are_lost(again, sent, recommended):
    line = loss_advice(again, sent)
    assert ("compare with --tolerance" in line) == recommended
    assert ("is not recommended" in line) != recommended


def test_the_advice_says_the_share():
    assert loss_advice(12, 1000).startswith("1.20% of the packets went again over TCP")
