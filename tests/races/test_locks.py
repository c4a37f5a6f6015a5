"""Races of those who give turns by a lock: who waits, who died, who came first (the trackers of RTS and RLix).

Each test says what the peer does and what we do; each has been seen to fail with the part of our code taken out that
it is about.
"""

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import DriverTraits
from rollmuxd.core.errors import Rejected, StaleFence


def test_rts_80_a_wait_that_was_given_up_is_never_promoted(core):
    """RTS: an acquire that times out leaves its place in the queue; it is promoted later, and holds the lock until an
    operator yields by hand (#80, and `server.go`, whose queue has no remove).

    We: a request that nobody attends is passed over when its turn comes, and is withdrawn after the re-attach time.
    """
    world = core()
    for name in "abc":
        world.join(name)
    a = world.ask("a")
    world.obey()
    b, c = world.ask("b"), world.ask("c")
    world.tell(i.DetachSlot(b.id))

    world.release(a)
    world.obey()
    assert b.status == "queued"
    world.wait(10.0)  # the grace in which b's turn is awaited
    world.obey()

    assert (b.status, c.status) == ("queued", "running")
    world.wait(world.config.reattach_ms / 1000)
    assert b.status == "withdrawn"
    world.release(c)
    world.wait(60.0)
    world.obey()
    assert [fact.slot for fact in world.of(f.SlotClaimed)] == [a.id, c.id]


def test_rts_80_who_comes_back_in_time_has_kept_its_place(core):
    """The other side of it: RTS can only forget the place or keep it for ever.

    We: a caller whose connection broke asks again with the same request and is where it was.
    """
    world = core()
    for name in "abc":
        world.join(name)
    a = world.ask("a")
    world.obey()
    b, c = world.ask("b"), world.ask("c")
    world.tell(i.DetachSlot(b.id))
    world.tell(i.RequestSlot(b.job, b.session, b.phase, b.request_id))

    world.release(a)
    world.obey()

    assert (b.status, c.status) == ("running", "queued")


def test_rts_137_who_is_registered_and_idle_does_not_keep_others_from_their_first_turn(core):
    """RTS: the first acquire waits for ever while pods of another job exist which have not acquired anything (#137).

    We: a turn whose job has not begun is skipped.
    """
    world = core()
    for name in "abc":
        world.join(name)

    c = world.ask("c")
    world.obey()

    assert c.status == "running"


def test_rts_183_two_first_turns_in_one_instant_are_two_turns(core):
    """RTS: with the deadlock of first acquires repaired (PR #152), two jobs came onto one GPU; since then (PR #183) a
    promotion is held back until the grant was seen in use, for at most 30 s.

    We: GPUs are held from the decision on, before anything is loaded, and an empty GPU proves nothing meanwhile.
    """
    world = core()
    for name in "ab":
        world.join(name)

    a, b = world.ask("a"), world.ask("b")
    world.look()  # nothing is there yet: the load has not begun
    world.wait(31.0)
    world.look()

    assert (a.status, b.status) == ("loading", "queued")
    assert world.state.nodes["r/gpus"].gpus["r/gpu0"].holder == a.id


@pytest.mark.parametrize("idempotent", [True, False], ids=["told again", "asked"])
def test_rts_85_killed_in_the_middle_of_a_switch_it_sees_the_switch_through(core, idempotent):
    """RTS: an orchestrator restarted in mid-switch knew nothing of it (PR #85, #86).

    We: issuing an order is a fact. After a restart it is told again where that does no harm, else its driver is asked,
    and nobody is put onto the GPUs before that has an end.
    """
    world = core(driver=DriverTraits(idempotent=idempotent, probes=True))
    for name in "ab":
        world.join(name)
    a = world.ask("a")
    world.obey()
    world.release(a)
    b = world.ask("b")  # a's state is to be parked, and the daemon dies over it
    (park,) = world.told

    world.restart()

    b = world.state.slots[b.id]
    assert b.status == "queued"
    assert (world.told, world.probed) == (([park], []) if idempotent else ([], [park]))
    world.told = world.told or [park]
    world.look(r=40_000)
    world.tell(i.RequestSlot(b.job, b.session, b.phase, b.request_id))  # its client is back
    assert b.status == "queued"
    world.obey()
    assert b.status == "running"
    assert world.job("a").status == "admitted"


def test_rts_85_after_a_restart_the_holder_holds_and_the_queue_has_its_order(core):
    """RTS: group and job states after a restart are rebuilt from what pods show.

    We: who holds what, under which fence, and who waits in which order, is in the journal.
    """
    world = core()
    for name in "abc":
        world.join(name)
    a = world.ask("a")
    world.obey()
    b, c = world.ask("b"), world.ask("c")
    fence = a.fence

    world.restart()
    world.look(r=40_000)

    a, b, c = (world.state.slots[slot.id] for slot in (a, b, c))
    assert (a.status, a.fence, b.status, c.status) == ("running", fence, "queued", "queued")
    world.release(a)
    world.tell(i.RequestSlot(b.job, b.session, b.phase, b.request_id))
    world.tell(i.RequestSlot(c.job, c.session, c.phase, c.request_id))
    world.obey()
    assert (b.status, c.status) == ("running", "queued")


def test_rts_79_who_starts_to_use_a_gpu_without_asking_is_seen_and_nobody_is_put_beside_it(core):
    """RTS: a job can turn from idle to active without notice; a resync loop was added (PR #79).

    We: a node with bytes that nobody accounts for is *occupied*: nothing starts there, it says so, and it comes back
    by itself.
    """
    world = core()
    world.join("a")
    world.look(r=30_000)

    a = world.ask("a")

    assert world.state.nodes["r/gpus"].status == "occupied"
    assert a.status == "queued"
    assert world.told == []
    world.look()
    world.obey()
    assert a.status == "running"


def test_rts_154_phases_that_need_the_pools_in_any_order_do_not_lock_each_other_out(core):
    """RTS: two state locks of its agent were taken in two orders (PR #154); its guide asks for "trainer lock before
    sampler lock", and holds the trainer's while it waits for the sampler's.

    We: a turn claims all its GPUs at once or none. Three jobs, each with a phase over both pools, go round.
    """
    world = core()
    for name in "abc":
        world.join(name, "rollout", "train", "sync")
    turn = dict.fromkeys("abc", 0)
    asked = {name: world.ask(name, "rollout") for name in "abc"}

    for _ in range(60):
        world.obey()
        running = [name for name, slot in asked.items() if slot.status == "running"]
        assert running, "nobody can go on"
        for name in running:
            holds = [slot.id for slot in world.state.slots.values() if slot.status in {"loading", "running"}]
            assert len(holds) <= 2
            turn[name] += 1
            world.now += 1.0
            world.release(asked[name])
            asked[name] = world.ask(name, ("rollout", "train", "sync")[turn[name] % 3])

    assert min(turn.values()) >= 9, turn


def test_rts_a_phase_over_two_pools_holds_neither_while_it_waits_for_the_other(core):
    """RTS: weight sync holds the trainer's lock while it waits for the sampler's, which is another job's for minutes.

    We: while one pool is another's, none of the GPUs of the other is held.
    """
    world = core()
    world.join("a", "rollout", "train", "sync")
    world.join("b", "rollout", "train", "sync")
    b = world.ask("b")
    world.obey()
    assert b.status == "running"

    waits = world.ask("a", "sync")
    world.obey()

    assert waits.status == "queued"
    assert [gpu.holder for gpu in world.state.nodes["t/gpus"].gpus.values()] == [None, None]


def test_rts_a_dead_holder_keeps_the_lock_no_longer_than_its_lease(core):
    """RTS: no lease and no heartbeat; a job whose process died keeps the lock for as long as its pods are there.

    We: it is lost after one lease, and its GPUs go on once they were verified clean; not before, and not later.
    """
    world = core()
    for name in "ab":
        world.join(name)
    a = world.ask("a")
    world.obey()
    b = world.ask("b")

    world.silent("a")
    world.look(r=40_000)  # what is dead may still have its bytes there

    assert a.status == "lost"
    assert b.status == "queued"
    world.look()
    world.obey()
    assert (a.status, b.status) == ("over", "running")


def test_rts_nobody_yields_for_anybody_else(core):
    """RTS: the channel is open, and anybody may yield for anybody.

    We: a release needs the fence of the grant, which its holder alone was told.
    """
    world = core()
    world.join("a")
    a = world.ask("a")
    world.obey()
    assert a.fence is not None
    before = len(world.facts)

    for wrong in (a.fence._replace(number=a.fence.number + 1), a.fence._replace(incarnation=0)):
        with pytest.raises(StaleFence):
            world.tell(i.ReleaseSlot(a.id, wrong))

    assert (a.status, len(world.facts)) == ("running", before)


def test_rlix_d455b0c_who_asks_again_at_once_does_not_starve_the_others(core):
    """RLix: a starvation deadlock between those who come back at once and those who wait (its commit d455b0c).

    We: a schedule. Whoever asks for the next turn with its release comes after everybody who waits.
    """
    world = core()
    for name in ("greedy", "b", "c"):
        world.join(name, "rollout")
    greedy = world.ask("greedy")
    world.obey()
    held = ["greedy"]
    others = {name: world.ask(name) for name in "bc"}

    for number in range(9):
        running = greedy if greedy.status == "running" else next(s for s in others.values() if s.status == "running")
        if running is greedy:
            world.release(greedy, next=i.NextRequest("rollout", f"again-{number}"))
            greedy = world.state.slots[greedy.next_slot]
        else:
            name = world.state.jobs[running.job].spec.name
            world.release(running)
            others[name] = world.ask(name)
        world.obey()
        held += [world.state.jobs[s.job].spec.name for s in (greedy, *others.values()) if s.status == "running"]

    assert [held.count(name) for name in ("greedy", "b", "c")] == [4, 3, 3]


def test_slurm_a_paused_job_gives_the_memory_of_its_gpus_away(core):
    """Slurm: a suspended job keeps its GPU memory, so that nobody can use the GPU that it does not use.

    We: a paused job gets no new turn, and what it left on the GPUs is parked for the next.
    """
    world = core()
    for name in "ab":
        world.join(name)
    a = world.ask("a")
    world.obey()
    world.tell(i.PauseJob(a.job, "ann"))
    world.release(a)

    b = world.ask("b")

    assert world.obey() == ["park", "load"]
    assert b.status == "running"


def test_a_request_that_is_made_twice_is_one(core):
    """Peers with a plain lock count a repeated acquire (after a broken connection) as a second waiter.

    We: the same request id is the same slot, whatever became of it meanwhile.
    """
    world = core()
    world.join("a")
    a = world.ask("a")
    again = i.RequestSlot(a.job, a.session, a.phase, a.request_id)
    assert world.tell(again).slot == a.id
    world.obey()
    assert world.tell(again).slot == a.id
    with pytest.raises(Rejected):
        world.tell(i.RequestSlot(a.job, "e999", a.phase, a.request_id))
    assert len(world.of(f.SlotQueued)) == 1
