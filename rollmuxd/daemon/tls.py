"""The certificate of the TCP port: the one that the settings name, or one of the daemon's own, made at its first start.

The own one is signed by itself. Clients trust it as a CA file (``ROLLMUX_CA_FILE``), whose path the daemon prints.
``openssl`` makes it, once: a library for it would be a dependency of every daemon, for one file in ten years
(docs/decisions/0012).
"""

import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from rollmuxd.daemon.settings import Settings, is_address, split_address

#: the own certificate's life: nothing renews it
DAYS: Final = 3650
MAKE_S: Final = 30.0


class NoTls(Exception):
    """TLS is asked for, and cannot be had as things are; says the remedy."""


class Tls(NamedTuple):
    """What the TCP port needs, and what clients need to know."""

    context: ssl.SSLContext
    certificate: Path


def open_tls(settings: Settings) -> Tls | None:
    """The certificate, made if there is none yet; None where the port is without TLS.

    Raises:
        NoTls: a file is missing or unusable, or there is no openssl.
    """
    if not settings.uses_tls:
        return None
    certificate, key = settings.tls.certificate, settings.tls.key
    if certificate is None or key is None:
        folder = settings.daemon.state_dir.absolute() / "tls"
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        if not certificate.exists() or not key.exists():
            make_own(certificate, key, names_of(settings))
    return read_tls(certificate, key)


def read_tls(certificate: Path, key: Path) -> Tls:
    """What is in these files. Raises NoTls."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_encrypted)
        return Tls(context, certificate)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else error
        raise NoTls(
            f"tls: {certificate} with {key}: {why}; both have to be PEM files that the daemon's user can read, "
            "the key without a password"
        ) from error


def names_of(settings: Settings) -> list[str]:
    """The names and addresses that the own certificate is for."""
    host, _ = split_address(settings.daemon.listen)
    listens = [host] if host not in ("0.0.0.0", "::") else []  # noqa: S104  # "everywhere" is no name
    own = dict.fromkeys((*settings.tls.names, *listens, socket.gethostname(), socket.getfqdn()))
    return [*own, *(name for name in ("localhost", "127.0.0.1", "::1") if name not in own)]


def make_own(certificate: Path, key: Path, names: list[str]) -> None:
    """Make a key, and a certificate that it signs itself. Raises NoTls."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NoTls(
            "tls: no certificate is named, and openssl, which makes one, is not installed; install it, or set "
            "tls.certificate and tls.key to files of your own"
        )
    # What a certificate cannot hold as a name (a host called with an underscore or a space) is left out.
    sane = [name for name in names if is_address(name) or re.fullmatch(r"[A-Za-z0-9.*-]{1,253}", name)]
    subjects = ",".join(f"{'IP' if is_address(name) else 'DNS'}:{name}" for name in sane)
    config = (
        "[req]\ndistinguished_name=name\nx509_extensions=more\nprompt=no\n[name]\nCN=rollmuxd\n[more]\n"
        f"subjectAltName={subjects}\nbasicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=serverAuth\nsubjectKeyIdentifier=hash\n"
    )
    words = [
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256"),
        *("-days", str(DAYS), "-config", "/dev/stdin"),
    ]
    beside = [path.with_suffix(".new") for path in (key, certificate)]
    try:
        key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in beside:
            path.unlink(missing_ok=True)
        done = subprocess.run(
            [*words, "-keyout", str(beside[0]), "-out", str(beside[1])],
            input=config,
            capture_output=True,
            text=True,
            timeout=MAKE_S,
            umask=0o177,  # no other user can read the key, not for a moment
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise NoTls(f"tls: openssl could not make a certificate: {last}; set tls.certificate and tls.key instead")
        beside[1].chmod(0o644)
        beside[0].replace(key)
        beside[1].replace(certificate)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoTls(f"tls: cannot make {certificate}: {error}; set tls.certificate and tls.key instead") from error


def _encrypted() -> str:
    raise ValueError("the key has a password, which the daemon cannot enter")
