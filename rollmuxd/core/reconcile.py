"""After every input: bring the state to rest.

Handlers refuse, or record what has happened. What that makes possible is marked (:mod:`~rollmuxd.core.marks`). The
steps look at what is marked, in one fixed order, and mark in their turn by what they record, until nothing is marked.

The order matters. ``reclaim`` comes first: a job that leaves discards its state, where a drain or a move would only
park it. It also grants slots whose last load has ended. ``move`` comes before ``admit``: what a moved job has left is
tidied before the job is placed there again. ``admit`` comes before ``dispatch``: a newcomer takes its place in the
schedule before turns are given. ``lend`` comes after ``dispatch``: fillers have what no job asks for.
"""

from typing import Final

from rollmuxd.core.context import Context
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.facts import name
from rollmuxd.core.steps import drain, move, replan
from rollmuxd.core.steps.admit import admit
from rollmuxd.core.steps.dispatch import dispatch
from rollmuxd.core.steps.lend import lend
from rollmuxd.core.steps.observe import observe
from rollmuxd.core.steps.reclaim import reclaim

#: rounds until the state is at rest, at most. Each but the last has recorded a fact, and facts lead forward
MAX_ROUNDS: Final = 100


def reconcile(c: Context) -> None:
    """Reclaim what is over, move, admit, give turns, replan. Then plan when to look again."""
    known = 0
    for _ in range(MAX_ROUNDS):
        # moves, what they left and promises at risk have no marks of their own
        if not c.dirty and (len(c.facts) == known or not (c.state.moving or c.state.leaving or c.state.at_risk)):
            break
        known = len(c.facts)
        reclaim(c)
        move.proceed(c)
        reclaim(c)  # a move that ends frees nodes
        admit(c)
        dispatch(c)
        lend(c)
        replan.relieve(c)
    else:
        raise BrokenInvariant(f"the state is not at rest after {MAX_ROUNDS} rounds: {name(c.facts[-1])}")
    look_later(c)


def look_later(c: Context) -> None:
    """Plan what is looked at next: better places for jobs, and hosts on which something is to come clean."""
    dirty = c.dirty
    if dirty.places:
        dirty.places = False
        c.regrouping = None
        move.look_for_moves(c, move.STEP_MS)
        if drain.to_leave(c):  # jobs sit on other nodes than before, which may let one go
            c.timers.at(c.now + drain.SETTLE_MS, "leave", "")
    if dirty.hosts or dirty.watched:
        observe(c)
