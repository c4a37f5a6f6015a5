"""Loops of released frameworks, and of stand-ins, as jobs of a real daemon: they take turns on what they share.

What they do is in ``plugins/hooks/tests/loops.py``; each process writes down what it did on its GPUs, in which
slot, and when.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

LOOPS = Path(__file__).parents[2] / "plugins" / "hooks" / "tests" / "loops.py"
FRAMEWORKS = Path(sys.prefix) / "frameworks"
SKYRL = ("skyrl", "0.3.0")
OPENRLHF = ("openrlhf", "0.11.2", "--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep")
AREAL = ("areal", "1.0.4")

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def loops(tmp_path):
    """Starts loops by name; what each has done, once all have ended well."""
    started, ends = {}, {}

    def start(daemon, name, *arguments, fails="", job="", **more):
        if (
            arguments[0] in ("skyrl", "openrlhf", "areal", "prime-rl")
            and not (FRAMEWORKS / "-".join(arguments[:2])).is_dir()
        ):
            what = "==".join(arguments[:2])
            pytest.skip(f'{what} is not here: make drift ARGS="--keep .venv/frameworks {what}"')
        (tmp_path / f"{name}.toml").write_text(f'name = "{job or name}"\n')
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ROLLMUX_", "XDG_"))}
        ours = {"ROLLMUX_URL": daemon.url, "ROLLMUX_REQUIRED": "1", "ROLLMUX_HOOK": str(tmp_path / f"{name}.toml")}
        with (tmp_path / f"{name}.out").open("wb") as out, (tmp_path / f"{name}.err").open("wb") as said:
            started[name] = forked.Popen(
                [sys.executable, LOOPS, *arguments],
                env={**env, **ours, "HOME": str(tmp_path), "LOOPS_WORK": "20000", "LOOPS_FAILS": fails, **more},
                cwd=tmp_path,
                stdout=out,
                stderr=said,
            )
        ends[name] = 1 if fails else 0

    def ended():
        for name, process in started.items():
            assert process.wait(PATIENCE_S) == ends[name], (tmp_path / f"{name}.err").read_text()
        return {
            name: json.loads((tmp_path / f"{name}.out").read_text().splitlines()[-1])
            for name in started
            if not ends[name]
        }

    start.ended = ended
    yield start
    for process in started.values():
        process.kill()
        process.wait()


def in_order(done):
    """All that was done in slots, by time: whose it was, the slot, and what."""
    everything = [(at, name, slot, what) for name, events in done.items() for what, _, slot, at in events if slot]
    return [(name, slot, what) for _, name, slot, what in sorted(everything)]


def left_behind(done, name):
    """What the others did while something of that run of SkyRL was on the GPUs."""
    comes = {"policy.backload": "policy", "engines.wake_up weights": "engines"}
    goes = {"policy.offload": "policy", "engines.sleep": "engines"}
    there, found = set(), []
    for _, who, what in sorted((at, who, what) for who, events in done.items() for what, _, _, at in events):
        if who != name:
            found += [f"{who} {what} beside {', '.join(sorted(there))}"] if there else []
        elif what in comes:
            there.add(comes[what])
        elif what in goes:
            there.discard(goes[what])
    return found


def phases(daemon, name):
    """The phases that a job was granted, in order."""
    job = daemon.job(name)["job"]
    return [fact["phase"] for fact in daemon.facts("slot_queued", job=job)]


def test_runs_of_four_frameworks_take_turns_on_one_gpu(live, loops):
    daemon = live.daemon((("0", "train"),))
    for name, loop in (("sky", SKYRL), ("open", OPENRLHF), ("are", AREAL), ("nemo", ("nemo_rl", "train"))):
        loops(daemon, name, *loop)
    done = loops.ended()

    stays = [key for key, _ in itertools.groupby(in_order(done), key=lambda one: one[:2])]
    assert len(stays) == len(set(stays)), f"a slot was interrupted: {stays}"
    assert left_behind(done, "sky") == []
    assert phases(daemon, "sky") == ["init", *["rollout", "train"] * 2, "rollout"]
    assert phases(daemon, "open") == ["init", *["rollout", "train"] * 3, "rollout"]
    assert phases(daemon, "are") == ["init", *["rollout", "train"] * 2, "rollout"]
    assert phases(daemon, "nemo") == ["init", *["train"] * 4]
    assert {job["status"] for job in daemon.jobs().values()} == {"ended"}
    assert {job["reason"] for job in daemon.jobs().values()} == {"finished"}


def test_engines_of_runs_on_two_pools_are_never_on_the_same_gpus(live, loops):
    daemon = live.daemon((("0", "rollout"), ("1", "train")))
    for name, loop in (
        ("a", ("slime", "train", "offload")),
        ("b", ("slime", "train", "offload")),
        ("c", ("roll", "train")),
    ):
        loops(daemon, name, *loop)
    done = loops.ended()

    comes = {"engines.onload", "engines.onload_weights", "engines.generate", "actor_train.model_update"}
    comes |= {"actor_infer.load_states"}
    goes = {"engines.offload", "actor_infer.offload_states"}
    there = set()
    # Parking is done while the loop waits: in no slot of its own.
    everything = sorted((at, name, what) for name, events in done.items() for what, _, _, at in events)
    last = {name: max(at for *_, at in events) for name, events in done.items()}
    for at, name, what in everything:
        if what in comes:
            there.add(name)
            assert there == {name}, f"{name} {what}, while the engines of {there - {name}} are there"
        elif what in goes:
            there.discard(name)
        if at == last[name]:  # not told to park before it ended: its engines go with its process
            there.discard(name)
    for name in ("a", "b"):
        assert phases(daemon, name) == ["init", *["sync", "rollout", "train"] * 2, "sync"]
    assert phases(daemon, "c") == ["init", *["sync", "rollout", "train"] * 2]


def test_a_daemon_that_only_watches_has_them_wait_for_nothing(live, loops):
    daemon = live.daemon((("0", "rollout"), ("1", "train")), mode="observe")
    for name, loop in (
        ("roll", ("roll", "train")),
        ("nemo", ("nemo_rl", "train")),
        ("slime", ("slime", "train", "offload")),
    ):
        loops(daemon, name, *loop)
    loops.ended()

    assert daemon.facts("order_issued") == []
    assert {job["admission"] for job in daemon.jobs().values()} == {"observed"}
    assert phases(daemon, "roll") == ["init", *["sync", "rollout", "train"] * 2]
    assert phases(daemon, "nemo") == ["init", *["train"] * 4]


def test_a_run_that_cannot_send_its_weights_gives_the_trainers_gpus_back_and_the_others_go_on(live, loops):
    daemon = live.daemon((("0", "train"),))
    weights = "policy.broadcast_weights_for_collective"
    asynchronous = ("nemo_rl", "train", "async", "apart")
    loops(daemon, "cannot", *asynchronous, fails=weights)
    loops(daemon, "can", *asynchronous)
    done = loops.ended()

    assert [what for what, phase, _, _ in done["can"] if phase == "train"].count(weights) == 2
    reasons = {name: job["reason"] for name, job in daemon.jobs().items()}
    assert reasons == {"can": "finished", "cannot": f"failed: ConnectionError: no answer to {weights}"}
    assert daemon.facts("slot_taken_away", "job_lost") == []


def test_each_rank_of_prime_rl_trains_in_its_jobs_slot_and_waits_for_it_in_no_collective(live, loops):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # as torchrun has one
    daemon = live.daemon((("0", "train"),))
    for rank in range(2):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "RANK": str(rank)}
        loops(daemon, f"rank{rank}", "prime-rl", "0.8.0", job="math", **where)
    loops(daemon, "other", "nemo_rl", "train", "async", "apart")
    done = loops.ended()

    assert phases(daemon, "math") == ["init", *["train"] * 3]
    both = [[(what, phase, slot) for what, phase, slot, _ in done[f"rank{rank}"]] for rank in range(2)]
    assert both[0] == both[1]
    beside = [key for key, _ in itertools.groupby(slot for _, slot, _ in in_order(done))]
    assert len(beside) == len(set(beside)), f"a slot was interrupted: {beside}"
    assert {job["reason"] for job in daemon.jobs().values()} == {"finished"}
