"""Finding the daemon, and the key for it."""

from pathlib import Path

import pytest

from rollmuxd.client.discovery import find, misspelt, need
from rollmuxd.client.errors import NoDaemon, RollmuxError


def test_the_url_in_the_environment_decides():
    found = find(environ={"ROLLMUX_URL": "http://box:8811/", "ROLLMUX_SOCKET": "/there.sock"})

    assert found.address.base_url == "http://box:8811"
    assert found.address.socket is None


def test_an_argument_beats_the_environment():
    assert find("http://other:1", environ={"ROLLMUX_URL": "http://box:8811"}).address.base_url == "http://other:1"


def test_a_unix_url_names_a_socket():
    assert find("unix:///run/my%20daemon.sock", environ={}).address.socket == "/run/my daemon.sock"


def test_without_a_url_the_first_socket_that_exists_is_taken(tmp_path):
    second = tmp_path / "rollmux" / "rollmux.sock"
    second.parent.mkdir()
    second.touch()

    found = find(environ={"ROLLMUX_SOCKET": str(tmp_path / "none.sock"), "XDG_RUNTIME_DIR": str(tmp_path)})

    assert found.address.socket == str(second)
    assert str(tmp_path / "none.sock") in found.looked


def test_the_state_directory_of_the_home_is_looked_at_too(tmp_path):
    socket = tmp_path / ".local/state/rollmux/rollmux.sock"
    socket.parent.mkdir(parents=True)
    socket.touch()

    assert find(environ={"HOME": str(tmp_path)}).address.socket == str(socket)


def test_where_there_is_none_the_error_says_where_we_looked_and_what_to_do(tmp_path):
    with pytest.raises(NoDaemon) as raised:
        need(environ={"ROLLMUX_SOCKET": "/nowhere/a.sock", "HOME": str(tmp_path)})

    for part in ("/nowhere/a.sock", str(tmp_path), "/run/rollmux/rollmux.sock", "rollmuxd daemon start", "ROLLMUX_URL"):
        assert part in str(raised.value)


@pytest.mark.parametrize(("variable", "there"), [("ROLLMUX_SOCKET", True), ("XDG_RUNTIME_DIR", False), ("HOME", False)])
def test_a_directory_that_is_closed_to_this_user_hides_a_daemon_unless_it_is_somebodys_home(
    monkeypatch, tmp_path, variable, there
):
    """Whoever is not let in must not run alone beside those who are; HOME and the like outlive a change of user."""
    closed = tmp_path / "closed"
    really = Path.stat

    def stat(path, **more):
        if path.is_relative_to(closed):
            raise PermissionError(13, "Permission denied")
        return really(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    value = closed / "a.sock" if variable == "ROLLMUX_SOCKET" else closed

    found = find(environ={"HOME": str(tmp_path / "home"), variable: str(value)})

    assert (found.address is not None) == there


def test_off_means_that_there_is_none_whatever_exists(tmp_path):
    (tmp_path / "d.sock").touch()

    found = find(environ={"ROLLMUX_URL": "off", "ROLLMUX_SOCKET": str(tmp_path / "d.sock")})

    assert found.address is None
    assert found.off


@pytest.mark.parametrize("url", ["box:8811", "ftp://box", "http://", "http://box:port", "unix://"])
def test_what_is_no_address_is_named_with_the_cure(url):
    with pytest.raises(RollmuxError, match="write "):
        find(url, environ={})


def test_the_key_comes_from_the_environment_then_a_named_file_then_the_default_file(tmp_path):
    named, default = tmp_path / "key", tmp_path / ".config/rollmux/key"
    default.parent.mkdir(parents=True)
    named.write_text("named\n")
    default.write_text("default\n")
    environ = {"HOME": str(tmp_path), "ROLLMUX_API_KEY_FILE": str(named), "ROLLMUX_API_KEY": "env"}

    assert find("http://box:1", environ=environ).address.api_key == "env"
    del environ["ROLLMUX_API_KEY"]
    assert find("http://box:1", environ=environ).address.api_key == "named"
    del environ["ROLLMUX_API_KEY_FILE"]
    assert find("http://box:1", environ=environ).address.api_key == "default"


def test_on_the_unix_socket_the_uid_speaks_and_the_default_key_is_not_sent(tmp_path):
    default = tmp_path / ".config/rollmux/key"
    default.parent.mkdir(parents=True)
    default.write_text("default\n")

    assert find("unix:///d.sock", environ={"HOME": str(tmp_path)}).address.api_key is None


def test_a_key_file_that_was_named_must_be_there():
    with pytest.raises(RollmuxError, match="ROLLMUX_API_KEY_FILE=/no/such: No such file"):
        find("http://box:1", environ={"ROLLMUX_API_KEY_FILE": "/no/such"})


@pytest.mark.parametrize("given", ["rmx_1_aaa\nrmx_2_bbb", "rmx_1_\u2026", "the key: rmx_1_aaa"])
def test_what_is_more_than_a_key_is_refused_and_not_shown(tmp_path, given):
    """In a header it ends in an error of the HTTP client's, which shows the key, or is no error that a command says."""
    named = tmp_path / "key"
    named.write_text(given, encoding="utf-8")

    for environ in ({"ROLLMUX_API_KEY": given}, {"ROLLMUX_API_KEY_FILE": str(named)}):
        with pytest.raises(RollmuxError, match="another character that no key has; write the key alone") as refused:
            find("http://box:1", environ=environ)
        assert "rmx_1" not in str(refused.value)


def test_an_address_in_a_message_does_not_give_the_key_away():
    assert "secret" not in f"{find('http://box:1', 'secret', environ={}).address}"


def test_variables_that_nothing_reads_are_named_with_the_nearest():
    environ = {
        "ROLLMUX_APIKEY": "x", "ROLLMUX_GIVEUP_S": "1", "ROLMUX_URL": "off", "ROLLMUX_REQUIERD": "1",
        # these are read, or somebody else's
        "ROLLMUX_URL": "off", "ROLLMUX_DAEMON__LISTEN": "x", "ROLLMUX_MY_OWN_THING": "1", "ROLE": "x", "PATH": "",
    }  # fmt: skip

    assert misspelt(environ) == [
        ("ROLLMUX_APIKEY", "ROLLMUX_API_KEY"),
        ("ROLLMUX_GIVEUP_S", "ROLLMUX_GIVE_UP_S"),
        ("ROLLMUX_REQUIERD", "ROLLMUX_REQUIRED"),
        ("ROLMUX_URL", "ROLLMUX_URL"),
    ]
