"""Options are read with their types, and a mistake is told with table, key and what it has to be."""

import pytest

from rollmuxd.spi import OrderKind, StateOrder, StateSpec
from rollmuxd.spi.options import Options, check_fields, filled, of_state


def options(**given):
    return Options("driver lab", given, ("level", "url", "stop", "limit_s", "deep", "sets"))


def test_what_is_given_is_read_and_the_rest_is_as_it_was_agreed():
    there = options(level=2, url="http://x", stop=["a", "b"], limit_s=3, deep=True, sets={"a": {}})
    assert there.one_of("level", 1, (1, 2)) == 2
    assert there.texts("url") == ("http://x",)
    assert there.argv("stop") == ("a", "b")
    assert there.seconds("limit_s", 9) == 3.0
    assert there.flag("deep", False)
    assert there.table("sets") == {"a": {}}
    assert "url" in there
    empty = options()
    assert (empty.one_of("level", 1, (1, 2)), empty.texts("url"), empty.argv("stop")) == (1, (), ())
    assert (empty.seconds("limit_s", 9), empty.text("url", "u"), empty.flag("deep", True)) == (9.0, "u", True)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: options(levle=1), "levle is not an option of driver lab; did you mean level?"),
        (lambda: options(quux=1), "known are level, url"),
        (lambda: options(level=3).one_of("level", 1, (1, 2)), "level of driver lab is 3; it must be one of 1, 2"),
        (lambda: options(level=True).one_of("level", 1, (1, 2)), "one of 1, 2"),
        (lambda: options(url=3).text("url", ""), "it must be a string"),
        (lambda: options(url=[3]).texts("url"), "a list of strings"),
        (lambda: options(deep=1).flag("deep", False), "true or false"),
        (lambda: options(sets=[1]).table("sets"), "a table"),
        *((lambda v=v: options(limit_s=v).seconds("limit_s", 1), "seconds, 0 or more")
          for v in (-1, "1", True, float("nan"), float("inf"))),
        (lambda: options(stop="rm -rf x").argv("stop"), "no shell reads it"),
        (lambda: options(stop=[]).argv("stop"), "no shell reads it"),
        (lambda: options(stop=["{home}"]).argv("stop"), r"\{home\} is none of job, name"),
        (lambda: options(stop=["{"]).argv("stop"), "a brace itself is written twice"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(read, said):
    with pytest.raises(ValueError, match=said):
        read()


def test_braces_are_filled_in_for_an_order():
    order = StateOrder(
        order="o7", kind=OrderKind.PARK, job="j1", run=2, owner="t", name="math", pool="rollout", node="h/gpu4-5",
        host="h", gpus=("h/gpu4", "h/gpu5"), state=StateSpec(pool="rollout"), ranks=1, warm=True, pid=42, started="",
        backend=None,
    )  # fmt: skip
    text = "{job} {name} {owner} {run} {pool} {node} {host} {gpu} {gpus} {pid} {kind} {order} {warm} {{}}"
    assert filled(text, order) == "j1 math t 2 rollout h/gpu4-5 h 4 4,5 42 park o7 1 {}"


@pytest.mark.parametrize("bad", ["{0}", "{}", "{job.x}", "{job!r}", "{job:>3}", "}"])
def test_no_other_braces_are_filled(bad):
    with pytest.raises(ValueError, match="a brace itself"):
        check_fields("it", bad)


def test_a_states_options_are_read_in_its_drivers_name():
    with pytest.raises(ValueError, match="x is not an option of driver lab"):
        of_state(StateSpec(pool="rollout", driver="lab", options=(("x", 1),)), ("level",))
