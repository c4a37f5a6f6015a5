"""A loop under the generic hook and a real daemon, whose new weights really travel between its phases."""

import contextlib
import hashlib
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from patience import PATIENCE_S

from rollmuxd_hooks.loop import Loop, Shape
from rollmuxd_weights import Publisher, Puller
from rollmuxd_weights.bench import loopback
from rollmuxd_weights.between import Between

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Ranks:
    """The movers of a job's ranks, one after the other, as one; what is held while they wait and load is noted."""

    expected_s = 1.0

    def __init__(self, movers, held):
        self.movers, self.held, self.seen = movers, held, []

    def publish(self, fence):
        for mover in self.movers:
            mover.publish(fence)

    def wait(self):
        self.seen.append(("wait", self.held()))
        for mover in reversed(self.movers):  # (the first one waits for the pullers)
            mover.wait()

    def load(self):
        self.seen.append(("load", self.held()))
        for mover in self.movers:
            mover.load()


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_new_weights_reach_every_rollout_host_while_the_daemon_has_granted_no_gpu(live, tmp_path, monkeypatch):
    daemon, hosts, step, loaded = live.daemon(), loopback(2, 2), [0], []
    summed = set()
    where = lambda host: {"me": host, "dir": tmp_path / "weights" / host, "key": "a key"}
    weights = lambda: {"a": np.random.default_rng(step[0]).integers(0, 1 << 16, 200_000, dtype=np.uint16)}

    def held():
        slot = daemon.job("math")["slot"]
        told = daemon.slot(slot) if slot else None
        return told["phase"] if told and told["status"] not in ("released", "over") else None

    def crc32(chunk):
        summed.add(held())
        return zlib.crc32(chunk)

    monkeypatch.setattr("rollmuxd_weights.publish.zlib", SimpleNamespace(crc32=crc32))
    with contextlib.ExitStack() as stack:
        trainers = [stack.enter_context(Publisher("math", hosts, chunk=1 << 14, **where(h))) for h in hosts["trainers"]]
        pullers = [stack.enter_context(Puller("math", hosts, **where(h))) for h in hosts["rollouts"]]

        def load(identity):
            (sent,) = {digest(one.store.path(identity)) for one in trainers}
            loaded.append((identity, [digest(one.ready(identity, PATIENCE_S)) == sent for one in pullers]))

        given = {"rollouts": 2, "expected_s": 1.0}
        movers = [Between(trainers[0], weights, load, **given), Between(trainers[1], weights, None, **given)]
        mover = Ranks(movers, held)
        loop = Loop({"url": daemon.url, "weights": mover}, name="math", shape=Shape.TWO_POOLS)
        loop.begin()
        try:
            for _ in range(3):
                loop.send(lambda: pytest.fail("the weights are the mover's"))
                loop.rollout()
                loop.train()
                step[0] += 1
        finally:
            loop.end()
    assert [identity.version for identity, _ in loaded] == [1, 2, 3]
    assert len({identity.number for identity, _ in loaded}) == 3, "each is of a slot of its own"
    assert all(all(same) for _, same in loaded)
    assert summed == {None}, "chunks are summed when the slot is released"
    assert mover.seen == 3 * [("wait", None), ("load", "rollout")]
