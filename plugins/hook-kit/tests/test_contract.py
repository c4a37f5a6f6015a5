"""What hooks have in common: a framework's source is read and held against what a hook knows."""

import pytest

from rollmuxd_hook_kit.contract import (
    Class,
    Contract,
    Method,
    UnknownFramework,
    check,
    check_class,
    differences,
    facts_of,
    facts_under,
    release,
)

TRAINER = Class(
    path="some/trainer.py",
    name="Trainer",
    methods={
        "fit": Method(("self",), calls=("_step", "engine.sleep")),
        "_step": Method(("self", "batch", "...")),
    },
    mentions=("self.engine",),
)
LOOSE = Class(path="some/loop.py", name="", methods={"run": Method(("config",), calls=("step",))}, since=(1, 2))
CONTRACT = Contract("Some", "some", "rollmuxd_hook_some", ((1, 0), (1, 3)), (TRAINER, LOOSE), "unset SOME")

SOURCE = """
class Trainer:
    async def fit(self):
        for batch in self.data:
            self._step(batch)
        await self.engine.sleep()
    def _step(self, batch, *, more=None): ...
    def other(self): ...
"""
LOOP = """
def run(config):
    step(config)
"""


def facts(trainer=SOURCE, loop=LOOP):
    return {TRAINER.key: facts_of(trainer, TRAINER), LOOSE.key: facts_of(loop, LOOSE)}


def test_a_source_that_is_as_it_was_has_no_differences():
    assert differences(CONTRACT, "1.2.0", facts()) == []


def test_facts_hold_what_is_asked_for_and_nothing_else():
    assert facts_of(SOURCE, TRAINER) == {
        "methods": {
            "fit": {"parameters": ["self"], "calls": ["_step", "engine.sleep"]},
            "_step": {"parameters": ["self", "batch", "more"], "calls": []},
        },
        "mentions": ["self.engine"],
    }


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            SOURCE.replace("def _step(self, batch,", "def _step(self, data,"),
            "Trainer._step is known as (self, batch, ...)",
        ),
        (SOURCE.replace("def fit(self)", "def fit(self, loop)"), "Trainer.fit is known as (self), not (self, loop)"),
        (SOURCE.replace("def _step", "def _move"), "Trainer has no method _step"),
        (SOURCE.replace("self._step(batch)", "pass"), "Trainer.fit does not call _step"),
        (SOURCE.replace("engine.sleep", "engine.wake"), "Trainer.fit does not call engine.sleep"),
        (SOURCE.replace("self.engine", "engine"), "Trainer does not speak of self.engine"),
        (SOURCE.replace("class Trainer", "class Other"), "Trainer has no method fit"),
    ],
)
def test_what_is_different_is_named(trainer, said):
    found = differences(CONTRACT, "1.1", facts(trainer))
    assert any(difference.startswith(said) for difference in found), found


def test_a_function_of_a_module_is_looked_at_like_a_method():
    assert differences(CONTRACT, "1.2", facts(loop="def run(config): pass")) == ["some/loop.py.run does not call step"]
    assert differences(CONTRACT, "1.2", facts(loop="")) == ["some/loop.py has no function run"]


def test_what_came_with_a_release_is_not_missed_before_it():
    old = {TRAINER.key: facts_of(SOURCE, TRAINER)}
    assert differences(CONTRACT, "1.1.9", old) == []
    assert differences(CONTRACT, "1.2", old) == ["there is no some/loop.py"]


@pytest.mark.parametrize("version", ["0.9", "1.3", "1.3.1", "2.0", "", "unknown"])
def test_a_release_that_nobody_has_looked_at_is_refused_though_nothing_differs(version):
    assert differences(CONTRACT, version, facts())[0] == (
        f"the hook knows Some 1.0 to 1.2, and this is {version or 'unknown'}"
    )


def test_versions_are_compared_by_their_numbers():
    assert [release(version) for version in ("1.16.0.dev0", "0.3.0.post1", "10", "v1")] == [
        (1, 16, 0),
        (0, 3, 0),
        (10,),
        (),
    ]


def test_the_refusal_says_what_is_different_and_what_to_do():
    with pytest.raises(UnknownFramework) as refused:
        check(CONTRACT, "1.9", facts(SOURCE.replace("def fit", "def train")))
    assert str(refused.value) == (
        "rollmuxd_hook_some cannot tell when this Some rolls out and trains: the hook knows Some 1.0 to 1.2, and this "
        "is 1.9; Trainer has no method fit. Install a known one, or take the hook out again: unset SOME"
    )


def test_a_folder_with_the_source_is_read_and_not_run(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "trainer.py").write_text(SOURCE + "raise SystemExit")
    assert facts_under(tmp_path, CONTRACT) == {TRAINER.key: facts_of(SOURCE, TRAINER)}


class Frameworks:
    def fit(self):
        return 1


class Hook:
    def fit(self):
        return super().fit()


def shared(own):
    return type("Shared", (Hook, own), {})


CHAINED = CONTRACT._replace(chained=("fit",))


def test_a_class_that_takes_the_place_of_what_the_hook_needs_is_refused():
    class Own(Frameworks):
        def fit(self):
            return 2

    with pytest.raises(UnknownFramework, match=r"Own\.fit takes the place of Some's.*call super\(\)\.fit.*unset SOME"):
        check_class(CHAINED, shared(Own), Hook, Frameworks)


def test_a_class_that_adds_to_it_is_taken():
    class Own(Frameworks):
        def fit(self):
            return 1 + super().fit()

        def unrelated(self):
            return None

    check_class(CHAINED, shared(Own), Hook, Frameworks)
