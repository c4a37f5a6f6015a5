"""Several ranks: one talks, the others follow through a store, and nobody waits inside a collective."""

import asyncio
import json
import threading
from collections import Counter

import pytest

import rollmuxd
from rollmuxd import testing
from rollmuxd.client import ranks
from rollmuxd.client.steps import Pause


class Store:
    """What torch.distributed's stores do, in one process; they give bytes back."""

    def __init__(self):
        self.kept = {}

    def set(self, key, value):
        self.kept[key] = value.encode()

    def get(self, key):
        return self.kept[key]

    def check(self, keys):
        return all(key in self.kept for key in keys)


@pytest.fixture
def daemon():
    with testing.fake_daemon() as fake:
        yield fake


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.setattr(ranks, "_starts", {})


def crew(loop, count=3, store=None, **settings):
    """Run ``loop(job, rank)`` in a thread per rank; returns what each returned or raised."""
    store, outcome = store or Store(), [None] * count

    def run(rank):
        try:
            with rollmuxd.job("a", ranks=count, rank=rank, store=store, **settings) as job:
                outcome[rank] = loop(job, rank)
        except BaseException as error:
            outcome[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcome


def test_all_ranks_get_the_slot_that_rank_0_asked_for(daemon):
    def loop(job, rank):
        seen = []
        for phase in ("rollout", "train", "rollout"):
            with job.phase(phase) as slot:
                seen.append((slot.phase, slot.id, slot.fence, slot.gpus))
        return job.id, seen

    outcome = crew(loop)

    assert outcome[0] == outcome[1] == outcome[2]
    assert daemon.phases == ["rollout", "train", "rollout"]
    assert len(daemon.registered) == 1
    assert daemon.registered[0].ranks == 3


def test_the_slot_is_released_when_the_last_rank_has_left(daemon):
    inside, may_leave = threading.Event(), threading.Event()
    released_early = []

    def loop(job, rank):
        with job.phase("train"):
            if rank == 2:
                inside.set()
                assert may_leave.wait(20)

    def watch():
        assert inside.wait(20)
        released_early.append(bool(daemon.asked("POST", "/release")))
        may_leave.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert crew(loop) == [None] * 3
    watcher.join()

    assert released_early == [False]
    assert len(daemon.asked("POST", "/release")) == 1


def test_a_lost_slot_is_lost_for_every_rank(daemon):
    daemon.lose("train")

    def loop(job, rank):
        with job.phase("train"):
            pass

    assert [type(error) for error in crew(loop)] == [rollmuxd.SlotLost] * 3


def test_if_rank_0_gets_no_slot_the_others_do_not_wait_for_ever(daemon):
    daemon.fault("train", "no memory")

    def loop(job, rank):
        with job.phase("train"):
            pass

    first, *others = crew(loop)

    assert isinstance(first, rollmuxd.SlotFaulted)
    for error in others:
        assert isinstance(error, rollmuxd.RollmuxError)
        assert "no memory" in str(error)


@pytest.mark.parametrize("where", ["its body", "its release", "the wait for it"])
def test_an_interrupted_rank_0_ends_the_others_with_that_and_with_what_to_do(daemon, monkeypatch, where):
    """What they have done in a phase of which the release was answered stands, and there is no more without rank 0."""
    handle, interrupt = daemon.handle, [KeyboardInterrupt("Ctrl-C")]
    path_of = {"its release": "/release", "the wait for it": "/slots"}

    def interrupted(method, path, params, content):
        if where != "its body" and path.endswith(path_of[where]) and interrupt:
            raise interrupt.pop()
        return handle(method, path, params, content)

    monkeypatch.setattr(daemon, "handle", interrupted)

    done = []

    def loop(job, rank):
        with job.phase("train"):
            if rank == 0 and where == "its body":
                raise interrupt.pop()
        done.append(rank)
        with job.phase("rollout"):
            pass

    first, *others = crew(loop)

    assert isinstance(first, KeyboardInterrupt)
    assert sorted(done) == ([] if where == "the wait for it" else [1, 2])
    for error in others:
        assert type(error) is rollmuxd.RollmuxError
        what = "it was interrupted" if where == "the wait for it" else "rank 0 has left the job (interrupted)"
        assert what in str(error)
        assert "end this one too, or start all of them again" in str(error)
        assert "KeyboardInterrupt" not in str(error)


def refusing_releases(daemon, monkeypatch, *errors):
    """Answer releases with such errors, and with the last of them for ever."""
    handle, left = daemon.handle, list(errors)

    def away(method, path, params, content):
        if path.endswith("/release"):
            raise left.pop(0) if len(left) > 1 else left[0]
        return handle(method, path, params, content)

    monkeypatch.setattr(daemon, "handle", away)


@pytest.mark.parametrize("told_to_stop", [False, True])
@pytest.mark.parametrize("how", ["gives up", "is interrupted in"])
def test_of_a_release_that_nobody_answered_the_others_are_told_no_more_than_what_is_known(
    daemon, monkeypatch, how, told_to_stop
):
    monkeypatch.setenv("ROLLMUX_GIVE_UP_S", "0")
    interrupt = [] if how == "gives up" else [KeyboardInterrupt()]
    refusing_releases(daemon, monkeypatch, *interrupt, rollmuxd.Unreachable("away"))
    monkeypatch.setattr("rollmuxd.client.talk.CLEAN_UP_S", 0.2)

    def loop(job, rank):
        with job.phase("train") as slot:
            if rank == 0:
                slot.held.lost = told_to_stop

    first, *others = crew(loop)

    assert type(first) is (rollmuxd.GaveUp if how == "gives up" else KeyboardInterrupt)
    for error in others:
        assert type(error) is (rollmuxd.SlotLost if told_to_stop else rollmuxd.RollmuxError)
        assert ("the slot was lost, and rank 0 did not leave" in str(error)) == told_to_stop
        assert ("Whether the slot was kept is not known" in str(error)) != told_to_stop
        assert ("GaveUp: " if how == "gives up" else "it was interrupted") in str(error)


def test_a_slot_that_was_to_stop_and_whose_release_was_answered_all_the_same_was_not_lost(daemon):
    def loop(job, rank):
        with job.phase("train") as slot:
            if rank == 0:
                slot.held.lost = True

    assert crew(loop) == [None] * 3


@pytest.mark.parametrize("where", ["its body", "its release"])
def test_a_rank_0_that_outlives_what_cancelled_its_phase_goes_on_with_the_others(daemon, monkeypatch, where):
    """``asyncio.timeout`` around a phase, a notebook: the release was answered, so nothing is wrong."""
    if where == "its release":
        handle, cancel = daemon.handle, [asyncio.CancelledError()]

        def cancelled(method, path, params, content):
            if path.endswith("/release") and cancel:
                raise cancel.pop()
            return handle(method, path, params, content)

        monkeypatch.setattr(daemon, "handle", cancelled)

    def loop(job, rank):
        try:
            with job.phase("rollout"):
                if rank == 0 and where == "its body":
                    raise asyncio.CancelledError
        except asyncio.CancelledError:
            assert rank == 0
        with job.phase("train"):
            return job.slot.phase

    assert crew(loop) == ["train"] * 3
    assert daemon.phases == ["rollout", "train"]


@pytest.mark.parametrize("waits_for", ["its next phase", "the end of this one"])
@pytest.mark.parametrize(("how", "why"), [("fails", "failed: ValueError: bad"), ("ends", "finished"), ("leaves", "")])
def test_a_rank_0_that_has_left_the_job_keeps_nobody_waiting(daemon, how, why, waits_for):
    def loop(job, rank):
        with job.phase("rollout"):
            if rank == 0 and waits_for == "the end of this one":
                leave(job)
        if rank == 0:
            leave(job)
        else:
            job.phase("train").__enter__()

    def leave(job):
        if how == "fails":
            job._life.run(job._life.ending("failed: ValueError: bad", keep=False))
        else:
            job.end() if how == "ends" else job.leave()

    first, *others = crew(loop)

    assert first is None
    for error in others:
        assert type(error) is rollmuxd.RollmuxError
        assert f"rank 0 has left the job{why and f' ({why})'}: no rank gets a slot without it" in str(error)


def test_whoever_is_late_gets_all_that_rank_0_has_left_before_it_went():
    store = Store()
    leader, late = (ranks.Crew(store, "a", rank=rank, ranks=2, clock=lambda: 0.0, tell=print) for rank in (0, 1))
    leader.publish_start(job="j1")
    leader.publish_grant("train", slot="t1")
    leader.publish_over(None, lost=False)
    leader.publish_gone("finished")

    for told in (late.started(), late.granted("train"), late.left("train", failing=False)):
        with pytest.raises(StopIteration):
            next(told)
    with pytest.raises(rollmuxd.RollmuxError, match="rank 0 has left the job"):
        next(late.granted("train"))


def test_where_nobody_can_start_a_thread_any_more_the_others_are_told_that_rank_0_has_left(daemon, monkeypatch):
    """In an exit handler, since Python 3.12."""
    store = Store()
    job = rollmuxd.job("a", ranks=2, rank=0, store=store)
    job.start()

    def no_more(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    job._life._at_exit()
    assert json.loads(store.kept["rollmuxd/a/1/gone"]) == {"why": "its process ended"}


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_store_that_takes_no_last_word_holds_up_no_end(daemon, monkeypatch, how):
    let_go = threading.Event()

    class Dead(Store):
        def set(self, key, value):
            if key.endswith("/gone"):
                let_go.wait(60 if how == "hangs" else 0)
                raise OSError("the store is gone")
            super().set(key, value)

    monkeypatch.setattr(ranks, "GONE_S", 0.1)

    def end():
        job = rollmuxd.job("a", ranks=2, rank=0, store=Dead())
        job.start()
        job.end()

    ended = threading.Thread(target=end, daemon=True)
    ended.start()
    ended.join(20)
    held_up = ended.is_alive()
    let_go.set()
    assert not held_up
    assert daemon.ended == {"a": "finished"}


class Failing(Store):
    """Takes nothing under such a key any more, once it is told so."""

    def __init__(self, *keys):
        super().__init__()
        self.keys = keys

    def set(self, key, value):
        if key.endswith(self.keys):
            raise OSError("the store is gone")
        super().set(key, value)


def noted(error):
    return "".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_when_a_failing_program_leaves_its_phase_does_not_hide_what_has_failed(daemon, rank):
    store = Failing("/over", "/left/1")
    Store.set(store, "rollmuxd/a/1/1/left/1" if rank == 0 else "nothing", "{}")
    if rank == 1:
        leader = ranks.Crew(store, "a", rank=0, ranks=2, clock=lambda: 0.0, tell=print)
        leader.publish_start(job="j1", session="s1", address="http://rollmuxd")
        leader.publish_grant("train", slot="t1", fence="1.1", gpus=[], session="s1")

    job = rollmuxd.job("a", ranks=2, rank=rank, store=store)
    with pytest.raises(ZeroDivisionError) as raised, job, job.phase("train"):
        1 / 0  # noqa: B018

    assert noted(raised.value) == "rollmuxd, when phase train was left: OSError: the store is gone"


def test_a_store_that_fails_when_the_others_are_told_that_the_slot_was_lost_does_not_hide_that(daemon):
    store = Failing("/over")
    Store.set(store, "rollmuxd/a/1/1/left/1", "{}")
    job = rollmuxd.job("a", ranks=2, rank=0, store=store)
    with job, pytest.raises(rollmuxd.SlotLost) as raised, job.phase("train"):
        daemon.lose("train")
    assert noted(raised.value) == "rollmuxd, when the other ranks were told: OSError: the store is gone"


def test_a_store_that_fails_where_nothing_else_has_is_an_error(daemon):
    """Or the other ranks would wait, and nobody knew why."""
    store = Failing("/over")
    Store.set(store, "rollmuxd/a/1/1/left/1", "{}")
    job = rollmuxd.job("a", ranks=2, rank=0, store=store)
    with job, pytest.raises(OSError, match="the store is gone"), job.phase("train"):
        pass


def test_a_store_that_fails_when_there_is_no_slot_does_not_hide_why(daemon):
    daemon.fault("train", "no memory")
    job = rollmuxd.job("a", ranks=2, rank=0, store=Failing("/granted"))
    with job, pytest.raises(rollmuxd.SlotFaulted, match="no memory") as raised, job.phase("train"):
        pass
    assert noted(raised.value) == "rollmuxd, when the other ranks were told: OSError: the store is gone"


@pytest.mark.parametrize("refused", [True, False])
def test_a_store_that_fails_at_the_start_hides_no_refusal_and_leaves_no_job_behind(daemon, refused):
    if refused:
        daemon.trouble(422)
    job = rollmuxd.job("a", ranks=2, rank=0, store=Failing("/start"))
    with pytest.raises(rollmuxd.Unprocessable if refused else OSError) as raised:
        job.start()

    assert noted(raised.value) == "rollmuxd, when the other ranks were told: OSError: the store is gone"
    assert job._life._pulse is None  # which would keep its session alive
    assert daemon.ended == ({} if refused else {"a": "it could not start"})


def test_if_rank_0_cannot_start_the_others_are_told(daemon):
    daemon.trouble(422)

    first, *others = crew(lambda job, rank: None)

    assert isinstance(first, rollmuxd.Unprocessable)
    assert all("as the test wants it" in str(error) for error in others)


def test_ranks_that_disagree_about_the_phase_are_told_so(daemon):
    def loop(job, rank):
        with job.phase("train" if rank == 1 else "rollout"):
            pass

    assert "same phases in the same order" in str(crew(loop, count=2)[1])


def test_without_a_daemon_no_rank_waits():
    def loop(job, rank):
        with job.phase("train") as slot:
            return job.alone, slot.gpus

    assert crew(loop) == [(True, ())] * 3


def test_the_same_store_serves_a_second_start(daemon):
    store, seen = Store(), []

    def run(rank):
        for _ in range(2):
            with rollmuxd.job("a", ranks=2, rank=rank, store=store) as job, job.phase("train") as slot:
                seen.append((job.id, slot.id))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(Counter(seen).values()) == [2, 2]  # both ranks, both times, in the same slot


def test_a_long_run_leaves_next_to_nothing_in_the_store(daemon):
    class Forgetful(Store):
        def delete_key(self, key):
            return self.kept.pop(key, None) is not None

    store = Forgetful()

    def loop(job, rank):
        for _ in range(10):
            with job.phase("train"):
                pass

    assert crew(loop, store=store) == [None] * 3
    phases = {key.split("/")[3] for key in store.kept} - {"start", "gone"}
    assert phases == {"10"}


def test_ranks_that_torchrun_starts_again_do_not_take_what_those_before_them_have_left_in_its_store(monkeypatch):
    store, said = Store(), []

    def crew_of(rank):
        monkeypatch.setattr(ranks, "_starts", {})  # a process of its own
        return ranks.Crew(store, "a", rank=rank, ranks=2, clock=lambda: 0.0, tell=said.append)

    crew_of(0).publish_start(job="j1", session="of those before")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    follower = crew_of(1).started()
    assert isinstance(next(follower), Pause)  # nothing is there for it yet
    crew_of(0).publish_start(job="j1", session="new")
    with pytest.raises(StopIteration) as told:
        follower.send(None)
    assert told.value.value["session"] == "new"


def test_every_rank_dials_the_channel_with_the_session_of_rank_0(daemon, until):
    def loop(job, rank):
        until(lambda: sorted(next(iter(daemon.dialled.values()), [])) == [0, 1, 2])
        return daemon.result_of(f"o-{rank}").ok

    for rank in range(3):
        daemon.order("load", "train", rank=rank, id=f"o-{rank}")

    assert crew(loop, train=dict(nodes=1, gpu_gb=1)) == [True, True, True]


def test_a_follower_that_asks_something_itself_asks_the_daemon_of_rank_0(daemon):
    """As it does at the end of a job whose state is still there: whether it was discarded."""
    outcome = crew(lambda job, rank: job._life._sync.address)

    assert outcome[1] == outcome[2] == outcome[0]


def test_a_follower_without_a_store_is_told_what_to_give():
    with pytest.raises(ValueError, match=r"store=.*set, get and check"):
        rollmuxd.job("a", ranks=2, rank=1)


def test_rank_0_alone_needs_no_store(daemon):
    with rollmuxd.job("a", ranks=8) as job, job.phase("train"):
        pass

    assert daemon.registered[0].ranks == 8


def test_a_follower_looks_less_and_less_often_and_says_each_minute_that_it_waits():
    now, said, store = [0.0], [], Store()
    follower = ranks.Crew(store, "a", rank=1, ranks=2, clock=lambda: now[0], tell=said.append)
    pauses = []
    flow = follower.granted("train")
    step = next(flow)
    while now[0] < 130:
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        now[0] += step.seconds
        step = flow.send(None)

    assert (pauses[0], pauses[-1]) == (0.1, 1.0)
    assert len(said) == 2
    assert "rank 1 waits for rank 0 to have train" in said[0]
    flow.close()


def test_a_rank_0_that_fails_waits_for_the_others_for_seconds_only():
    now, store = [0.0], Store()
    leader = ranks.Crew(store, "a", rank=0, ranks=2, clock=lambda: now[0], tell=print)
    leader.publish_grant("train")
    for step in leader.all_left("train", failing=True):
        now[0] += step.seconds

    assert 10 <= now[0] < 12


def test_a_rank_0_that_is_interrupted_while_it_waits_for_the_others_lets_them_go_and_keeps_no_slot(daemon, monkeypatch):
    store, interrupts = Store(), [KeyboardInterrupt("Ctrl-C")]

    def all_left(crew, phase, **_):
        if interrupts:
            raise interrupts.pop()
        yield Pause(0)

    monkeypatch.setattr(ranks.Crew, "all_left", all_left)
    with rollmuxd.job("a", ranks=2, rank=0, store=store) as job:
        with pytest.raises(KeyboardInterrupt), job.phase("rollout"):
            pass
        told = json.loads(store.kept["rollmuxd/a/1/1/over"])
        assert (told["lost"], told["error"].partition(",")[0]) == (False, "it was interrupted")
        assert daemon.asked("POST", "/release") == []
        with job.phase("train"):
            assert len(daemon.asked("POST", "/release")) == 1

    assert daemon.phases == ["rollout", "train"]


def test_a_slot_that_rank_0_was_interrupted_in_leaving_is_not_given_back_while_other_ranks_are_in_its_phase(daemon):
    store = Store()
    job = rollmuxd.job("a", ranks=2, rank=0, store=store)
    job.start()
    life = job._life
    life.run(life.entering("rollout"))
    leaves = life.leaving(None, None)
    assert isinstance(next(leaves), Pause)  # rank 1 is in there
    with pytest.raises(KeyboardInterrupt):
        leaves.throw(KeyboardInterrupt())

    enters = life.entering("train")
    for _ in range(2):
        assert isinstance(next(enters), Pause)
    with pytest.raises(KeyboardInterrupt):
        enters.throw(KeyboardInterrupt())
    enters = life.entering("train")
    assert isinstance(next(enters), Pause)  # it is not forgotten either
    assert daemon.asked("POST", "/release") == []
    store.set("rollmuxd/a/1/1/left/1", "{}")
    life.run(enters)
    assert len(daemon.asked("POST", "/release")) == 1

    store.set("rollmuxd/a/1/2/left/1", "{}")
    life.run(life.leaving(None, None))
    daemon.fault("rollout", "no memory")
    with pytest.raises(rollmuxd.SlotFaulted):
        life.run(life.entering("rollout"))
    enters = life.entering("train")
    assert not isinstance(next(enters), Pause)  # into that one nobody was let
    enters.close()
    job.end()


def test_a_job_that_is_started_again_waits_for_no_rank_of_its_former_start(daemon):
    job = rollmuxd.job("a", ranks=2, rank=0, store=Store())
    life = job._life
    life.run(life.entering("rollout"))
    leaves = life.leaving(None, None)
    next(leaves)
    with pytest.raises(KeyboardInterrupt):
        leaves.throw(KeyboardInterrupt())
    job.end()

    job.start()
    enters = life.entering("train")
    assert not isinstance(next(enters), Pause)
    enters.close()
    job.end()


def test_ctrl_c_in_a_phase_that_other_ranks_do_not_leave_takes_no_longer_and_the_release_has_its_part(daemon):
    job = rollmuxd.job("a", ranks=2, rank=0, store=Store())
    job.start()
    life, now, sent = job._life, [1000.0], []
    life._talk._clock = life._crew._clock = lambda: now[0]
    life.run(life.entering("train"))

    def play(flow):
        """The daemon hangs."""
        step = next(flow)
        while True:
            if isinstance(step, Pause):
                now[0] += step.seconds
                step = flow.send(None)
            else:
                sent.append((step.path.rpartition("/")[2], step.timeout_s))
                now[0] += step.timeout_s
                step = flow.throw(rollmuxd.Unreachable("timed out"))

    with pytest.raises(rollmuxd.GaveUp):
        play(life.leaving(None, KeyboardInterrupt()))
    assert [path for path, _ in sent] == ["release"]
    assert sent[0][1] > 0.99
    assert now[0] <= 1010
    with pytest.raises(StopIteration):
        play(life.ending("interrupted", keep=False))
    assert now[0] <= 1011


def test_a_second_ctrl_c_while_rank_0_waits_for_the_others_leaves_the_end_seconds_no_more(daemon):
    job = rollmuxd.job("a", ranks=2, rank=0, store=Store())
    job.start()
    life = job._life
    life._talk._clock = lambda: 1000.0
    life.run(life.entering("rollout"))
    leaves = life.leaving(None, KeyboardInterrupt())
    assert isinstance(next(leaves), Pause)  # rank 1 is in there
    with pytest.raises(KeyboardInterrupt):
        leaves.throw(KeyboardInterrupt())

    assert life._talk._clean_until == 1000.0
    job.end()


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), OSError("the store is gone")])
def test_a_slot_that_the_other_ranks_could_not_be_told_of_is_given_back_before_the_next_request(daemon, error):
    """Nobody has entered its phase, so nobody leaves it; and the next request would wait for it."""

    class Broken(Store):
        def set(self, key, value):
            if key.endswith("/1/granted"):
                raise error
            super().set(key, value)

    job = rollmuxd.job("a", ranks=2, rank=0, store=Broken())
    job.start()
    with pytest.raises(type(error)), job.phase("rollout"):
        pass
    assert daemon.asked("POST", "/release") == []
    job.phase("train").__enter__()

    assert len(daemon.asked("POST", "/release")) == 1
    assert daemon.phases == ["rollout", "train"]
    job.end()
