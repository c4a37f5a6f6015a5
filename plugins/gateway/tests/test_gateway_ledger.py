"""What becomes of requests when replicas fail, shrink and come back: nothing is lost, nothing comes twice."""

from array import array
from itertools import count, pairwise

import pytest
from gateway_world import World, alone
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core import lifecycle
from rollmuxd_gateway.core.balancing import Balancer, Rules
from rollmuxd_gateway.core.model import Config, ReplicaStatus, RequestStatus, RolloutStatus
from rollmuxd_gateway.fakes.hashlm import Model

MODEL = Model(median=120, sigma=0.5)


def prompts(count):
    return [[1 + number % 200, 2, 3, 4, 5 + number // 200, 6, 7, 8, 9] for number in range(count)]


def ask_all(world, count, **params):
    return {
        world.ask(prompt, max_tokens=300, temperature=0, **params): alone(
            MODEL, prompt, max_tokens=300, temperature=0, **params
        ).out
        for prompt in prompts(count)
    }


def check(world, wanted):
    for name, ids in wanted.items():
        request = world.ended[name]
        assert request.status is RequestStatus.DONE, request.error
        assert request.ids == ids, f"{name} {request.segments}"
        places = [(segment.start, segment.end) for segment in request.segments]
        kept = [place for place in places if place[1] > place[0]]
        assert all(before[1] == after[0] for before, after in pairwise(kept)), places
    for replica in world.gateway.replicas.values():
        assert not replica.live
        assert replica.prefill_tokens == 0


def run_until(world, done):
    while world.gateway.progress()[0] < done:
        world.step()


def test_a_tail_is_gathered_and_its_replicas_are_parked_once_they_are_idle():
    world = World(4, model=MODEL, max_num_seqs=64)
    world.tell(i.BeginRollout(total=48))
    wanted = ask_all(world, 48)
    run_until(world, 39)
    world.tell(i.Shrink(("host1/gpu0",)))
    verdict = world.gateway.last_verdict
    assert verdict.accepted, verdict
    assert verdict.moves > 0
    assert world.gateway.rollout.status is RolloutStatus.TAIL
    while world.gateway.rollout.status is RolloutStatus.TAIL:
        world.step()
    assert world.gateway.progress()[0] < 48, "released only when all was over"
    assert world.asleep == set(verdict.release)
    world.run()
    check(world, wanted)
    assert all(drain <= 100 for drain in world.gateway.rollout.drains_ms)


def test_the_replica_with_most_unfinished_tokens_is_kept():
    world = World(3, model=MODEL)
    world.tell(i.BeginRollout(total=9))
    ask_all(world, 9)
    run_until(world, 7)
    most = max(world.gateway.replicas.values(), key=lambda r: sum(world.gateway.requests[n].context for n in r.live))
    world.tell(i.Shrink(("host1/gpu0",)))
    assert world.gateway.last_verdict.keep == (most.id,)


def test_a_keep_of_half_a_replica_is_rounded_up():
    world = World(2, model=MODEL, gpus=[("h/gpu0", "h/gpu1"), ("h/gpu2", "h/gpu3")])
    world.tell(i.BeginRollout(total=8))
    ask_all(world, 8)
    run_until(world, 6)
    world.tell(i.Shrink(("h/gpu0",)))
    assert len(world.gateway.last_verdict.gpus) == 2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dict(config=Config(tail="keep")), "tail_is_kept"),
        (dict(max_num_seqs=2), "no_room"),
    ],
)
def test_a_tail_that_does_not_fit_is_refused_and_nothing_moves(make, reason):
    world = World(3, model=MODEL, **make)
    for replica in world.gateway.replicas.values():
        replica.max_num_seqs = make.get("max_num_seqs", 256)
    world.tell(i.BeginRollout(total=6))
    wanted = ask_all(world, 6)
    run_until(world, 1)
    world.tell(i.Shrink(("host1/gpu0",)))
    assert world.gateway.last_verdict.reason == reason
    check(world.run(), wanted)
    assert all(len(request.segments) == 1 for request in world.ended.values())


def test_a_tail_beyond_the_kv_cache_is_refused():
    world = World(2, model=MODEL)
    for replica in world.gateway.replicas.values():
        replica.kv_tokens = 200
    world.tell(i.BeginRollout(total=8))
    ask_all(world, 8)
    run_until(world, 2)
    world.tell(i.Shrink(("host1/gpu0",)))
    assert world.gateway.last_verdict.reason == "no_room"


def test_a_tail_that_ends_sooner_than_a_replica_is_parked_is_left_alone():
    world = World(4, model=MODEL)
    world.tell(i.BeginRollout(total=24))
    wanted = ask_all(world, 24)
    run_until(world, 17)
    world.gateway.shrink_ms = 600_000  # of the last tail
    assert world.gateway.plan_shrink(("host1/gpu0",)).reason == "not_worth_it"
    world.gateway.shrink_ms = 10
    assert world.gateway.plan_shrink(("host1/gpu0",)).accepted
    check(world.run(), wanted)


def test_the_replica_of_a_pinned_request_is_the_one_to_keep():
    world = World(2, model=MODEL)
    world.tell(i.BeginRollout(total=20))
    params = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
    world.ask([1, 1, 1, 1], target="r1", frequency_penalty=0.5, **params)
    longer = world.ask([2] * 400, target="r0", **params)
    ask_all(world, 18)
    run_until(world, 16)
    assert world.gateway.requests[longer].replica == "r0", "which has more unfinished"
    world.tell(i.Shrink(("host1/gpu0",)))
    verdict = world.gateway.last_verdict
    assert verdict.accepted, verdict
    assert (verdict.keep, verdict.pinned) == (("r1",), 0)


def test_a_shrink_that_is_refused_for_pinned_requests_says_how_many():
    world = World(2, model=MODEL)
    world.tell(i.BeginRollout(total=2))
    for number in range(2):
        prompt = [1, 1, 1, 1 + number]
        world.ask(prompt, max_tokens=300, temperature=0, frequency_penalty=0.5, ignore_eos=True)
    run_until_tokens(world, 20)
    world.tell(i.Shrink(("host1/gpu0",)))
    verdict = world.gateway.last_verdict
    assert (verdict.accepted, verdict.reason, verdict.pinned) == (False, "all_pinned", 1)


def test_a_pinned_request_keeps_its_replica_and_the_others_are_released():
    world = World(4, model=MODEL)
    world.tell(i.BeginRollout(total=8))
    pinned = world.ask([1, 1, 1, 1], max_tokens=300, temperature=0, frequency_penalty=0.5, ignore_eos=True)
    ask_all(world, 7)
    run_until(world, 6)
    world.gateway.requests[pinned].context  # noqa: B018
    at = world.gateway.requests[pinned].replica
    keep = next(r for r in world.gateway.replicas.values() if r.id != at and r.live)
    for replica in world.gateway.replicas.values():  # it shall not be the one to keep
        if replica.id == at:
            replica.gpus = ("host2/gpu0",)
    world.tell(i.Shrink(keep.gpus))
    assert world.gateway.last_verdict.pinned == 1
    while world.gateway.rollout.status is RolloutStatus.TAIL and not world.gateway.requests[pinned].over:
        world.step()
        if not world.gateway.requests[pinned].over:
            assert world.gateway.replicas[at].status is ReplicaStatus.DRAINING
    assert len(world.ended[pinned].segments) == 1


def test_a_killed_replica_costs_no_token():
    world = World(4, model=MODEL)
    wanted = ask_all(world, 48)
    run_until_tokens(world, 2_000)
    victim = next(r for r in world.gateway.replicas.values() if r.live)
    moved = list(victim.live)
    world.kill(victim.id)
    check(world.run(), wanted)
    assert moved
    assert victim.status is ReplicaStatus.DEAD
    assert all(world.ended[name].segments[-1].why == "fault" for name in moved)


def run_until_tokens(world, tokens):
    while world.gateway.rollout.tokens < tokens:
        world.step()


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_poison_request_ends_no_more_replicas_than_it_may(deaths):
    world = World(5, model=MODEL, poison=[7, 7, 7, 7], config=Config(poison_deaths=deaths))
    wanted = ask_all(world, 60)
    run_until_tokens(world, 500)
    poison = world.ask([1, 7, 7, 7, 7, 1], temperature=0)
    world.run()
    check(world, wanted)
    assert world.ended[poison].error[0] == 502
    assert "engines died of this request" in world.ended[poison].error[1]
    assert len(world.engines) >= 5 - deaths


def test_a_poison_request_that_is_alone_ends_two_replicas():
    world = World(5, model=MODEL, poison=[7, 7, 7, 7])
    poison = world.ask([1, 7, 7, 7, 7, 1], temperature=0)
    world.run()
    assert world.ended[poison].error[0] == 502
    assert len(world.engines) == 3


def test_the_death_of_an_engine_costs_a_rollout_its_share_of_the_engines_only():
    took = {}
    for killed in (False, True):
        world = World(4, model=MODEL, interval=16)
        wanted = ask_all(world, 128)
        run_until_tokens(world, 2_000)
        if killed:
            world.kill("r0")
        check(world.run(), wanted)
        took[killed] = world.now
    assert took[True] <= 1.6 * took[False]


def test_requests_that_met_two_deaths_for_no_fault_of_theirs_are_finished():
    world = World(3, model=MODEL)
    wanted = ask_all(world, 24)
    run_until_tokens(world, 400)
    world.kill("r0")
    for _ in range(1_000):
        world.step()
        both = [q for q in world.gateway.requests.values() if q.deaths and q.replica == "r1" and q.ids and not q.over]
        if both:
            break
    assert len(world.gateway.replicas["r1"].live) > 1
    world.kill("r1")
    check(world.run(), wanted)


def decoding_poison():
    """A prompt, and four ids in a row that its response has after a while: the engine dies when it has decoded them."""
    prompt = [3, 1, 4, 1, 5, 9]
    ids = alone(MODEL, prompt, max_tokens=300, temperature=0, ignore_eos=True).out
    return prompt, ids[100:104]


@pytest.mark.parametrize("seed", range(5))
def test_a_request_that_kills_while_it_decodes_ends_three_replicas_at_most_and_no_other_request(seed):
    prompt, poison = decoding_poison()
    world = World(5, model=MODEL, poison=poison, interval=16)
    wanted = ask_all(world, 40)
    for _ in range(7 * seed):
        world.step()
    name = world.ask(prompt, max_tokens=300, temperature=0, ignore_eos=True)
    world.run()
    check(world, wanted)
    assert "engines died of this request" in world.ended[name].error[1]
    assert len(world.engines) >= 2


def test_what_survived_the_place_of_a_death_is_under_suspicion_no_longer():
    world = World(3, model=MODEL)
    wanted = {}
    for number in range(2):
        wanted |= ask_all(world, 12)
        run_until_tokens(world, world.gateway.rollout.tokens + 200)
        assert not any(request.deaths for request in world.gateway.requests.values() if not request.over)
        world.kill(f"r{number}")
        while world.gateway.replicas[f"r{number}"].status is not ReplicaStatus.DEAD:
            world.step()
        suspects = [request for request in world.gateway.requests.values() if request.deaths]
        assert suspects
        while any(request.deaths and not request.over for request in suspects):
            world.step()
    check(world.run(), wanted)


def test_without_the_count_of_deaths_a_poison_request_would_end_them_all(monkeypatch):
    world = World(
        4, model=MODEL, poison=[7, 7, 7, 7], config=Config(poison_deaths=99, attempts=99, no_replica_ms=5_000)
    )
    world.ask([1, 7, 7, 7, 7, 1], temperature=0)
    world.run()
    assert not world.engines


def test_a_stalled_request_goes_on_elsewhere_and_a_paused_engine_is_no_stall():
    world = World(2, model=MODEL, config=Config(stall_ms=2_000))
    wanted = ask_all(world, 8)
    run_until_tokens(world, 100)
    silent = world.engines["r0"]
    names = list(world.gateway.replicas["r0"].live)
    assert names
    silent.step = lambda: False
    check(world.run(), wanted)
    assert {world.ended[name].segments[-1].why for name in names} == {"stall"}

    world = World(2, model=MODEL, config=Config(stall_ms=2_000))
    wanted = ask_all(world, 8)
    run_until_tokens(world, 100)
    world.engines["r0"].paused = True
    for _ in range(1_000):
        world.step()
    world.engines["r0"].paused = False
    check(world.run(), wanted)
    assert not world.gateway.count.faults


def test_a_paused_replica_gets_no_request_and_the_others_go_on():
    world = World(2, model=MODEL, config=Config(stall_ms=2_000))
    world.tell(i.Paused(("r0",), True))
    wanted = ask_all(world, 8)
    check(world.run(), wanted)
    assert {segment.replica for request in world.ended.values() for segment in request.segments} == {"r1"}
    world.tell(i.Paused(("r0",), False))
    world.ask(prompts(1)[0])
    assert world.gateway.replicas["r0"].live


def test_an_engine_that_refuses_since_it_was_paused_behind_the_gateways_back_costs_no_try():
    world = World(1, model=MODEL, config=Config(attempts=2))
    engine = world.engines["r0"]
    engine.paused = True
    world.step()
    wanted = ask_all(world, 4)
    for name in wanted:
        world.tell(i.Fault(name, 0, "server_error", "status 503"))
    for _ in range(500):
        world.step()
    assert [request.attempts for request in world.gateway.requests.values()] == [0] * 4
    engine.abort()
    engine.paused = False
    check(world.run(), wanted)


def test_an_engine_that_loses_its_weights_in_its_sleep_gets_them_again_when_the_tail_grows_back():
    it = World(2, model=Model(median=120, sigma=0.3, version="7"))
    for replica in it.gateway.replicas.values():
        replica.keeps_weights = False
    it.tell(i.BeginRollout(total=12))
    it.tell(i.Weights(("r0", "r1"), "7"))
    asked = {it.ask([1 + number, 2, 3], max_tokens=200, temperature=0): number for number in range(8)}
    for _ in range(20):
        it.step()
    it.tell(i.Shrink(("host1/gpu0",)))
    while it.gateway.replicas["r1"].status is not ReplicaStatus.PARKED:
        it.step()
    it.tell(i.Grow(("host1/gpu0", "host1/gpu1")))
    it.deliver()
    asked |= {it.ask([1 + number, 2, 3], max_tokens=200, temperature=0): number for number in range(8, 12)}
    it.run()
    assert {it.ended[name].segments[0].replica for name in list(asked)[8:]} == {"r1"}
    for name, number in asked.items():
        assert it.ended[name].ids == alone(it.model, [1 + number, 2, 3], max_tokens=200, temperature=0).out


def test_an_abort_that_the_framework_asked_for_hands_the_partial_through():
    world = World(1, model=MODEL)
    name = world.ask(prompts(1)[0], max_tokens=300, temperature=0, ignore_eos=True)
    run_until_tokens(world, 20)
    world.engines["r0"].abort()
    world.run()
    assert world.ended[name].finish == "abort"
    assert len(world.ended[name].ids) >= 20


def test_late_words_of_an_earlier_segment_are_dropped():
    world = World(2, model=MODEL)
    name = world.ask(prompts(1)[0], max_tokens=100, temperature=0, ignore_eos=True)
    run_until_tokens(world, 10)
    world.tell(i.Move(name))
    before = list(world.gateway.requests[name].ids)
    world.tell(i.Tokens(name, 0, array("i", [1, 2, 3]), array("d", [0, 0, 0]), finish="stop"))
    world.tell(i.Fault(name, 0, "reset"))
    assert list(world.gateway.requests[name].ids) == before
    check(world.run(), {name: alone(MODEL, prompts(1)[0], max_tokens=100, temperature=0, ignore_eos=True).out})


def test_a_client_that_goes_away_frees_its_place():
    world = World(1, model=MODEL)
    name = world.ask(prompts(1)[0], call="c", max_tokens=300, temperature=0, ignore_eos=True)
    run_until_tokens(world, 10)
    world.tell(i.Gone("c"))
    world.deliver()
    assert world.ended[name].error[0] == 499
    assert not world.engines["r0"].running


def test_a_lost_slot_ends_everything_with_its_reason_until_the_next_rollout():
    world = World(2, model=MODEL)
    names = ask_all(world, 4)
    run_until_tokens(world, 10)
    world.tell(i.Stop("the slot was lost"))
    assert {world.ended[name].error for name in names} == {(503, "the rollout was stopped: the slot was lost")}
    late = world.ask([1, 2, 3], temperature=0)
    assert world.ended[late].error[0] == 503
    world.tell(i.BeginRollout())
    wanted = ask_all(world, 4)
    check(world.run(), wanted)


def test_requests_wait_for_a_replica_and_fail_when_none_comes():
    world = World(0, model=MODEL, config=Config(no_replica_ms=3_000))
    name = world.ask([1, 2, 3], temperature=0)
    world.run()
    assert world.ended[name].error[0] == 503


def test_requests_fail_where_no_replica_gets_the_weights_of_the_step():
    it = World(2, config=Config(no_replica_ms=2_000))
    it.tell(i.Parked("r0", ok=True))
    it.tell(i.Weights(("r1",), "7", "/update_weights"))
    it.tell(i.Woken("r0", ok=True))
    it.tell(i.Remove("r1"))
    name = it.ask([1, 2, 3])
    it.run()
    assert it.ended[name].error == (503, "no replica has been open to it for 2 s")


def test_a_request_that_waits_for_a_seat_or_for_the_framework_is_not_failed():
    world = World(1, model=MODEL, config=Config(no_replica_ms=1_000))
    world.gateway.replicas["r0"].max_num_seqs = 1
    wanted = ask_all(world, 12)
    world.tell(i.Paused(("r0",), True))
    for _ in range(300):
        world.step()
    world.tell(i.Paused(("r0",), False))
    check(world.run(), wanted)
    assert world.now > 5_000


def test_a_dead_replica_is_asked_again_and_is_revived_once_it_answers():
    world = World(2, model=MODEL)
    engine = world.engines["r0"]
    ask_all(world, 4)
    run_until_tokens(world, 10)
    world.kill("r0")
    world.run()
    dead = world.gateway.replicas["r0"]
    assert dead.status is ReplicaStatus.DEAD
    world.engines["r0"] = engine
    seen, handle = [], world.gateway.handle
    world.gateway.handle = lambda it, now: seen.extend(told := handle(it, now)) or told
    for _ in range(1_500):
        world.step()
    assert e.Revive("r0") in seen


def test_only_replicas_on_the_slots_gpus_are_used_and_the_rest_when_the_slot_grows():
    world = World(3, model=MODEL)
    world.tell(i.BeginRollout(gpus=("host1/gpu0",)))
    wanted = ask_all(world, 6)
    run_until_tokens(world, 50)
    assert {r.id for r in world.gateway.replicas.values() if r.live} == {"r0"}
    world.tell(i.Grow(("host1/gpu0", "host1/gpu1", "host1/gpu2")))
    world.deliver()
    wanted |= ask_all(world, 6)
    world.step()
    assert {r.id for r in world.gateway.replicas.values() if r.live} == {"r0", "r1", "r2"}
    check(world.run(), wanted)


def test_samples_of_a_prompt_are_spread():
    world = World(4, model=MODEL)
    for _ in range(4):
        world.ask([1, 2, 3], group="g", temperature=1)
    world.ask([9, 9], temperature=1)
    places = [request.replica for request in world.gateway.requests.values() if request.group == "g"]
    assert len(set(places)) == 4


def test_weights_that_change_under_a_request_refuse_its_move():
    world = World(2, model=MODEL)
    world.tell(i.BeginRollout(total=4))
    wanted = ask_all(world, 4)
    run_until_tokens(world, 20)
    world.tell(i.Weights(("r1",), "1"))
    world.tell(i.Shrink(("host1/gpu1",)))
    if world.gateway.last_verdict.accepted:
        assert world.gateway.last_verdict.moves == 0
    check(world.run(), wanted)


def test_with_mixed_weights_a_response_continues_and_each_stretch_of_it_names_its_own():
    world = World(2, model=MODEL, config=Config(mix_versions=True))
    name = world.ask(prompts(1)[0], max_tokens=300, temperature=0, ignore_eos=True)
    run_until_tokens(world, 20)
    here = world.gateway.requests[name].replica
    there = "r1" if here == "r0" else "r0"
    world.tell(i.Weights((there,), "1"))
    world.tell(i.Move(name))
    world.run()
    assert [(one.replica, one.weights) for one in world.ended[name].segments] == [(here, "0"), (there, "1")]


def test_a_request_that_every_replica_in_turn_fails_is_failed_with_the_last_reason():
    world = World(3, model=MODEL, config=Config(attempts=3))
    name = world.ask(prompts(1)[0], max_tokens=900, temperature=0, ignore_eos=True)
    request = world.gateway.requests[name]
    run_until_tokens(world, 5)
    for k in range(3):
        while (request.k, request.status) != (k, RequestStatus.RUNNING):
            world.step()
        world.tell(i.Fault(name, k, "server_error", "status 500"))
    status, why = world.ended[name].error
    assert (status, why) == (502, "3 replicas in turn failed it, the last with server_error: status 500")


#: where something fails, a long search for the shortest history is not worth its minutes
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def may_be_killed(world, name):
    """Whether no request there has met two deaths, or one and is alone: the next would rightly be put down to it."""
    few = len(world.gateway.replicas[name].live) < 2
    suspects = [request for request in world.gateway.requests.values() if request.deaths >= (1 if few else 2)]
    return not any(name in (it.blames, it.replica) for it in suspects)


@pytest.mark.parametrize("slow", [True, False])
def test_responses_leave_a_slow_engine_and_equal_engines_are_left_alone(slow):
    world = World(3, model=Model(median=300, sigma=0.5))
    world.gateway.balancer = Balancer(Rules(min_gain_s=0.2))
    engine = world.engines["r0"]
    step, turns = engine.step, count()
    engine.step = lambda: step() if not slow or next(turns) % 2 else False
    wanted = {}
    for prompt in prompts(90):
        name = world.ask(prompt, max_tokens=900, temperature=0)
        wanted[name] = alone(world.model, prompt, max_tokens=900, temperature=0).out
    check(world.run(), wanted)
    moved = world.gateway.count.moves.get("rebalance", 0)
    assert (moved > 0) is slow
    assert all(request.moves <= 2 for request in world.ended.values())


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(st.data())
def test_whatever_happens_each_response_is_whole_and_ends_once(data):
    world = World(4, model=MODEL, config=Config(stall_ms=3_000, attempts=50))
    world.tell(i.BeginRollout(total=24))
    wanted = ask_all(world, 24, **data.draw(st.sampled_from([{}, {"stop": ["ab"]}, {"min_tokens": 40}])))
    spare, frozen = iter(range(4, 100)), []
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(1, 40))):
            world.step()
        good = [name for name in world.engines if name not in frozen]
        alive = [name for name in good if may_be_killed(world, name)]
        match data.draw(st.sampled_from(["kill", "move", "shrink", "grow", "fault", "late", "freeze"])):
            case "kill" if alive and len(good) > 1:
                world.kill(data.draw(st.sampled_from(alive)))
            case "move":
                running = [n for n, r in world.gateway.requests.items() if r.status is RequestStatus.RUNNING]
                if running:
                    world.tell(i.Move(data.draw(st.sampled_from(running))))
            case "shrink":
                world.tell(i.Shrink((f"host1/gpu{data.draw(st.integers(0, 3))}",)))
            case "grow":
                world.tell(i.Grow(tuple(f"host1/gpu{n}" for n in range(next(spare)))))
            case "fault":
                for name, request in list(world.gateway.requests.items())[:3]:
                    kind = data.draw(st.sampled_from(["eof", "in_band", "server_error"]))
                    world.tell(i.Fault(name, request.k, kind))
            case "late":
                for name, request in list(world.gateway.requests.items())[:3]:
                    world.tell(i.Tokens(name, request.k - 1, array("i", [5]), array("d", [0.0])))
            case "freeze" if alive and len(good) > 1:
                frozen.append(data.draw(st.sampled_from(alive)))
                world.engines[frozen[-1]].step = lambda: False
            case _:
                pass
    world.tell(i.Grow(tuple(f"host1/gpu{n}" for n in range(100))))
    check(world.run(), wanted)


def test_no_change_of_status_is_outside_of_the_tables():
    world = World(1, model=MODEL)
    name = world.ask([1, 2, 3], temperature=0)
    world.run()
    with pytest.raises(lifecycle.BrokenInvariant, match="done to running"):
        lifecycle.advance(world.ended[name], RequestStatus.RUNNING)
    for table in lifecycle.TABLES.values():
        statuses = type(next(iter(table)))
        assert set(table) == set(statuses)
        reached = {to for ways in table.values() for to in ways}
        assert set(statuses) - reached <= {next(iter(table))}
