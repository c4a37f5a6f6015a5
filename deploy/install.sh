#!/bin/sh
# Install rollmuxd from this checkout, or from a file of a release, in an environment of its own.
#
#   sh deploy/install.sh                 for yourself: ~/.local/share/rollmux, and a link in ~/.local/bin
#   sudo sh deploy/install.sh --system   for the machine: /opt/rollmux, a user, a service of systemd
#   sh deploy/install.sh FILE.whl        install that wheel (or FILE.tar.gz), and not this checkout
#   sh deploy/install.sh --dry-run       only print what it would do
#   sh deploy/install.sh --remove        undo it; settings and journals stay, and jobs no longer wait for a daemon
#
# PYTHON names the Python to use (3.11 or newer).
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
prefix=${XDG_DATA_HOME:-$HOME/.local/share}/rollmux
bin=$HOME/.local/bin
system=no
dry=no
remove=no
package=$here

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }
run() {
    if [ "$dry" = yes ]; then printf '  %s\n' "$*"; else "$@"; fi
}

for word in "$@"; do
    case $word in
        --system) system=yes; prefix=/opt/rollmux; bin=/usr/local/bin ;;
        --dry-run) dry=yes ;;
        --remove) remove=yes ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *.whl | *.tar.gz)
            [ -e "$word" ] || fail "there is no file $word; make dist builds one in dist/"
            package=$word ;;
        *) fail "$word is not an option; there are --system, --dry-run, --remove, and the file of a release" ;;
    esac
done

if [ "$remove" = yes ]; then
    if [ "$system" = yes ]; then
        run systemctl disable --now rollmuxd || say "the service was not running"
        run rm -f /etc/systemd/system/rollmuxd.service
        run systemctl daemon-reload
        run rm -rf /run/rollmux
    else
        if [ -x "$prefix/bin/rollmuxd" ]; then run "$prefix/bin/rollmuxd" daemon stop --for-good || say "no daemon was stopped"; fi
    fi
    run rm -f "$bin/rollmuxd"
    run rm -rf "$prefix"
    say "removed; settings and journals were left where they are"
    exit 0
fi

python=
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed, and none was found; name one: PYTHON=/path/to/python3 sh $0"
if [ "$system" = yes ] && [ "$dry" = no ] && [ "$(id -u)" -ne 0 ]; then
    fail "--system changes the machine: run it as root (sudo sh $0 --system)"
fi

say "$("$python" --version) into $prefix"
run "$python" -m venv "$prefix"
run "$prefix/bin/python" -m pip install --quiet --disable-pip-version-check -c "$here/constraints.txt" "${package}[daemon,demo,fast,ssh]"
run mkdir -p "$bin"
run ln -sf "$prefix/bin/rollmuxd" "$bin/rollmuxd"

if [ "$system" = yes ]; then
    id rollmux >/dev/null 2>&1 || run useradd --system --home-dir /var/lib/rollmux rollmux
    run mkdir -p /etc/rollmux
    [ -e /etc/rollmux/rollmux.toml ] || run cp "$here/rollmux.toml" /etc/rollmux/rollmux.toml
    run cp "$here/deploy/rollmuxd.service" /etc/systemd/system/rollmuxd.service
    run systemctl daemon-reload
    say "now list your hosts in /etc/rollmux/rollmux.toml, and then: systemctl enable --now rollmuxd"
else
    case ":$PATH:" in
        *":$bin:"*) ;;
        *) say "$bin is not on your PATH: add it in your shell's profile" ;;
    esac
    say "now: rollmuxd demo   (see it work), or docs/tutorial.md (two of your own jobs, five minutes)"
fi
