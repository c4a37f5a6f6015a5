"""Four real ranks over gloo wait for longer than any of their collectives may take: nobody waits inside of one.

Here a little longer, to keep the tests short; what is promised (15 s for a collective, waits of 60 s) by

    ROLLMUX_RANKS_WAIT_S=60 make test ARGS=tests/e2e/test_live_ranks.py
"""

import importlib.util
import os
import time

import pytest
from patience import PATIENCE_S

GROUP_TIMEOUT_S = 15.0
WAIT_S = float(os.environ.get("ROLLMUX_RANKS_WAIT_S", GROUP_TIMEOUT_S + 1.5))
RANKS = 4

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800 + 3 * WAIT_S)]
if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)


def test_four_ranks_outlive_a_wait_a_pause_and_restarts_that_take_longer_than_their_collectives_may(live, tmp_path):
    daemon = live.daemon((("0", "train"),))
    stop = tmp_path / "stop"
    ranks = live.script("ranks.py", "ranks", str(RANKS), str(GROUP_TIMEOUT_S), str(stop))

    def turns():
        assert ranks.happened("failed") == []
        assert ranks.process.poll() is None
        return len(ranks.happened("granted"))

    def waits_out(began):
        live.until("no collective would wait still", lambda: time.monotonic() > began + WAIT_S)

    def paused():
        return daemon.job("ranks")["status"] == "paused"

    live.until("it has begun", lambda: turns() >= 4)

    # A wait for its turn, with the state of all ranks parked, and a restart of the daemon meanwhile.
    rival = live.trainer("rival", rollout=None)
    rival.do("enter", phase="train")
    live.until("it waits", lambda: daemon.waits("ranks"))
    began = time.monotonic()
    assert {fact["job"] for fact in daemon.facts("order_issued", kind="park")} == {daemon.job("ranks")["job"]}
    assert daemon.stop() == 0
    daemon.restart()
    waits_out(began)
    before = turns()
    rival.do("leave")
    rival.do("end")
    live.until("all ranks go on", lambda: turns() >= before + 4)

    # A pause, and a daemon that was killed in it.
    daemon.post("/v1/jobs/ranks/pause")
    live.until("it is paused, and asks for its next phase", lambda: paused() and daemon.waits("ranks"))
    began = time.monotonic()
    daemon.kill9()
    daemon.restart()
    waits_out(began)
    before = turns()
    assert paused()
    daemon.post("/v1/jobs/ranks/resume")
    live.until("all ranks go on", lambda: turns() >= before + 4)

    stop.touch()
    assert ranks.process.wait(PATIENCE_S) == 0
    ends = live.until("all have told", lambda: len(told := ranks.happened("trained")) == RANKS and told)
    assert len({end["shared"] for end in ends} | {end["alone"] for end in ends}) == 1, ends
    assert {end["rank"] for end in ends} == set(range(RANKS))
