"""Fidelity ``network``: training and new weights share the links between hosts."""

import json

import pytest
from msgspec.structs import replace
from simkit import checked

from rollmuxd.core import facts as f
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.fabric.topology import CARD
from rollmuxd.sim import compare, tables
from rollmuxd.sim.executions.engines import course
from rollmuxd.sim.executions.network import Networks, placed
from rollmuxd.sim.inside import Inside, hard_math
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Impossible, Options, Pool, SimJob, Workload

INSIDE = Inside("qwen2.5-32b", "h20", 2, (hard_math(2048, 64, "net"),))
ROLLOUT = course(INSIDE, 0, ((0, tuple(range(8))),)).ends


def job(name, trains=12, inside=INSIDE, iterations=2):
    phases = (
        PhaseSpec("rollout", ("rollout",), planned_ms=ROLLOUT),
        PhaseSpec("train", ("train",), planned_ms=40_000),
        PhaseSpec("sync", ("rollout", "train"), planned_ms=1_000),
    )
    nodes = {"rollout": 1, "train": trains}
    spec = JobSpec(name, phases, tuple(Want(pool, nodes=count) for pool, count in nodes.items()))
    return SimJob(name, "made", 0, 1, spec, ((ROLLOUT, 40_000, 1_000),), nodes, iterations=iterations, inside=inside)


def workload(*jobs, per_host=1, gpus=8):
    trains = sum(job.footprint["train"] for job in jobs)
    pools = (
        Pool("rollout", "H20", 1.85, nodes=len(jobs), per_host=per_host, gpus_per_node=gpus),
        Pool("train", "H800", 5.28, nodes=trains),
    )
    return Workload("made", jobs, pools)


def run(topology, *jobs, t_ocs=20.0):
    """What the phases of the first job took, in ms, and how often circuits were changed."""
    found, networks = [], Networks(topology, t_ocs)
    outcome = checked.run(
        workload(*jobs), policy_under_test("solo"), seed=0, accounting="work", hear=found.append, executions=networks
    )
    first = [fact.slot for fact in found if isinstance(fact, f.SlotQueued) and fact.job == found_job(found)]
    granted = {fact.slot: fact.at for fact in found if isinstance(fact, f.SlotGranted)}
    ended = {fact.slot: fact.at for fact in found if isinstance(fact, f.SlotReleased)}
    return [ended[slot] - granted[slot] for slot in first if slot in ended], outcome, networks.network


def found_job(found):
    return next(fact.job for fact in found if isinstance(fact, f.JobPlaced))


def test_alone_on_a_full_fat_tree_training_takes_its_duration():
    took, outcome, _ = run("fat-tree", job("a"))
    rollout, train, sync = took[:3]
    assert rollout == ROLLOUT
    assert train == pytest.approx(40_000, abs=2)
    # 65.5 GB into one host of eight cards of 50 GB/s
    assert sync == pytest.approx(65.52 / 400 * 1000, abs=1)
    assert outcome.jobs[0].slowdown == pytest.approx(1.0, abs=1e-4)


def test_a_quarter_of_the_uplinks_makes_training_longer_and_that_is_no_slowdown():
    # ranks of 72B are four hosts: all of a rack send to the next
    large = Inside("qwen2.5-72b", "h20", 8, INSIDE.batches)
    full, _, _ = run("fat-tree", job("a", inside=large))
    took, outcome, _ = run("osub4", job("a", inside=large))
    assert full[1] == pytest.approx(40_000, abs=2)
    assert took[1] > 41_500
    assert outcome.jobs[0].slowdown == pytest.approx(1.0, abs=1e-4)


def test_two_jobs_with_hosts_in_one_rack_slow_each_other_on_its_uplinks():
    # 6 hosts each: the second rack has two of either, and its uplinks carry both rings
    alone, _, _ = run("osub4", job("a", trains=6))
    both, outcome, _ = run("osub4", job("a", trains=6), job("b", trains=6))
    assert both[1] > alone[1] + 20
    assert both[0] == alone[0]
    assert all(it.slowdown > 1.0003 for it in outcome.jobs)


def test_circuits_follow_the_phases_and_what_they_wait_for_light_is_in_the_sync():
    fast, _, network = run("rfabric", job("a"), t_ocs=0.0)
    slow, _, _ = run("rfabric", job("a"), t_ocs=100.0)
    assert network.changed == 4  # a ring and new weights, twice
    assert slow[1] == pytest.approx(fast[1], abs=2)  # before the first gradients there is time enough
    # 3 % of the rate meanwhile, by the electrical plane
    assert slow[2] - fast[2] == pytest.approx(100, rel=0.25)


def test_within_one_rank_and_where_the_model_is_not_known_durations_count():
    took, _, _ = run("osub4", job("a", trains=1))
    assert took[1] == 40_000
    took, _, _ = run("osub4", job("a", inside=None))
    assert took[:3] == [ROLLOUT, 40_000, 1_000]


def test_the_clusters_fill_pods_of_their_own():
    of = workload(job("a", trains=40), job("b", trains=2))
    hosts, gpus = placed(Inventory(of, of.jobs), of.jobs)
    assert gpus == 512
    assert sorted({hosts[gpu] for gpu in hosts if gpu.startswith("train")}) == list(range(42))
    assert sorted({hosts[gpu] for gpu in hosts if gpu.startswith("rollout")}) == [64, 65]


def test_hosts_of_other_sizes_are_refused_by_name():
    of = workload(job("a"), gpus=4)
    with pytest.raises(Impossible, match="hosts of 8 GPUs, and host rollout1 has 4"):
        placed(Inventory(of, of.jobs), of.jobs)


def task(**options):
    some = compare.tasks("micro-spatial", Options(slo=None, sync="two", **options), ["solo"], "network", [0])
    return next(it for it in some if it.accounting == "work")


def test_a_run_is_the_same_each_time_and_its_trace_has_a_track_per_pair_of_racks(tmp_path):
    asked = task(topology="rfabric", more={"hours": "0.3"})
    path = tmp_path / "trace.json"
    first, second = (compare.recorded(asked, compare.draw(asked), trace=path) for _ in range(2))
    assert first.facts_digest == second.facts_digest
    assert first.fidelity == "network"
    events = json.loads(path.read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any(name.startswith("rack 0 to rack ") for name in names)
    lit = [event for event in events if event.get("cat") == "circuit"]
    assert len(lit) >= first.network["circuits_changed"] > 0


GENERATES = replace(INSIDE, model="qwen3-30b-a3b", tp=8, parallelism="ep64")


def generates(topology, parallelism, nodes=8, jobs=1):
    """A job whose model instances lie over several hosts: what its first rollout took, and the outcome."""
    inside = replace(GENERATES, parallelism=parallelism)
    of = [job(name, trains=1, inside=inside, iterations=1) for name in "ab"[:jobs]]
    wide = [
        replace(
            it,
            spec=replace(it.spec, wants=(Want("rollout", nodes=nodes), Want("train", nodes=1))),
            footprint={"rollout": nodes, "train": 1},
        )
        for it in of
    ]
    made = workload(*wide)
    pools = (replace(made.pools[0], nodes=nodes * jobs), made.pools[1])
    found, ran = [], Networks(topology, 20.0)
    outcome = checked.run(
        replace(made, pools=pools), policy_under_test("solo"), seed=0, accounting="work", hear=found.append,
        executions=ran,
    )  # fmt: skip
    granted = {fact.slot: fact.at for fact in found if isinstance(fact, f.SlotGranted)}
    ended = {fact.slot: fact.at for fact in found if isinstance(fact, f.SlotReleased)}
    first = next(fact.slot for fact in found if isinstance(fact, f.SlotQueued))
    return ended[first] - granted[first], outcome, ran.network


@pytest.mark.parametrize(
    ("parallelism", "per_token"),
    [
        # bytes of a token and layer that leave each of eight hosts: there and back, to 7 of 8 of its 8 experts' hosts
        ("ep64", 2 * (2 * 2048 * 8) * 7 / 8 / 8),
        # of four hosts each has a quarter of the tokens; both ways at once
        ("afd", 2 * 2048 / 4),
        # of each pair: twice the activations of its quarter
        ("tp16", 2 * 2 * 2048 / 4),
    ],
)
def test_a_rollout_waits_for_what_its_layers_send_between_hosts(parallelism, per_token):
    took, outcome, _ = generates("fat-tree", parallelism)
    alone, _, _ = generates("fat-tree", "tp8")
    tokens = sum(INSIDE.batches[0])
    # the first token of a response comes with its prefill, and is sent as the others are
    waits = 48 * tokens * per_token / (8 * CARD)
    assert took - alone == pytest.approx(1000 * waits, rel=1e-3, abs=2)
    assert took > alone
    assert outcome.jobs[0].slowdown == pytest.approx(1.0, abs=1e-4)


def test_two_rollouts_slow_each_other_where_their_hosts_share_uplinks():
    # twelve hosts in three racks: the second rack has two hosts of each, whose halves lie in other racks
    one, _, _ = generates("osub4", "afd", nodes=6)
    both, outcome, network = generates("osub4", "afd", nodes=6, jobs=2)
    assert both > one
    assert (network.phases, network.between_racks) == (4, 4)  # with the two syncs
    assert min(it.slowdown for it in outcome.jobs) > 1


def test_the_tables_say_how_many_phases_sent_between_racks():
    options = Options(slo=None, sync="rails", more={"iterations": "1"})
    some = compare.tasks("across-racks", options, ["solo"], "network", [0])
    outcomes = [compare.perform(it) for it in some]
    # four syncs, two trainings of dense models, two rollouts of mixtures: all of them wider than a rack
    assert [it.network for it in outcomes if it.accounting == "work"] == [
        {"phases": 8, "between_racks": 8, "circuits_changed": 0, "circuits_kept": 0}
    ]
    (row,) = tables.summary(outcomes)
    heads, (shown,) = tables.sent([("solo", row["work"])])
    assert shown[:3] == ["solo", "8", "8"]
    assert heads[2] == "#BETWEEN RACKS"
    phases = [compare.perform(replace(it, fidelity="phase")) for it in some]
    assert tables.sent([("solo", tables.summary(phases)[0]["work"])])[1] == []
