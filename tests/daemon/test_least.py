"""The smallest inventory is found by trying some, and is the one that trying all would find."""

from itertools import product
from random import Random

import msgspec
import pytest

from rollmuxd.core.config import Config
from rollmuxd.core.inputs import NodeSpec
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon import plan
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.least import kinds, least
from rollmuxd.daemon.question import Copy
from rollmuxd.wire.plan import PlanPool


def nodes(pool, count, price=0.0, gpus=8):
    return [
        NodeSpec(f"{pool}{number}", f"{pool}-h{number}", tuple(f"{pool}{number}/{gpu}" for gpu in range(gpus)), (pool,))
        if not price
        else NodeSpec(
            f"{pool}{number}",
            f"{pool}-h{number}",
            tuple(f"{pool}{number}/{gpu}" for gpu in range(gpus)),
            (pool,),
            price_per_gpu_hour=price,
        )
        for number in range(count)
    ]


def needs(**counts):
    """Whether there are so many nodes of each pool."""
    return lambda some: all(sum(node.pools == (pool,) for node in some) >= count for pool, count in counts.items())


def counted(found):
    return {"+".join(kind.pools): count for kind, count in found.nodes.items()}


def always():
    return True


def test_each_kind_has_as_few_nodes_as_do():
    there = nodes("rollout", 9, 1.85) + nodes("train", 7, 5.28) + nodes("spare", 3, 1.0)

    found = least(there, needs(rollout=4, train=2), always)

    assert counted(found) == {"rollout": 4, "train": 2, "spare": 0}
    assert found.complete


def test_where_prices_are_known_the_cheapest_is_found_and_else_that_of_the_fewest_gpus():
    def does(some):
        return needs(small=1)(some) and (needs(small=4)(some) or needs(large=1)(some))

    priced = nodes("small", 4, 1.0, gpus=2) + nodes("large", 1, 1.5, gpus=8)
    assert counted(least(priced, does, always)) == {"small": 4, "large": 0}
    unpriced = nodes("small", 4, gpus=8) + nodes("large", 1, gpus=2)
    assert counted(least(unpriced, does, always)) == {"small": 1, "large": 1}


def test_there_is_none_where_all_nodes_do_not_suffice():
    assert least(nodes("rollout", 3), needs(rollout=4), always) is None
    assert least([], needs(rollout=1), always) is None


def test_a_search_that_may_not_continue_answers_with_the_best_that_it_tried():
    left = iter([True, True])
    found = least(nodes("rollout", 64), needs(rollout=5), lambda: next(left, False))
    assert (counted(found), found.complete) == ({"rollout": 16}, False)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_trying_all_inventories_finds(seed):
    draw = Random(seed)
    there = nodes("rollout", 8, draw.choice([1.0, 1.85])) + nodes("train", 6, 5.28)
    # more of one makes up for fewer of the other, ever less: what a policy does that packs jobs
    work = draw.uniform(2.0, 10.0)

    def does(some):
        rollout, train = (sum(node.pools == (pool,) for node in some) for pool in ("rollout", "train"))
        return rollout > 0 and train > 0 and 1 / (1 / rollout + 1 / train) >= work / 4

    def price(rollout, train):
        prices = {kind.pools[0]: kind.price for kind in kinds(there)}
        return rollout * prices["rollout"] + train * prices["train"]

    all_of_them = [
        price(rollout, train)
        for rollout, train in product(range(9), range(7))
        if does(there[:rollout] + there[8 : 8 + train])
    ]
    found = least(there, does, always)
    if not all_of_them:
        assert found is None
        return
    assert price(**counted(found)) == pytest.approx(min(all_of_them))


@pytest.mark.parametrize(("long", "advice"), [(False, "Plan fewer jobs at a time, or search longer"), (True, "Plan")])
def test_there_is_no_search_where_placing_the_jobs_once_takes_too_long_for_several_tries(monkeypatch, long, advice):
    monkeypatch.setattr(plan, "SEARCH_LONG_S" if long else "SEARCH_S", 0.0)
    job = JobSpec(
        "a",
        (PhaseSpec("rollout", ("rollout",), planned_ms=9), PhaseSpec("train", ("train",), planned_ms=9)),
        (Want("rollout"), Want("train")),
    )
    copy = Copy(msgspec.json.encode(State()), Config(), "rollmux", {})
    pools = {pool: PlanPool(nodes=2) for pool in ("rollout", "train")}

    view = plan.PlanQuestion(copy, Caller("o", "u", Role.ADMIN, "o/u"), [job], {}, "empty", pools, long, 0).answer()

    assert view.jobs[0].status == "admitted"
    assert "they were not searched: placing these jobs once takes" in view.least.reason
    assert advice in view.least.reason
