"""What tests are made of keeps its promises, too."""

import socket

import pytest
from networks import free_port


def test_a_free_port_is_given_to_nothing_else_and_a_server_can_take_it():
    port = free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", port))
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port)) as caller,
        server.accept()[0] as came,
    ):
        assert came.getpeername() == caller.getsockname()
