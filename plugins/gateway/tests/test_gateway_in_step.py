"""The rung changes within a rollout: the rest of the responses is generated on it, by the same weights, token by token.

Decision 0041 says why that is off by default.
"""

import pytest
from gateway_world import World, alone
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollmuxd.rollout import lengths
from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Config, Replica, ReplicaStatus, RequestStatus, RolloutStatus
from rollmuxd_gateway.core.rungs import Rules, Rungs
from rollmuxd_gateway.fakes.hashlm import Engine, Model

GPUS = [f"host1/gpu{number}" for number in range(4)]
NARROW = [f"tp1-{number}" for number in range(4)]
OLD, NEW = Model(median=120, sigma=0.3), Model(median=120, sigma=0.3, version="7")
LONG, SHORT = 600, 30


def world(**config):
    """Four replicas of one GPU with the weights of this step, and one of four GPUs that slept when they came."""
    it = World(0, model=NEW, config=Config(**{"in_step": True, "switch_ms": 200, "tail": "keep", **config}))
    it.gateway.rungs, it.gateway.rung = Rungs(Rules("h800", "qwen2.5-14b")), 1
    it.gateway.rungs._prior = lengths.fit([[SHORT], [2 * SHORT], [300], [LONG]] * 4, LONG)  # of rollouts before
    for name, gpus in [*zip(NARROW, zip(GPUS, strict=True), strict=True), ("tp4-0", tuple(GPUS))]:
        it.engines[name] = Engine(OLD if name == "tp4-0" else NEW)
        status = ReplicaStatus.PARKED if name == "tp4-0" else ReplicaStatus.OPEN
        it.asleep |= {name} if status is ReplicaStatus.PARKED else set()
        it.tell(i.Register(Replica(name, f"http://{name}", gpus=gpus, tp=len(gpus), status=status)))
    it.tell(i.BeginRollout(total=28, gpus=tuple(GPUS)))
    it.tell(i.Weights(tuple(NARROW), "7"))
    return it


def ask(it, **params):
    """Twenty-four short responses and four long ones; returns what an engine makes of each."""
    wanted = {}
    for number in range(28):
        prompt = [1 + number, 2, 3, 4, 5]
        own = {"max_tokens": LONG if number < 4 else SHORT + number, "temperature": 0, "ignore_eos": True, **params}
        wanted[it.ask(prompt, **own)] = alone(NEW, prompt, **own).out
    return wanted


def check(it, wanted):
    for name, ids in wanted.items():
        request = it.ended[name]
        assert request.status is RequestStatus.DONE, request.error
        assert request.ids == ids, request.segments
    it.check_gpus()


def until(it, done):
    for _ in range(20_000):
        if done():
            return
        it.step()
    raise AssertionError("it does not come")


def switching(it):
    until(it, lambda: it.gateway.rollout.status is RolloutStatus.SWITCHING)


def test_the_rest_of_a_rollout_is_generated_on_the_better_rung_with_the_weights_of_the_step():
    it = world()
    seen, handle = [], it.gateway.handle
    it.gateway.handle = lambda what, now: seen.extend(told := handle(what, now)) or told
    wanted = ask(it)
    check(it.run(), wanted)
    rollout = it.gateway.rollout
    assert (it.gateway.rung, rollout.switches, rollout.status) == (4, 1, RolloutStatus.OPEN)
    assert it.asleep == set(NARROW)
    kinds = [type(effect) for effect in seen if isinstance(effect, e.Park | e.Wake | e.Write)]
    assert kinds == [e.Park] * 4 + [e.Wake, e.Write]
    moved = [request for request in it.ended.values() if len(request.segments) > 1]
    assert len(moved) == 4
    assert {(request.segments[-1].why, request.segments[-1].replica) for request in moved} == {("switch", "tp4-0")}
    assert it.gateway.switch_ms > 0


def test_without_the_flag_nothing_changes_within_a_rollout():
    it = world(in_step=False)
    wanted = ask(it)
    check(it.run(), wanted)
    assert (it.gateway.rung, it.gateway.in_step) == (1, "off")


@pytest.mark.parametrize("once", ["/update_weights", ""])
def test_where_the_weights_cannot_be_sent_again_the_rung_stays_and_the_status_says_why(once):
    it = world()
    if once:
        it.tell(i.Weights(tuple(NARROW), "7", once))
    else:
        it.gateway._writes = False
    wanted = ask(it)
    check(it.run(), wanted)
    assert it.gateway.rung == 1
    assert ("by /update_weights, which cannot be sent again" if once else "no weights have come") in it.gateway.in_step


def test_gpus_that_come_while_the_rung_changes_are_used_by_the_next_one():
    it = World(0, model=NEW, config=Config(in_step=True, switch_ms=200, tail="keep"))
    it.gateway.rungs, it.gateway.rung = Rungs(Rules("h800", "qwen2.5-14b")), 1
    it.gateway.rungs._prior = lengths.fit([[SHORT], [2 * SHORT], [300], [LONG]] * 4, LONG)
    for tp in (1, 2):
        for at in range(0, 4, tp):
            name, gpus = f"tp{tp}-{at}", tuple(GPUS[at : at + tp])
            it.engines[name] = Engine(OLD)
            it.asleep.add(name)
            it.tell(i.Register(Replica(name, f"http://{name}", gpus=gpus, tp=tp, status=ReplicaStatus.PARKED)))
    it.tell(i.BeginRollout(total=28, gpus=tuple(GPUS[:2])))
    it.deliver()
    for name in NARROW[:2]:
        it.engines[name].model = NEW
    it.tell(i.Weights(tuple(NARROW[:2]), "7"))
    wanted = ask(it)
    switching(it)
    it.tell(i.Grow(tuple(GPUS)))
    check(it.run(), wanted)
    assert it.gateway.rung == 2
    last = {request.segments[-1].replica for request in it.ended.values() if len(request.segments) > 1}
    assert last == {"tp2-0", "tp2-2"}


def test_a_new_rung_that_was_suspected_while_it_took_the_weights_is_used_once_it_is_well():
    it = world()
    wanted = ask(it)
    handle = it.gateway.handle

    def doubted(what, now):
        it.gateway.handle = handle if isinstance(what, i.Weights) else doubted
        if it.gateway.handle is doubted:
            return handle(what, now)
        told = [*handle(i.Probed("tp4-0", ok=False), now), *handle(what, now)]
        assert it.gateway.replicas["tp4-0"].status is ReplicaStatus.SUSPECT
        return [*told, *handle(i.Probed("tp4-0", ok=True), now)]

    it.gateway.handle = doubted
    check(it.run(), wanted)
    assert (it.gateway.rung, it.gateway.rollout.switches) == (4, 1)


def test_a_response_that_cannot_move_keeps_the_rung():
    it = world()
    wanted = ask(it, frequency_penalty=0.1)
    check(it.run(), wanted)
    assert (it.gateway.rung, it.gateway.rollout.switches) == (1, 0)


def test_a_change_that_costs_more_than_a_third_of_its_gain_is_not_made():
    it = world(switch_ms=8_000)
    wanted = ask(it)
    check(it.run(), wanted)
    assert it.gateway.rung == 1


@pytest.mark.parametrize("fault", ["broken", "unwritable"])
def test_where_the_next_rung_does_not_come_up_the_rest_is_generated_on_the_one_before(fault):
    it = world()
    getattr(it, fault).add("tp4-0")
    wanted = ask(it)
    check(it.run(), wanted)
    assert (it.gateway.rung, it.gateway.rollout.switches) == (1, 0)
    assert "tp4-0 was not woken" in it.gateway.in_step
    assert it.asleep >= {"tp4-0"} or fault == "broken"


def test_where_an_engine_dies_while_its_rung_goes_to_sleep_the_others_go_on():
    it = world()
    wanted = ask(it)
    switching(it)
    it.kill("tp1-0")
    check(it.run(), wanted)
    assert it.gateway.rung == 1
    assert "tp1-0 died" in it.gateway.in_step
    assert "tp4-0" in it.asleep, "the GPU of a dead engine may be held"


def test_a_rollout_that_is_closed_while_its_rung_changes_leaves_the_next_one_whole():
    it = world()
    wanted = ask(it)
    switching(it)
    it.tell(i.Cancel(tuple(wanted)))
    it.tell(i.CloseRollout())
    for _ in range(50):
        it.step()
    it.tell(i.BeginRollout(total=28, gpus=tuple(GPUS)))
    wanted = ask(it)
    check(it.run(), wanted)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_whatever_fails_while_the_rung_changes_each_response_is_whole_and_no_gpu_has_two_engines_awake(data):
    it = world(attempts=50)
    for kind in ("broken", "unwritable"):
        if data.draw(st.integers(0, 3)) == 0:
            getattr(it, kind).add("tp4-0")
    wanted = ask(it)
    switching(it)
    for _ in range(data.draw(st.integers(0, 60))):
        it.step()
    if data.draw(st.booleans()):
        alive = [name for name in it.engines if name in NARROW[:3]]
        it.kill(data.draw(st.sampled_from(alive)))
    check(it.run(), wanted)
