"""What goes wrong in a simulated world, how often and when: seeded, apart from every other chance.

Rates are per hour of simulated time and per thing that can fail; shares are of one. Faults end with the last job, so
that what is left can be cleared away. What follows from a fault is in :mod:`simkit.faulty_world`.

The presets are meant to find bugs, so they are about a thousand times harsher than a good cluster. For comparison:

- hosts: 419 unexpected interruptions in 54 days on 16,384 GPUs (the Llama 3 report, section 3.3.4), that is one in
  6,300 hours for a host of eight. The preset ``hosts`` has one in ten hours.
- jobs: RollMux' own failure run kills one job and resubmits it 2,300 s later (research: rollmux.md 1.14). The preset
  ``jobs`` kills a job every two hours, and resubmits it after ten minutes in the mean, never below one minute.
- moves: about one in twenty checkpoints or restores of ``cuda-checkpoint`` failed without a way back (research:
  peers.md, section on residency drivers). The presets fail one order in two hundred, since each costs a quarantine.
"""

from random import Random
from typing import Final

from msgspec import Struct

from rollmuxd.core.ids import Millis

HOUR_MS: Final = 3_600_000


class Faults(Struct, frozen=True):
    """How often what goes wrong. All zero: nothing does."""

    # ---- jobs' processes
    #: a process ends without a word; its memory goes with it
    deaths_per_hour: float = 0.0
    #: a process falls silent, and what it has on GPUs stays; half of them come back after a while
    hangs_per_hour: float = 0.0
    #: a phase never ends although its process beats on, until somebody revokes the slot
    stalls_per_hour: float = 0.0
    #: nobody attends a request for a while
    detaches_per_hour: float = 0.0
    #: from a process' end to the registration of its next run, in the mean; at least a tenth of it
    restart_ms: Millis = 600_000
    #: how long a hanging process is left alone, in the mean
    hang_ms: Millis = 600_000
    #: after what time an operator looks after a stalled slot or a quarantined job
    operator_ms: Millis = 600_000
    # ---- orders
    #: share of orders that fail, with nothing done
    orders_fail: float = 0.0
    #: share of orders of which no word comes within their limit; half of them are done all the same
    orders_lost: float = 0.0
    #: after what time no word is no word (the daemon's ``order_s``)
    order_limit_ms: Millis = 120_000
    #: share of parks and discards after which bytes stay for a while, and for how long in the mean
    lingers: float = 0.0
    linger_ms: Millis = 20_000
    #: no driver fetches what is parked on another host
    near: bool = False
    # ---- hosts
    #: a host is out of reach; ``reboots`` of these times it comes back with another boot id, and empty
    outages_per_hour: float = 0.0
    outage_ms: Millis = 300_000
    reboots: float = 0.5
    # ---- the daemon
    #: it dies, sometimes between making facts durable and answering
    daemon_deaths_per_hour: float = 0.0
    daemon_down_ms: Millis = 20_000
    #: from when on nothing more begins to go wrong; 0: until the last job has ended
    until_ms: Millis = 0

    @property
    def any(self) -> bool:
        """Whether anything can go wrong."""
        return any(
            (
                self.deaths_per_hour,
                self.hangs_per_hour,
                self.stalls_per_hour,
                self.detaches_per_hour,
                self.orders_fail,
                self.orders_lost,
                self.lingers,
                self.outages_per_hour,
                self.daemon_deaths_per_hour,
            )
        )

    @property
    def longest_ms(self) -> Millis:
        """What may be out of order for this long, by these faults: chance is cut off at ten times the mean."""
        hosts = self.outage_ms if self.outages_per_hour else 0
        bytes_left = self.linger_ms if self.lingers else 0
        hung = self.hang_ms if self.hangs_per_hour else 0
        daemon = self.daemon_down_ms if self.daemon_deaths_per_hour else 0
        orders = self.order_limit_ms if self.orders_lost or self.orders_fail else 0
        return 10 * (hosts + bytes_left + hung + daemon) + 2 * orders + (3 * self.operator_ms if self.any else 0)


_JOBS: Final = Faults(deaths_per_hour=0.5, hangs_per_hour=0.25, stalls_per_hour=0.1, detaches_per_hour=2.0)
_HOSTS: Final = Faults(outages_per_hour=0.1, orders_fail=0.005, orders_lost=0.005, lingers=0.05)
_DAEMON: Final = Faults(daemon_deaths_per_hour=4.0)

#: by name
PRESETS: Final[dict[str, Faults]] = {
    "none": Faults(),
    "jobs": _JOBS,
    "hosts": _HOSTS,
    "daemon": _DAEMON,
    "all": Faults(
        deaths_per_hour=_JOBS.deaths_per_hour,
        hangs_per_hour=_JOBS.hangs_per_hour,
        stalls_per_hour=_JOBS.stalls_per_hour,
        detaches_per_hour=_JOBS.detaches_per_hour,
        outages_per_hour=_HOSTS.outages_per_hour,
        orders_fail=_HOSTS.orders_fail,
        orders_lost=_HOSTS.orders_lost,
        lingers=_HOSTS.lingers,
        daemon_deaths_per_hour=_DAEMON.daemon_deaths_per_hour,
    ),
}


class Chance:
    """One seeded source for all faults of a run."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.random = Random(f"faults:{seed}")

    def until_next(self, per_hour: float) -> Millis | None:
        """When the next of something that happens this often comes; None: never."""
        return round(self.random.expovariate(per_hour) * HOUR_MS) + 1 if per_hour else None

    def about(self, mean_ms: Millis) -> Millis:
        """A time around a mean: exponential, between a tenth and ten times of it."""
        return round(min(max(self.random.expovariate(1) * mean_ms, mean_ms / 10), 10 * mean_ms))

    def within(self, most_ms: Millis) -> Millis:
        """Any time up to a bound."""
        return self.random.randrange(most_ms + 1)

    def so(self, share: float) -> bool:
        """Whether something of this share comes to be."""
        return self.random.random() < share
