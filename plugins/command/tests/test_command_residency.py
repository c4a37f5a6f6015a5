"""What the command driver defends: each exit code means one thing, and no command is run that nobody may give.

The commands are real processes of this machine; what they have on a "GPU" is a number in a file.
"""

import contextlib
import sys

import anyio
import msgspec
import pytest
from fake_engines import EngineHost
from patience import PATIENCE_S

from rollmuxd.core.ids import Fence
from rollmuxd.spi import ContactLost, GpuObservation, NotDone, Observation, OrderKind, Probed, Ran, Residency, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_command import CommandResidency

LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD

#: moves a number: ``mover FILE KIND``
MOVER = """
set -eu
case "$2" in
    load) echo 8000 ;;
    park) if [ -s "$1" ]; then echo 500; fi ;;
    discard) ;;
esac > "$1.new"
mv "$1.new" "$1"
"""


class Host(EngineHost):
    def __init__(self, folder):
        super().__init__("host1", {})
        self.folder = folder

    async def observe(self, host):
        self._reach(host)
        seen = []
        for number in (0, 1):
            file = self.folder / f"gpu{number}"
            text = file.read_text().strip() if file.exists() else ""
            seen.append(GpuObservation(f"host1/gpu{number}", int(text or 0)))
        return Observation(tuple(seen), "boot")


class TestContract(ResidencyContract):
    tolerance_mb = 0

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.folder = tmp_path

    async def make(self) -> Rig:
        (self.folder / "mover").write_text(MOVER)
        one = f"sh {self.folder}/mover {self.folder}/gpu$gpu {{kind}}"
        move = ("sh", "-c", f"for gpu in $(echo {{gpus}} | tr , ' '); do {one}; done")
        options = (("load", move), ("park", move), ("discard", move))
        state = StateSpec(pool="rollout", gpu_mb=8_000, residual_mb=500, driver="command", options=options)
        self.host = Host(self.folder)
        return Rig(CommandResidency(idempotent=True), self.host, "host1", ("host1/gpu0", "host1/gpu1"), state)

    async def take_away(self, rig: Rig) -> None:
        self.host.away = True

    async def open_with(self, options) -> Residency:
        return await CommandResidency.open(FakeChannel(), options)


def order(kind, tmp_path, **commands):
    state = StateSpec(pool="rollout", residual_mb=700, driver="command", options=tuple(commands.items()))
    return ResidencyContract().order(Rig(None, Host(tmp_path), "host1", ("host1/gpu2", "host1/gpu3"), state), kind)


def sh(script):
    return ("sh", "-c", script)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("exit 1", NotDone, "exit code 1: it said nothing"),
        ("echo no room >&2; exit 3", NotDone, "exit code 3: no room"),
        ("exit 127", NotDone, "exit code 127"),
        ("echo busy >&2; exit 75", ContactLost, "exit code 75: busy"),
        ("kill -9 $$", ContactLost, "ended by signal 9"),
        ("sleep 600", ContactLost, "longer than 0.3 s"),
    ],
)
async def test_how_a_command_ends_is_the_answer(script, error, said, tmp_path):
    # (Only what never ends gets a short time: to start a shell may take that long, too.)
    driver = CommandResidency(limit_s=0.3 if "longer" in said else 60.0)
    with pytest.raises(error, match=said):
        await driver.park(order(PARK, tmp_path, park=sh(script)))
    await CommandResidency(limit_s=60.0).park(order(PARK, tmp_path, park=sh("exit 0")))


@pytest.mark.asyncio
async def test_a_program_that_is_not_there_is_not_done(tmp_path):
    with pytest.raises(NotDone, match="/no/such/program"):
        await CommandResidency().park(order(PARK, tmp_path, park=("/no/such/program",)))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "probed"),
    [
        ("exit 0", Probed(known=True, done=True)),
        ("echo half >&2; exit 1", Probed(known=True, error="exit code 1: half")),
        ("exit 2", Probed(known=True, error="exit code 2: it said nothing", begun=False)),
        ("exit 75", Probed(known=False, error="exit code 75: it said nothing")),
        ("kill -9 $$", Probed(known=False, error="exit code -9: it said nothing")),
    ],
)
async def test_a_probe_says_what_its_exit_code_says(script, probed, tmp_path):
    assert await CommandResidency().probe(order(PARK, tmp_path, park=("true",), probe=sh(script))) == probed


@pytest.mark.asyncio
@pytest.mark.looptime
@pytest.mark.parametrize(
    ("answers", "breaks", "error"),
    [
        ((75, 75, 0), 1, None),
        ((75, 1), 1, NotDone),
        ((75, 2), 1, None),  # it was not begun, so it is run again
        ((2,) * 1_000, 1_000, None),  # a line that breaks whenever it is run
        ((), 1, ContactLost),  # there is no probe
    ],
)
async def test_a_command_whose_connection_broke_is_asked_for_until_it_is_known(answers, breaks, error, tmp_path):
    given = order(PARK, tmp_path, park=("ctl", "park"), **({"probe": ("ctl", "ask")} if answers else {}))
    left, ran = list(answers), []

    async def ctl(argv):
        ran.append(argv[1])
        if argv[1] == "ask":
            return Ran(left.pop(0), b"", b"")
        if ran.count("park") <= breaks:
            raise ContactLost("the connection broke")
        return Ran(0, b"", b"")

    given.backend.commands["ctl"] = ctl
    with pytest.raises(error, match="the connection broke") if error else contextlib.nullcontext():
        await CommandResidency().park(given)
    assert (left, ran.count("park")) == ([], breaks + (2 in answers))


@pytest.mark.asyncio
async def test_without_a_probe_nothing_is_known(tmp_path):
    assert await CommandResidency().probe(order(PARK, tmp_path, park=("true",))) == Probed(known=False)
    gone = await CommandResidency().probe(order(PARK, tmp_path, park=("true",), probe=("/no/such",)))
    assert (gone.known, gone.done) == (False, False)


@pytest.mark.asyncio
async def test_a_command_is_told_the_order(tmp_path):
    script = f'env | grep ^ROLLMUX_ | sort > "{tmp_path}/told"'
    given = order(LOAD, tmp_path, load=sh(script), park=("true",))
    given = msgspec.structs.replace(given, stamp=Fence(3, 14), issued_at=1_800_000_000_123)
    await CommandResidency().load(given)
    told = dict(line.split("=", 1) for line in (tmp_path / "told").read_text().splitlines())
    assert told == {
        "ROLLMUX_ORDER": given.order, "ROLLMUX_KIND": "load", "ROLLMUX_JOB": "j-a", "ROLLMUX_NAME": "a",
        "ROLLMUX_OWNER": "contract", "ROLLMUX_RUN": "1", "ROLLMUX_POOL": "rollout",
        "ROLLMUX_NODE": "host1/gpu2+host1/gpu3", "ROLLMUX_HOST": "host1", "ROLLMUX_GPUS": "2,3", "ROLLMUX_WARM": "0",
        "ROLLMUX_PHASE": "", "ROLLMUX_PID": "0", "ROLLMUX_RESIDUAL_MB": "700",
        "ROLLMUX_STAMP": "3.14", "ROLLMUX_ISSUED_AT": "1800000000123",
    }  # fmt: skip


@pytest.mark.asyncio
async def test_a_verb_without_a_command_is_done_at_once(tmp_path):
    driver = CommandResidency()
    await driver.load(order(LOAD, tmp_path, park=("false",)))
    await driver.discard(order(DISCARD, tmp_path, park=("false",)))


@pytest.mark.asyncio
async def test_sets_of_the_operator_are_for_everybody_and_commands_of_a_job_for_admins(tmp_path):
    driver = await CommandResidency.open(
        FakeChannel(), {"sets": {"engine": {"park": ["sh", "-c", f"echo {{name}} > {tmp_path}/parked"]}}}
    )
    await driver.park(order(PARK, tmp_path, set="engine"))
    assert (tmp_path / "parked").read_text() == "a\n"
    assert driver.admin_options == {"load", "park", "discard", "probe"}
    assert driver.traits.idempotent is False
    assert (await CommandResidency.open(FakeChannel(), {"idempotent": True})).traits.idempotent is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has no park: nothing would ever make its GPUs clean"),
        ({"load": ("a",)}, "has no park"),
        ({"set": "nope"}, "set 'nope' of driver command is not there .* has none"),
        ({"set": "x", "park": ("a",)}, "say the one or the other"),
        ({"park": "pkill engine"}, "no shell reads it"),
        ({"park": ("echo", "{home}")}, "is none of job"),
        ({"parc": ("a",)}, "did you mean park?"),
    ],
)
def test_a_wrong_option_is_refused(options, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        CommandResidency().check(StateSpec(pool="rollout", driver="command", options=tuple(options.items())))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sets": {"x": {"load": ["a"]}}}, "set x of residency driver command has no park"),
        ({"sets": {"x": ["a"]}}, "must be a table"),
        ({"sets": {"x": {"park": "a"}}}, "no shell reads it"),
        ({"limit_s": -1}, "seconds, 0 or more"),
    ],
)
async def test_a_wrong_setting_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        await CommandResidency.open(FakeChannel(), options)


@pytest.mark.asyncio
async def test_a_park_that_is_cancelled_ends_its_command(tmp_path):
    mark = tmp_path / "mark"
    code = f"import pathlib, time; pathlib.Path({str(mark)!r}).write_text('there'); time.sleep(600)"
    async with anyio.create_task_group() as group:
        group.start_soon(CommandResidency().park, order(PARK, tmp_path, park=(sys.executable, "-c", code)))
        with anyio.fail_after(PATIENCE_S):
            while not mark.exists():
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
