"""How an argument vector gets through a login shell, whichever it is, and how its process is known afterwards."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

#: between single quotes these mean themselves in every shell (sh, bash, zsh, fish, csh)
_PLAIN: Final = re.compile(r"[A-Za-z0-9 _@%+=:,./\"$*&()\[\]{}<>|;?~^#`-]*")

#: Says that the program is there and which process it will be, and becomes it. Its own input is the command's.
_BECOME: Final = (
    'm=$1; shift; if command -v -- "$1" >/dev/null 2>&1; then printf "%s %s\\n" "$m" $$; exec "$@"; fi; '
    'printf "%s no\\n" "$m"'
)


def mark() -> str:
    """What marks a line of output as ours: a login shell may say things of its own."""
    return f"rollmuxd-{secrets.token_hex(8)}"


def command(argv: Sequence[str], env: Mapping[str, str], mark: str) -> str:
    """A line for the login shell that runs an argument vector, after a line of output: ``mark`` and the pid, or "no".

    Raises ValueError where there are NUL bytes, or no name of a program.
    """
    if not argv or any("\0" in part for part in (*argv, *env, *env.values())):
        raise ValueError("a command needs the name of its program, and can have no NUL in its arguments")
    if bad := [name for name in env if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]:
        raise ValueError(f"{bad[0]!r} is no name of a variable")
    exports = "".join(f"export {name}={_quoted(value)}; " for name, value in env.items())
    script = f"{exports}set -- {' '.join(map(_quoted, (mark, *argv)))}; {_BECOME}"
    # The script is for sh. What the login shell would read in its own way is written in octal.
    octal = "".join(f"\\0{byte:03o}" for byte in script.encode("utf-8", "surrogateescape"))
    return f"exec sh -c 'eval \"$(printf %b \"$0\")\"' '{octal}'"


def plain(argv: Sequence[str]) -> str:
    """A line for the login shell; only for words that every shell reads alike. Raises ValueError for others."""
    if strange := [word for word in argv if not _PLAIN.fullmatch(word)]:
        raise ValueError(f"{strange[0]!r} would not get through every shell")
    return "exec " + " ".join(f"'{word}'" for word in argv)


def _quoted(word: str) -> str:
    """For sh."""
    return "'" + word.replace("'", "'\\''") + "'"
