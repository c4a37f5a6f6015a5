"""Keys, and who is at the other end of a Unix socket."""

import os
import socket

import msgspec

from rollmuxd.daemon.access.keys import Role, fits, key_id_of, new_key, why_shut
from rollmuxd.daemon.http.peer import peer_of


def test_a_secret_fits_its_own_key_and_no_other():
    key, secret = new_key("team", "alice", Role.USER, 7)
    other, _ = new_key("team", "alice", Role.USER, 7)
    assert fits(key, secret)
    assert not fits(key, secret[:-1] + ("a" if secret[-1] != "a" else "b"))
    assert not fits(other, secret)


def test_a_key_opens_until_it_is_revoked_or_its_time_has_come():
    key, _ = new_key("team", "alice", Role.USER, 7, expires_at=100)
    assert why_shut(key, 99) == ""
    assert why_shut(key, 100) == "has expired"
    assert why_shut(msgspec.structs.replace(key, revoked_at=9), 10) == "was revoked"


def test_a_key_keeps_nothing_of_its_secret_but_the_id():
    key, secret = new_key("team", "alice", Role.USER, 7)
    assert key_id_of(secret) == key.id
    assert secret.split("_", 2)[2] not in str(key)


def test_a_higher_role_covers_the_lower_ones():
    assert [role for role in Role if Role.LEAD.covers(role)] == [Role.VIEWER, Role.USER, Role.LEAD]


def test_the_kernel_says_who_is_at_the_other_end_of_a_unix_socket():
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        peer = peer_of(here)
        assert peer is not None
        assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())


def test_a_tcp_socket_has_nobody_at_its_other_end_whom_the_kernel_knows():
    with socket.socket(socket.AF_INET) as tcp:
        assert peer_of(tcp) is None
    assert peer_of(None) is None
