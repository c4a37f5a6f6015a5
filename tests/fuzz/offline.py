"""Fuzzing without a daemon: what decodes calls, what reads the configuration, what opens a journal.

Each says what must not be, in its own words:

- a body or a query is decoded, or refused as 400 or 422; and what was decoded can be made into what the core takes,
  and into a fact that survives the journal;
- a configuration is loaded, or answered with the file and the key of each thing that is wrong;
- a damaged journal gives facts that were written, in their order from the first one on, or an error; nothing else.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import sqlite3
import string
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rollmuxd.core import facts as f
from rollmuxd.daemon.http import routing
from rollmuxd.daemon.http.app import ENDPOINTS
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routes.jobs import job_spec
from rollmuxd.daemon.journal.file import JournalError
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.settings import BadSettings, DefaultsTable, load_settings
from rollmuxd.wire.requests import RegisterBody, SessionBody

REPOSITORY = Path(__file__).parents[2]


class Found:
    """What was tried, and what was found."""

    def __init__(self) -> None:
        self.cases = 0
        self.answers: Counter[str] = Counter()
        self.server_errors = 0
        self.findings: list[str] = []

    def finding(self, what: str) -> None:
        """Something that must not be."""
        short = " ".join(what.split())[:1000]
        if len(self.findings) < 50 and not any(short[:100] == known[:100] for known in self.findings):
            self.findings.append(short)


def rounds(budget_s: float, start: int, least: int = 1):
    """Numbers for rounds, until the time is over; and for so many however long they take."""
    until = time.monotonic() + budget_s
    for number in itertools.count(start):
        if number >= start + least and time.monotonic() >= until:
            return
        yield number


def trying(number: int, examples: int = 50):
    """Hypothesis for one round: it shrinks nothing and remembers nothing."""

    def around(test):
        return seed(number)(
            settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(test)
        )

    return around


# ---- what is decoded -------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**30, 1e308, -0.0, 1e-320, 0.5])
)
WORDS = st.one_of(
    st.text(max_size=20), st.sampled_from(["rollout", "train", "j1", "1.1", "math\n", "a" * 300, "\x00", "é"])
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)


REGISTRATION = {
    "name": "math",
    "phases": [{"name": "rollout", "pools": ["rollout"]}],
    "wants": {"rollout": {"nodes": 1}},
    "states": {"rollout": {"gpu_gb": 1, "ram_gb": 1}},
}


def _as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _bent(value: Any, dice: random.Random, with_: Any) -> Any:
    """The value with one thing somewhere in it replaced."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice(list(value))
        return {**value, name: _bent(value[name], dice, with_)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        return [*value[:at], _bent(value[at], dice, with_), *value[at + 1 :]]
    return with_


def fuzz_wire(budget_s: float, start: int) -> Found:
    """Decode bodies and queries."""
    found = Found()
    bodies = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]
    queries = [endpoint for endpoint in ENDPOINTS if endpoint.query is not None]

    def decoded(endpoint, raw: bytes) -> Any:
        found.cases += 1
        try:
            body = routing._decode_body(endpoint.decoder, raw, optional=endpoint.body_optional)
        except Refusal as refusal:
            found.answers[str(refusal.kind.status)] += 1
            if refusal.kind.status not in (400, 422) or not refusal.detail:
                found.finding(f"{endpoint.format_path}: {refusal.kind.status} {refusal.detail!r} for {raw[:200]!r}")
            return None
        except Exception as error:
            found.finding(f"{endpoint.format_path}: {type(error).__name__}: {error} for {raw[:300]!r}")
            return None
        found.answers["decoded"] += 1
        return body

    def taken(body: Any, raw: bytes) -> None:
        """What comes of a body has to survive the journal."""
        try:
            match body:
                case RegisterBody():
                    spec = job_spec(body, DefaultsTable())
                    fact = f.JobRegistered(1, "j1", "o", "u", 1, spec, body.idempotency_key)
                case SessionBody():
                    fact = f.SessionOpened(1, "e1", "j1", 1, body.pid, body.host, body.started)
                case _:
                    reason = getattr(body, "reason", "")
                    fact = f.Audited(1, "a", "w", reason=reason)
            if f.decode(f.encode(fact)) != fact:
                found.finding(f"a fact of {raw[:300]!r} is another one when it comes out of the journal")
        except Exception as error:
            found.finding(f"{type(body).__name__}: {type(error).__name__}: {error} for {raw[:300]!r}")

    def one_round(number: int) -> None:
        dice = random.Random(number)

        @trying(number)
        @given(PLAIN, st.binary(max_size=60))
        def bodies_of(plain, rubbish):
            endpoint = dice.choice(bodies)
            whole = dict.fromkeys(field.name for field in msgspec.structs.fields(endpoint.body))
            ways = [
                _as_json(plain),
                _as_json(_bent(REGISTRATION, dice, plain)),
                _as_json({name: plain if dice.random() < 0.3 else "x" for name in whole}),
                _as_json({name: plain for name in whole if dice.random() < 0.5}),
                rubbish,
                b"[" * dice.randrange(3000),
            ]
            raw = dice.choice(ways)
            if dice.random() < 0.2 and raw:
                at = dice.randrange(len(raw))
                raw = raw[:at] + rubbish + raw[at:]
            for one in (endpoint, next(each for each in bodies if each.body is RegisterBody)):
                body = decoded(one, raw)
                if body is not None:
                    taken(body, raw)

        @trying(number)
        @given(PLAIN, st.binary(max_size=40), st.text(max_size=40))
        def queries_of(plain, rubbish, text):
            endpoint = dice.choice(queries)
            names = [field.name for field in msgspec.structs.fields(endpoint.query)]
            pairs = "&".join(f"{dice.choice(names)}={dice.choice([plain, text])}" for _ in range(dice.randrange(4)))
            raw = dice.choice([rubbish, pairs.encode("utf-8", "replace"), pairs.encode("ascii", "replace")])
            found.cases += 1
            try:
                routing._decode_query(endpoint.query, raw)
                found.answers["decoded"] += 1
            except Refusal as refusal:
                found.answers[str(refusal.kind.status)] += 1
            except Exception as error:
                found.finding(f"query of {endpoint.format_path}: {type(error).__name__}: {error} for {raw[:300]!r}")

        bodies_of()
        queries_of()

    for number in rounds(budget_s, start):
        one_round(number)
    return found


# ---- the configuration -----------------------------------------------------------------------------------------------

VALUES = (
    '""', "0", "-1", "1.5", "nan", "inf", "true", "[]", "{}", '"x"', "[1, 2]", "{a = 1}", "1979-05-27", '"\\u0000"',
    "99999999999999999999999", "1e400", '"0-3"', '"3-0"', "[[]]", "[{}]", '"é"', '"../../etc"', '"127.0.0.1:99999"',
    '"[::1]:80"', '"0777"', '"' + "x" * 300 + '"', "9223372036854775808", '["rollout"]', "[-1]", '"share"',
)  # fmt: skip


def _mangled(lines: list[str], dice: random.Random) -> str:
    lines = list(lines)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(lines))
        line = lines[at]
        match dice.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(dice.randrange(len(lines)), line)
            case 2 | 3 | 4:
                if "=" in line:
                    lines[at] = f"{line.partition('=')[0].lstrip('# ')}= {dice.choice(VALUES)}"
            case 5:
                lines[at] = line.lstrip("# ")
            case 6:
                if line:
                    spot = dice.randrange(len(line))
                    lines[at] = line[:spot] + dice.choice(string.printable + "é\x00") + line[spot + 1 :]
            case 7:
                names = "".join(dice.choice("ab.[]\"' ") for _ in range(4))
                lines.insert(at, dice.choice([f"[{names}]", f"[[{names}]]", f"{names} = 1", "[owners.x]", "[hosts]"]))
            case _:
                lines[at:] = []
        if not lines:
            lines = [""]
    return "\n".join(lines)


def fuzz_settings(budget_s: float, start: int, least: int = 1) -> Found:
    """Load mutations of the sample, with and without variables in the environment."""
    found = Found()
    sample = (REPOSITORY / "rollmux.toml").read_text().splitlines()
    bare = [line for line in sample if line and not line.startswith("#")]
    paths = (
        "LEASE__LEASE_S HOSTS OWNERS OWNERS__TEAM__MAX_JOBS DAEMON POLICY__ROLLMUX__PRUNE TLS__NAMES BACKENDS__MOCK X "
    )
    paths += "LOG__ HOSTS__0__ID __ OWNERS__ LEASE RESIDENCY__CHANNEL__A LIMITS__CALLS_PER_S TLS__CERTIFICATE"
    variables = [f"ROLLMUX_{path}" for path in paths.split()]
    kept = {name: value for name, value in os.environ.items() if name.startswith("ROLLMUX_")}
    with tempfile.TemporaryDirectory(prefix="rollmuxd-fuzz-") as folder:
        file = Path(folder) / "rollmux.toml"
        for number in rounds(budget_s, start, least):
            dice = random.Random(number)
            found.cases += 1
            text = _mangled(dice.choice([sample, bare]), dice)
            raw = text.encode("utf-8", "replace")
            if dice.random() < 0.05:
                raw = raw[: dice.randrange(len(raw) + 1)] + bytes(dice.randrange(256) for _ in range(5))
            file.write_bytes(raw)
            for name in [name for name in os.environ if name.startswith("ROLLMUX_")]:
                del os.environ[name]
            told = {}
            if dice.random() < 0.3:
                value = dice.choice([*VALUES, "[", '{"a": 1}', "[{}]"]).replace("\x00", "")
                told = {dice.choice(variables): value}
                os.environ.update(told)
            said = f"{told} and {text[-400:]!r}"
            try:
                settings_ = load_settings(file)
                settings_.to_core_config()
                settings_.to_start()
                settings_.policy_options()
                _ = settings_.uses_tls, settings_.daemon.socket_path
                for backend in {host.backend for host in settings_.hosts}:
                    settings_.host_configs(backend)
                found.answers["loaded"] += 1
            except BadSettings as error:
                found.answers["refused"] += 1
                for line in error.lines:
                    if not line.startswith((str(file), "environment: ")) or "Traceback" in line:
                        found.finding(f"neither file nor variable is named: {line!r} for {said}")
                    elif "\n" in line or len(line) > 1000:
                        found.finding(f"not one line: {line!r} for {said}")
            except Exception as error:
                found.finding(f"{type(error).__name__}: {error} for {said}")
        for name in [name for name in os.environ if name.startswith("ROLLMUX_")]:
            del os.environ[name]
        os.environ.update(kept)
    return found


# ---- journals --------------------------------------------------------------------------------------------------------


async def _written(folder: Path, facts: list[f.Fact]) -> None:
    journal = Journal.open(folder)
    for seq, fact in enumerate(facts, 1):
        await journal.append([(seq, fact)])
    await journal.close()


def _facts(dice: random.Random) -> list[f.Fact]:
    kinds = (
        lambda at: f.LoopStalled(at, dice.randrange(1000)),
        lambda at: f.Audited(at, "drain_node", "ops/op", reason=dice.choice(["", "new fans", "é\n"])),
        lambda at: f.HostRemoved(at, "box"),
    )
    return [dice.choice(kinds)(at) for at in range(dice.randrange(1, 30))]


def _damage(file: Path, dice: random.Random) -> str:
    """Damage a row, or the file; says how."""
    if dice.random() < 0.3:
        raw = bytearray(file.read_bytes())
        for _ in range(dice.randrange(1, 4)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        if dice.random() < 0.2:
            raw = raw[: dice.randrange(len(raw))]
        file.write_bytes(bytes(raw))
        return "bytes of the file"
    connection = sqlite3.connect(file)
    seqs = [row[0] for row in connection.execute("SELECT seq FROM facts ORDER BY seq")]
    seq = dice.choice(seqs)
    (body,) = connection.execute("SELECT body FROM facts WHERE seq = ?", (seq,)).fetchone()
    at = dice.randrange(len(body))
    ways = {
        "a byte of a body": (
            "UPDATE facts SET body = ? WHERE seq = ?",
            (body[:at] + chr(33 + dice.randrange(90)) + body[at + 1 :], seq),
        ),
        "a body cut": ("UPDATE facts SET body = ? WHERE seq = ?", (body[:at], seq)),
        "a body of another type": (
            "UPDATE facts SET body = ? WHERE seq = ?",
            (dice.choice([b"\xff\xfe", 7, 1.5, "", "null"]), seq),
        ),
        "a row lost": ("DELETE FROM facts WHERE seq = ?", (seq,)),
        "a row moved": (
            "UPDATE OR REPLACE facts SET seq = ? WHERE seq = ?",
            (dice.choice([*seqs, 99, -1, 2**40]), seq),
        ),
        "a row doubled": ("INSERT INTO facts SELECT max(seq) + 1, at, kind, body, sum FROM facts", ()),
        "a sum": ("UPDATE facts SET sum = ? WHERE seq = ?", (dice.choice([0, 1, -1, 2**40]), seq)),
        "the table lost": ("DROP TABLE facts", ()),
        "the format": (f"PRAGMA user_version = {dice.choice([0, 2, 99, -5])}", ()),
        "meta lost": ("DELETE FROM meta", ()),
        "meta bent": ("UPDATE meta SET value = ?", (dice.choice(["", "x", "-1", "1e9", "9" * 30]),)),
    }
    way = dice.choice(list(ways))
    statement, values = ways[way]
    try:
        connection.execute(statement, values)
        connection.commit()
    except sqlite3.Error:
        way = "nothing"
    connection.close()
    return way


async def _read_back(folder: Path) -> list[tuple[int, f.Fact]]:
    journal = Journal.open(folder)
    try:
        past = journal.load()
        return list(past.facts)
    finally:
        await journal.close()


def fuzz_journal(budget_s: float, start: int, least: int = 1) -> Found:
    """Damage journals, and open them."""
    found = Found()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # an fsync for each row would take all the time
    for number in rounds(budget_s, start, least):
        dice = random.Random(number)
        found.cases += 1
        with tempfile.TemporaryDirectory(prefix="rollmuxd-fuzz-", dir=memory) as name:
            folder = Path(name)
            facts = _facts(dice)
            asyncio.run(_written(folder, facts))
            shutil.copy(folder / "journal.sqlite3", folder / "before")
            way = _damage(folder / "journal.sqlite3", dice)
            try:
                read = asyncio.run(_read_back(folder))
            except JournalError as error:
                found.answers["refused"] += 1
                if not str(error).strip() or "Traceback" in str(error):
                    found.finding(f"{way}: says nothing: {error!r}")
                continue
            except Exception as error:
                found.finding(f"{way} (seed {number}): {type(error).__name__}: {error}")
                continue
            found.answers["read"] += 1
            expected = list(enumerate(facts, 1))
            if read != expected[: len(read)]:
                wrong = next((pair for pair in itertools.zip_longest(read, expected) if pair[0] != pair[1]), None)
                found.finding(f"{way} (seed {number}): gave {wrong}")
    return found
