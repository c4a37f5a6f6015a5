"""Fillers and the jobs that they give way to: real processes, the record of the mock as witness."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def filler(live, name="f", yield_s=60.0, **more):
    return live.holder(name, phase="filler", filler={"yield_s": yield_s}, train=None, **more)


def test_a_filler_that_gives_way_is_followed_by_the_job_and_works_again_when_that_has_ended(live):
    daemon = live.daemon()
    f = filler(live)

    a, asked = live.waiter("a")
    (yielded,) = live.until("the filler is asked to yield", lambda: daemon.facts("yield_asked"))
    assert yielded["reason"]["code"] == "wanted"
    f.do("leave")
    again = f.ask("enter", phase="filler")
    assert a.answer(asked)["gpus"] == ["mock/gpu0"]
    (ended,) = live.until("the loan has ended", lambda: daemon.facts("loan_ended"))
    assert (ended["gpus"], ended["how"]) == (1, "wanted")

    a.do("leave")
    a.do("end")
    assert f.answer(again)["gpus"] == ["mock/gpu0"]


def test_a_deaf_filler_loses_the_node_when_its_time_is_over_and_its_driver_parks_it(live):
    daemon = live.daemon()
    f = filler(live, yield_s=0.5)
    a = live.holder("a")  # is granted, though the filler does nothing
    (revoked,) = daemon.facts("slot_revoked")
    assert revoked["by"] == "yield"
    assert daemon.job("f")["status"] == "admitted"
    assert f.fails("leave")["error"] == "SlotLost"
    f.stays = list  # it was deaf: by its own clock the node was its own until now
    a.do("leave")


def test_a_loan_and_the_time_that_it_has_to_give_way_outlive_the_daemon(live):
    daemon = live.daemon()
    f = filler(live, yield_s=1.0)
    _, asked = live.waiter("a")
    live.until("the filler is asked to yield", lambda: daemon.facts("yield_asked"))
    daemon.kill9()
    daemon.start()
    assert live.trainers[-1].answer(asked)["gpus"] == ["mock/gpu0"]
    assert daemon.facts("slot_revoked")[-1]["by"] == "yield"
    assert f.fails("leave")["error"] == "SlotLost"
    f.stays = list  # as above
