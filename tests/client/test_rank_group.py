"""Several ranks: one talks, the others follow through a store, and nobody waits inside a collective."""

import asyncio
import json
import math
import threading
from collections import Counter

import pytest
from patience import PATIENCE_S

import rollmuxd
from rollmuxd import testing
from rollmuxd.client import rank_group
from rollmuxd.client.retry import Pause


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
    monkeypatch.setattr(rank_group, "_starts", {})
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)


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
        thread.join(PATIENCE_S)
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
                assert may_leave.wait(PATIENCE_S)

    def watch():
        assert inside.wait(PATIENCE_S)
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


@pytest.mark.parametrize("where", ["its body", "the wait for it"])
def test_an_interrupted_rank_0_ends_the_others_with_that_and_with_what_to_do(daemon, monkeypatch, where):
    """What they have done in a phase of which the release was answered stands, and there is no more without rank 0."""
    handle, interrupt = daemon.handle, [KeyboardInterrupt("Ctrl-C")]

    def interrupted(method, path, params, content):
        if where != "its body" and path.endswith("/slots") and interrupt:
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
    monkeypatch.setattr("rollmuxd.client.session.CLEAN_UP_S", 0.2)

    def loop(job, rank):
        with job.phase("train") as slot:
            if rank == 0:
                slot.lost = told_to_stop

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
                slot.lost = True

    assert crew(loop) == [None] * 3


def test_a_rank_0_that_outlives_what_cancelled_its_phase_goes_on_with_the_others(daemon):
    """``asyncio.timeout`` within a phase, a notebook: the release was answered, so nothing is wrong."""

    def loop(job, rank):
        try:
            with job.phase("rollout"):
                if rank == 0:
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
            job._runtime.run(job._runtime.ending("failed: ValueError: bad", keep=False))
        else:
            job.end() if how == "ends" else job.leave()

    first, *others = crew(loop)

    assert first is None
    for error in others:
        assert type(error) is rollmuxd.RollmuxError
        assert f"rank 0 has left the job{why and f' ({why})'}: no rank gets a slot without it" in str(error)


def test_whoever_is_late_gets_all_that_rank_0_has_left_before_it_went():
    store = Store()
    leader, late = (
        rank_group.RankGroup(store, "a", rank=rank, ranks=2, clock=lambda: 0.0, tell=print) for rank in (0, 1)
    )
    leader.publish_start(job="j1")
    leader.publish_grant("train", slot="t1")
    leader.publish_over(None, lost=False)
    leader.publish_gone("finished")

    for told in (late.started(), late.granted("train"), late.left("train", failing=False)):
        with pytest.raises(StopIteration):
            next(told)
    with pytest.raises(rollmuxd.RollmuxError, match="rank 0 has left the job"):
        next(late.granted("train"))


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
        leader = rank_group.RankGroup(store, "a", rank=0, ranks=2, clock=lambda: 0.0, tell=print)
        leader.publish_start(job="j1", session="s1", journal="", address="http://rollmuxd")
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
    assert job._runtime._heartbeat is None  # which would keep its session alive
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
        thread.join(PATIENCE_S)

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
        monkeypatch.setattr(rank_group, "_starts", {})  # a process of its own
        return rank_group.RankGroup(store, "a", rank=rank, ranks=2, clock=lambda: 0.0, tell=said.append)

    crew_of(0).publish_start(job="j1", session="of those before")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    follower = crew_of(1).started()
    assert isinstance(next(follower), Pause)  # nothing is there for it yet
    crew_of(0).publish_start(job="j1", session="new")
    with pytest.raises(StopIteration) as told:
        follower.send(None)
    assert told.value.value["session"] == "new"


def of_several_nodes(monkeypatch, store, counts):
    """Return ranks in processes of their own, each on a node with its count."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(len(counts)))
    monkeypatch.setattr(rank_group, "_starts", {})
    monkeypatch.setattr(rank_group, "_processes", {})
    crews = []
    for rank, count in enumerate(counts):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        crews.append(rank_group.RankGroup(store, "a", rank=rank, ranks=len(counts), clock=lambda: 0.0, tell=print))
    return crews


def meet(crews, order):
    """Let them meet, and come in that order."""
    flows = [crews[rank].meet() for rank in order]
    for turn in range(5):
        for flow in list(flows):
            if next(flow, None) is None:
                assert turn > 0  # nobody goes on alone
                flows.remove(flow)
    assert flows == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("counts", [(1, 0, 0), (0, 1, 0)])
def test_ranks_of_several_nodes_take_nothing_of_those_before_them_though_their_counts_differ(
    monkeypatch, counts, order
):
    """torchrun counts on each node what has failed there. Those before them were killed, in the midst of a phase."""
    store = Store()
    for attempt in ((0, 0, 0), counts):
        crews = of_several_nodes(monkeypatch, store, attempt)
        meet(crews, order)
        leader, *followers = crews
        starts = [follower.started() for follower in followers]
        assert all(isinstance(next(flow), Pause) for flow in starts)  # nothing is there for them yet
        leader.publish_start(session=str(attempt))
        assert [at_once(flow)["session"] for flow in starts] == [str(attempt)] * 2
        enters = [follower.granted("rollout") for follower in followers]
        assert all(isinstance(next(flow), Pause) for flow in enters)
        leader.publish_grant("rollout", slot=str(attempt))
        assert [at_once(flow)["slot"] for flow in enters] == [str(attempt)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_gives_up_meeting_the_others_meets_them_when_it_asks_again(monkeypatch, rank):
    store = Store()
    crews = of_several_nodes(monkeypatch, store, (0, 1))
    flows = [crew.meet() for crew in crews]
    for flow in flows:
        next(flow)
    with pytest.raises(KeyboardInterrupt):
        flows[rank].throw(KeyboardInterrupt())
    crews[rank] = rank_group.RankGroup(store, "a", rank=rank, ranks=2, clock=lambda: 0.0, tell=print)
    flows[rank] = crews[rank].meet()
    for _ in range(4):
        flows = [flow for flow in flows if next(flow, None) is not None]
    assert flows == []
    crews[0].publish_start(session="s1")
    assert at_once(crews[1].started())["session"] == "s1"


def test_ranks_of_several_nodes_go_through_their_phases_as_others_do(daemon, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")

    def loop(job, rank):
        with job.phase("train") as slot:
            return slot.id

    store = Store()
    for start in ("1", "2"):
        assert len(set(crew(loop, store=store))) == 1
        (met,) = [key.split("/") for key in store.kept if key.startswith(f"rollmuxd/a/{start}/") and "/met" in key]
        assert f"rollmuxd/a/{start}/{met[3]}/1/granted" in store.kept


def test_every_rank_dials_the_channel_with_the_session_of_rank_0(daemon, until):
    def loop(job, rank):
        until(lambda: sorted(next(iter(daemon.dialled.values()), [])) == [0, 1, 2])
        return daemon.result_of(f"o-{rank}").ok

    for rank in range(3):
        daemon.order("load", "train", rank=rank, id=f"o-{rank}")

    assert crew(loop, train=dict(nodes=1, gpu_gb=1)) == [True, True, True]


def test_a_follower_that_asks_something_itself_asks_the_daemon_of_rank_0(daemon):
    """As it does at the end of a job whose state is still there: whether it was discarded."""
    outcome = crew(lambda job, rank: job._runtime._sync.address)

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
    follower = rank_group.RankGroup(store, "a", rank=1, ranks=2, clock=lambda: now[0], tell=said.append)
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
    leader = rank_group.RankGroup(store, "a", rank=0, ranks=2, clock=lambda: now[0], tell=print)
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

    monkeypatch.setattr(rank_group.RankGroup, "all_left", all_left)
    with rollmuxd.job("a", ranks=2, rank=0, store=store) as job:
        with pytest.raises(KeyboardInterrupt), job.phase("rollout"):
            pass
        told = json.loads(store.kept["rollmuxd/a/1/1/over"])
        assert (told["lost"], told["error"].partition(",")[0]) == (False, "it was interrupted")
        assert daemon.asked("POST", "/release") == []
        with job.phase("train"):
            assert len(daemon.asked("POST", "/give-back")) == 1

    assert daemon.phases == ["rollout", "train"]


def test_a_slot_that_rank_0_was_interrupted_in_leaving_is_not_given_back_while_other_ranks_are_in_its_phase(daemon):
    store = Store()
    job = rollmuxd.job("a", ranks=2, rank=0, store=store)
    job.start()
    life = job._runtime
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
    assert len(daemon.asked("POST", "/give-back")) == 1

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
    life = job._runtime
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


class Leader:
    """A rank 0 that is stepped in virtual time, before a daemon that answers, or (``hangs``) does not."""

    def __init__(self, daemon, store=None, others=1):
        self.daemon, self.store, self.now, self.hangs, self.sent = daemon, store or Store(), 1000.0, False, []
        self.job = rollmuxd.job("a", ranks=1 + others, rank=0, store=self.store)
        self.job.start()
        self.life = self.job._runtime
        self.life._session._clock = self.life._rank_group._clock = lambda: self.now

    def play(self, flow, at=math.inf, then=lambda: None):
        """Run a flow to its end, and ``then`` at such a time."""
        step = next(flow)
        while True:
            try:
                if isinstance(step, Pause):
                    self.now += step.seconds
                    if self.now >= at:
                        at = math.inf
                        then()
                    step = flow.send(None)
                    continue
                self.sent.append((step.method, step.path.rpartition("/")[2], step.timeout_s))
                try:
                    if self.hangs:
                        self.now += step.timeout_s
                        raise rollmuxd.Unreachable("timed out")
                    answer = self.life._sync.call(step)
                except rollmuxd.RollmuxError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
            except StopIteration as end:
                return end.value

    def enter(self, phase, **settings):
        return self.play(self.life.entering(phase), **settings)

    def leave(self, error=None, **settings):
        self.play(self.life.leaving(None, error), **settings)

    def told(self, key):
        return json.loads(self.store.kept[f"rollmuxd/a/1/{key}"])

    def releases(self):
        return len(self.daemon.asked("POST", "/release")) + len(self.daemon.asked("POST", "/give-back"))


@pytest.fixture
def lead(daemon, monkeypatch):
    """Make such a rank 0; its job is ended."""
    made = []

    def make(*given, **settings):
        made.append(Leader(daemon, *given, **settings))
        return made[-1]

    yield make
    for leader in made:
        leader.job.end()


def left(store, phase, rank=1):
    store.set(f"rollmuxd/a/1/{phase}/left/{rank}", "{}")


def follow(store, rank=1, count=2):
    """Return a rank that has heard of the start."""
    follower = rank_group.RankGroup(store, "a", rank=rank, ranks=count, clock=lambda: 0.0, tell=print)
    at_once(follower.started())
    return follower


def at_once(flow):
    """Run a flow that has nothing to wait for."""
    with pytest.raises(StopIteration) as end:
        next(flow)
    return end.value.value


@pytest.mark.parametrize("in_time", [True, False])
def test_ctrl_c_takes_no_longer_where_other_ranks_are_slow_to_leave_and_the_release_has_its_part(daemon, lead, in_time):
    leader = lead()
    leader.enter("train")
    leader.hangs, leader.sent = True, []

    with pytest.raises(rollmuxd.GaveUp if in_time else rollmuxd.RollmuxError):
        leader.leave(KeyboardInterrupt(), at=1008.9 if in_time else math.inf, then=lambda: left(leader.store, 1))
    assert [path for _, path, _ in leader.sent] == ["release"] * in_time
    assert all(timeout_s > 0.99 for _, _, timeout_s in leader.sent)
    assert leader.now <= 1010
    leader.play(leader.life.ending("interrupted", keep=False))
    assert leader.sent[-1][0] == "DELETE"
    assert leader.now <= 1011


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_rank_0_that_fails_keeps_its_slot_for_as_long_as_another_rank_is_in_the_phase(daemon, lead, error):
    """That one computes, on GPUs that another job would be given."""
    leader = lead(others=2)
    left(leader.store, 1, rank=1)
    leader.enter("rollout")
    kept = "rank 0 left rollout, and rank 2 did not: slot t3 is kept until rank 2 has left it, or the job ends"

    with pytest.raises(rollmuxd.RollmuxError, match=kept):
        leader.leave(error)
    assert 1009 <= leader.now <= 1011  # the prompt, or the traceback, comes all the same
    assert leader.releases() == 0
    assert kept in leader.told("1/over")["error"]

    def interrupt():
        raise KeyboardInterrupt

    for when in (5000, 9000):  # nor is it forgotten
        enters = leader.life.entering("train")
        with pytest.raises(KeyboardInterrupt):
            leader.play(enters, at=when, then=interrupt)
        enters.close()
        assert leader.now >= when
        assert leader.releases() == 0
    leader.enter("train", at=9100, then=lambda: left(leader.store, 1, rank=2))
    assert leader.releases() == 1
    assert daemon.phases == ["rollout", "train"]
    assert leader.told("2/granted")["phase"] == "train"


def test_a_slot_that_is_kept_for_other_ranks_goes_with_the_job(daemon, lead):
    leader = lead(others=2)
    leader.enter("rollout")
    with pytest.raises(rollmuxd.RollmuxError, match="kept until ranks 1, 2 have left it, or the job ends"):
        leader.leave(ValueError("bad"))
    leader.job.end("failed")

    assert leader.releases() == 0  # the daemon takes it, and looks whether its GPUs are clean
    assert daemon.ended == {"a": "failed"}


def test_who_is_in_a_phase_that_rank_0_has_left_is_told_so_and_goes_on_with_it(daemon, lead):
    leader = lead()
    follower = follow(leader.store)
    leader.enter("rollout")
    at_once(follower.granted("rollout"))
    with pytest.raises(rollmuxd.RollmuxError):
        leader.leave(ValueError("bad"))

    told = "rank 0 did not leave rollout in good order: .*rank 1 did not: .*Whether the slot was kept is not known"
    with pytest.raises(rollmuxd.RollmuxError, match=told):
        next(follower.left("rollout", failing=False))
    slot = leader.enter("train")
    assert at_once(follower.granted("train"))["slot"] == slot.id


def test_who_comes_to_a_phase_that_rank_0_has_left_meanwhile_does_not_enter_it(daemon, lead):
    leader = lead()
    follower = follow(leader.store)
    leader.enter("rollout")
    with pytest.raises(rollmuxd.RollmuxError):
        leader.leave(ValueError("bad"))

    with pytest.raises(
        rollmuxd.RollmuxError, match=r"rank 0 has left rollout before rank 1 entered it: .*continue with it"
    ):
        next(follower.granted("rollout"))
    leader.enter("train")
    assert leader.releases() == 1


# ---- ranks that do not come, or come again ---------------------------------------------------------------------------


def test_a_rank_that_has_left_the_job_is_waited_for_in_no_phase(daemon):
    """It has failed between two phases; its ``with`` ends its part in good order."""
    done = []

    def loop(job, rank):
        with job.phase("rollout"):
            pass
        if rank == 1:
            raise ZeroDivisionError
        with job.phase("train"):
            done.append(rank)

    first, second, third = crew(loop)

    assert (first, type(second), third) == (None, ZeroDivisionError, None)
    assert sorted(done) == [0, 2]
    assert daemon.phases == ["rollout", "train"]


def test_a_rank_that_cannot_start_although_rank_0_has_is_waited_for_in_no_phase(daemon, lead, monkeypatch):
    leader = lead()

    def find(*given):
        raise rollmuxd.RollmuxError("ROLLMUX_URL is no address")

    monkeypatch.setattr("rollmuxd.client.discovery.find", find)
    with pytest.raises(rollmuxd.RollmuxError, match="no address"):
        rollmuxd.job("a", ranks=2, rank=1, store=leader.store).start()
    leader.enter("rollout")
    leader.leave()
    assert leader.releases() == 1


def test_of_the_ranks_that_are_waited_for_those_are_named_that_are_in_the_phase(daemon, lead, capsys):
    leader = lead(others=3)
    followers = [follow(leader.store, rank, 4) for rank in (1, 2, 3)]
    leader.enter("rollout")
    followers[0].publish_gone("finished")
    left(leader.store, 1, rank=2)
    leader.leave(at=1100, then=lambda: followers[2].publish_gone("failed"))

    assert "rollout waits for rank 3 to leave it (for 1 min now)" in capsys.readouterr().err
    assert leader.releases() == 1


@pytest.mark.parametrize("at_exit", [False, True])
def test_a_rank_that_ends_its_part_in_the_midst_of_a_phase_computes_there_until_it_leaves_it(daemon, lead, at_exit):
    store = Store()
    leader = lead(store)
    follower = rollmuxd.job("a", ranks=2, rank=1, store=store)
    leader.enter("rollout")
    phase = follower.phase("rollout")
    phase.__enter__()
    if at_exit:  # what has not left its phase by then never will
        follower._runtime._at_exit()
    else:
        follower.end()
        assert "rollmuxd/a/1/gone/1" not in store.kept
        phase.__exit__(None, None, None)
    assert "rollmuxd/a/1/gone/1" in store.kept
    leader.leave()
    assert leader.now == 1000
    assert leader.releases() == 1


@pytest.mark.parametrize("waits_for", ["the start", "a phase"])
def test_a_wait_that_a_rank_gives_up_counts_for_nothing(daemon, lead, waits_for):
    """``asyncio.timeout``, a notebook: asked again, it is the same phase of the same start."""
    store = Store()
    job = rollmuxd.job("a", ranks=2, rank=1, store=store)
    life = job._runtime
    if waits_for == "a phase":
        leader = lead(store)
        job.start()
    for _ in range(3):
        waits = life.entering("rollout")
        assert isinstance(next(waits), Pause)
        with pytest.raises(asyncio.CancelledError):
            waits.throw(asyncio.CancelledError())
    if waits_for == "the start":
        leader = lead(store)
    granted = leader.enter("rollout")

    assert at_once(life.entering("rollout")).id == granted.id
    leaves = leader.life.leaving(None, None)
    assert isinstance(next(leaves), Pause)  # it is in there, and is waited for
    at_once(life.leaving(None, ValueError("bad")))
    leader.play(leaves)
    assert leader.releases() == 1


def test_a_rank_0_that_gives_up_a_wait_and_asks_again_does_not_wait_for_who_has_ended_for_that(daemon, lead):
    daemon.wait("rollout", math.inf)
    store = Store()
    leader = lead(store)
    waits = leader.life.entering("rollout")
    next(waits)
    waits.close()
    follower = follow(store)
    with pytest.raises(rollmuxd.RollmuxError) as told:
        next(follower.granted("rollout"))
    assert str(told.value) == (
        "rank 0 got no slot for rollout: it was interrupted. If rank 0 continues, continue with it; "
        "if not, end this one too, or start all of them again"
    )
    follower.publish_gone("failed")

    daemon.go("rollout")
    leader.enter("rollout")
    leader.leave()
    assert leader.now < 1060
    assert daemon.phases == ["rollout"]


def given_up(flow):
    assert isinstance(next(flow), Pause)
    with pytest.raises(asyncio.CancelledError):
        flow.throw(asyncio.CancelledError())


def test_ranks_that_all_give_up_a_phase_and_go_on_with_the_next_one_meet_there(daemon, lead):
    """``asyncio.timeout`` around an optional phase, in a program that is the same on each rank. This one is earlier."""
    daemon.wait("rollout", math.inf)
    store = Store()
    leader, follower = lead(store), follow(store)
    given_up(follower.granted("rollout"))
    enters = follower.granted("train")
    for _ in range(3):
        waits = leader.life.entering("rollout")
        next(waits)
        waits.close()
        assert isinstance(next(enters), Pause)
    with pytest.raises(asyncio.CancelledError):
        enters.throw(asyncio.CancelledError())

    slot = leader.enter("train")
    assert at_once(follower.granted("train"))["slot"] == slot.id
    leaves = leader.life.leaving(None, None)
    assert isinstance(next(leaves), Pause)
    left(store, 4)
    leader.play(leaves)


def test_a_phase_that_went_wrong_for_rank_0_alone_stands_in_nobodys_way_to_the_next_one(daemon, lead):
    store = Store()
    leader, follower = lead(store), follow(store)
    given_up(follower.granted("rollout"))
    leader.enter("rollout")
    with pytest.raises(rollmuxd.RollmuxError, match="is kept until"):
        leader.leave(ValueError("bad"))
    enters = follower.granted("train")
    assert isinstance(next(enters), Pause)

    slot = leader.enter("train")
    assert leader.releases() == 1
    with pytest.raises(StopIteration) as told:
        enters.send(None)
    assert told.value.value["slot"] == slot.id
    left(store, 2)
    leader.leave()


# ---- stores that fail ------------------------------------------------------------------------------------------------


class Once(Store):
    """Fails once at a key that ends so: before it has written, or after."""

    def __init__(self, key, when="before", error=None):
        super().__init__()
        self.key, self.when, self.error = key, when, error or OSError("the store is away")

    def set(self, key, value):
        fails = self.error is not None and key.endswith(self.key)
        if not fails or self.when == "after":
            super().set(key, value)
        if fails:
            error, self.error = self.error, None
            raise error


@pytest.mark.parametrize("comes", ["early", "late"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [OSError("the store is away"), KeyboardInterrupt()])
def test_a_grant_that_fails_to_be_told_lets_nobody_compute_in_a_slot_that_is_given_back(
    daemon, lead, error, when, comes
):
    store = Once("/1/granted", when, error)
    leader = lead(store)
    follower = follow(store)
    waits = follower.granted("rollout")
    if comes == "early":
        next(waits)
    with pytest.raises(type(error)):
        leader.enter("rollout")

    with pytest.raises(rollmuxd.RollmuxError, match="rank 0 has left rollout before rank 1 entered it"):
        next(waits)
    assert leader.releases() == 0
    leader.enter("train")
    assert (leader.now, leader.releases()) == (1000, 1)
    at_once(follower.granted("train"))


def test_who_has_entered_before_the_telling_of_the_grant_has_failed_is_waited_for(daemon, lead):
    follower = []

    class Quick(Once):
        def set(self, key, value):
            try:
                super().set(key, value)
            except KeyboardInterrupt:
                follower.append(follow(self))
                at_once(follower[0].granted("rollout"))
                raise

    store = Quick("/1/granted", "after", KeyboardInterrupt())
    leader = lead(store)
    with pytest.raises(KeyboardInterrupt):
        leader.enter("rollout")

    enters = leader.life.entering("train")
    assert isinstance(next(enters), Pause)
    assert leader.releases() == 0
    with pytest.raises(rollmuxd.RollmuxError, match="did not leave rollout in good order: it was interrupted"):
        next(follower[0].left("rollout", failing=False))
    leader.play(enters)
    assert leader.releases() == 1
    at_once(follower[0].granted("train"))


def test_who_is_interrupted_after_the_grant_was_told_waits_for_those_who_have_entered(daemon, lead):
    """Between that and its phase: nothing of it is left but the slot."""
    leader = lead()
    follower = follow(leader.store)
    leader.enter("rollout")
    leader.life.slot, leader.life._depth = None, 0
    at_once(follower.granted("rollout"))

    enters = leader.life.entering("train")
    assert isinstance(next(enters), Pause)
    with pytest.raises(rollmuxd.RollmuxError, match="did not leave rollout in good order: it was interrupted"):
        next(follower.left("rollout", failing=False))
    leader.play(enters)
    assert leader.releases() == 1


def test_who_is_interrupted_before_the_grant_is_told_tells_nothing_else_of_the_phase_before(daemon, lead, monkeypatch):
    leader = lead()
    follower = follow(leader.store)
    leader.enter("rollout")
    at_once(follower.granted("rollout"))
    leaves = follower.left("rollout", failing=False)
    next(leaves)
    leader.leave()

    def interrupted(slot):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(leader.life._heartbeat, "slot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leader.enter("train")
    leader.enter("train")
    assert leader.releases() == 2
    with pytest.raises(StopIteration):
        leaves.send(None)
    at_once(follower.granted("train"))


def test_a_grant_that_the_store_has_taken_lets_others_in_though_it_shows_it_no_more(daemon, lead):
    leader = lead()
    leader.enter("rollout")
    del leader.store.kept["rollmuxd/a/1/1/granted"]
    leaves = leader.life.leaving(None, None)
    assert isinstance(next(leaves), Pause)
    left(leader.store, 1)
    leader.play(leaves)


# ---- interrupted for a second time -----------------------------------------------------------------------------------


def test_a_second_ctrl_c_while_rank_0_waits_for_the_others_leaves_the_end_seconds_no_more(daemon):
    job = rollmuxd.job("a", ranks=2, rank=0, store=Store())
    job.start()
    life = job._runtime
    life.run(life.entering("rollout"))
    leaves = life.leaving(None, KeyboardInterrupt())
    assert isinstance(next(leaves), Pause)  # rank 1 is in there
    with pytest.raises(KeyboardInterrupt):
        leaves.throw(KeyboardInterrupt())

    assert next(life._session.end("interrupted", keep=False)).timeout_s <= 1
    job.end()
