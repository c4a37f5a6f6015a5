"""What is on GPUs, who holds them, and when they are clean; hosts and nodes."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.ids import GpuId, JobId, NodeId, SlotId
from rollmuxd.core.model import OrderKind
from rollmuxd.core.state import state_key
from simkit.checkers.records import Asked, Heeded, Member, Place, Records, Stay

_SEEN_IN: Final = (i.OrderDone, i.ReleaseSlot, i.ShrinkSlot)


class Gpus(Records):
    """Promises of GPUs, and what is heard of hosts and nodes."""

    def a_gpu_is_held_by_one_slot(self, name: SlotId, gpus: tuple[GpuId, ...]) -> None:
        """Nobody claims what somebody holds; a shrunk tail holds its own subset."""
        held = self.held
        if held.keys().isdisjoint(gpus):
            return
        for gpu in gpus:
            if gpu in held:
                self._broken("a_gpu_is_held_by_one_slot", f"{gpu} is held by slot {held[gpu]}, and {name} claims it")

    def a_gpu_is_given_on_only_when_verified_clean(self, name: SlotId, job: JobId, gpus: tuple[GpuId, ...]) -> None:
        """Nobody claims a GPU that another job's bytes may be on."""
        dirty_by = self.dirty_by
        if dirty_by.keys().isdisjoint(gpus):
            return
        for gpu in gpus:
            whose = dirty_by.get(gpu)
            if whose is not None and whose != job:
                self._broken(
                    "a_gpu_is_given_on_only_when_verified_clean",
                    f"slot {name} of {job} claims {gpu}, not verified clean since {whose} was there",
                )

    def a_slot_holds_what_its_phase_claims(self, name: SlotId, stay: Stay, gpus: tuple[GpuId, ...]) -> None:
        """All GPUs of its job's nodes, or a part of them where its phase starts on a part; on nodes in service."""
        if gpus != stay.gpus:
            strange = [gpu for gpu in gpus if gpu not in stay.gpus]
            if strange or not stay.min_gpus or len(gpus) < stay.min_gpus:
                self._broken(
                    "a_slot_holds_what_its_phase_claims", f"slot {name} claims {gpus}, and its phase is on {stay.gpus}"
                )
        if self.out:
            for node in stay.nodes:
                if node in self.out:
                    self._broken("a_slot_holds_what_its_phase_claims", f"slot {name} claims {node}: {self.out[node]}")

    def clean_is_what_was_verified(self, fact: f.GpusVerifiedClean) -> None:
        """GPUs are clean because an input said so, of a time at which nothing was on its way there."""
        place, given = self.places[fact.node], self.given
        if not self.held.keys().isdisjoint(fact.gpus):
            for gpu in fact.gpus:
                holder = self.held.get(gpu)
                if holder is not None and self.slots[holder].status not in ("taken", "released"):
                    self._broken("clean_is_what_was_verified", f"{gpu} is called clean, and slot {holder} holds it")
        if fact.by:
            if not isinstance(given, i.DeclareClean) or given.node != fact.node:
                self._broken("clean_is_what_was_verified", f"nobody declared {fact.node} clean")
            return
        seen = self._sights(fact.node)
        limit = self.config.clean_tolerance_mb
        for gpu in fact.gpus:
            used = seen.get(gpu)
            if used is not None and used > limit:
                left = (mb for key, mb in place.left.items() if self._may_leave(key, fact.node))
                limit = self.config.clean_tolerance_mb + sum(left)
            if used is None or used > limit:
                self._broken("clean_is_what_was_verified", f"{gpu} is called clean, and was seen with {used} MB")
        for job in dict.fromkeys(map(self.dirty_by.get, fact.gpus)):
            if job is not None:
                self._nothing_is_on_its_way(fact.node, job)

    def _may_leave(self, key: str, node: NodeId) -> bool:
        """Whether a state is there; or was, and its job stays, whose process may keep what it had left."""
        if self.kept.get(key, "gone") != "gone":
            return True
        member = self.members[key.partition("|")[0]]
        status = member.resume_to if member.status == "paused" else member.status
        return status in ("placed", "moving") and node not in member.kept.left and member.session in self.heard

    def what_may_be_left_was_seen_of_a_parked_state(self, fact: f.ResidualMemoryObserved) -> None:
        """No more than the input at hand shows on a GPU of the node on which nobody else's bytes may be, nor anybody's
        slot is; and of a state that is parked there.
        """
        given: Any = self.given
        observations: Sequence[i.GpuObservation] = (
            given.gpus if isinstance(given, i.HostObserved) else getattr(given, "seen", ())
        )
        free = [gpu for gpu in self.places[fact.node].gpus if self._is_nobodys_but(gpu, fact.job)]
        most = max((observation.used_mb for observation in observations if observation.gpu in free), default=0)
        where = self.kept.get(state_key(fact.job, fact.pool, fact.node), "gone")
        if where != "parked" or fact.mb > most:
            self._broken(
                "what_may_be_left_was_seen_of_a_parked_state",
                f"{fact.job} may leave {fact.mb} MB on {fact.node}, where {most} MB were seen and its state is {where}",
            )

    def _is_nobodys_but(self, gpu: GpuId, job: JobId) -> bool:
        """Whether a GPU is held by nobody by right, and no other job's bytes may be on it."""
        holder = self.slots.get(self.held.get(gpu, ""))
        given_back = holder is None or (holder.job == job and holder.status in ("taken", "released"))
        return given_back and self.dirty_by.get(gpu, job) == job

    def _sights(self, node: NodeId) -> dict[GpuId, int]:
        given = self.given
        observations: Sequence[i.GpuObservation] = ()
        if isinstance(given, _SEEN_IN):
            observations = given.seen
        elif isinstance(given, i.HostObserved):
            if node in self.stale:
                self._broken("clean_is_what_was_verified", f"{node} was looked at before it was last touched")
            observations = given.gpus
        return {observation.gpu: observation.used_mb for observation in observations}

    def _nothing_is_on_its_way(self, node: NodeId, job: JobId) -> None:
        member = self.members.get(job)
        if member is None:
            return
        slot = self.slots.get(member.holding or "")
        if slot is not None and slot.status == "tail":
            return  # it gave these GPUs back; what it keeps is held
        for pool in dict.fromkeys(spec.pool for spec in member.spec.states):
            key = state_key(job, pool, node)
            where = self.kept.get(key, "gone")
            told = self.orders.get(self.order_of.get(key, ""))
            coming = told is not None and told.kind is OrderKind.LOAD and told.run == member.run
            if where in ("loading", "loaded", "parking") or (coming and member.session in self.heard):
                self._broken("clean_is_what_was_verified", f"{node} is called clean of {job}, whose state is {where}")

    def what_was_taken_away_is_held_until_verified_clean(self, name: SlotId, asked: Asked) -> None:
        """The GPUs of a slot that ended without its holder's word stay held until they were verified clean."""
        if asked.status == "taken" and not self.dirty_by.keys().isdisjoint(asked.gpus):
            for gpu in asked.gpus:
                if self.dirty_by.get(gpu) == asked.job and self.held.get(gpu) == name:
                    self._broken(
                        "what_was_taken_away_is_held_until_verified_clean",
                        f"slot {name} is over, and {gpu} is not clean",
                    )

    def a_placement_ends_when_nothing_is_left(self, job: JobId, member: Member) -> None:
        """No slot, no state and no byte of the job is on nodes that it leaves."""
        for node in member.nodes:
            for gpu in self.places[node].gpus:
                holder = self.slots.get(self.held.get(gpu, ""))
                if self.dirty_by.get(gpu) == job or (holder is not None and holder.job == job):
                    self._broken(
                        "a_placement_ends_when_nothing_is_left", f"{job} leaves {node}, and {gpu} is not clean"
                    )
            for pool in dict.fromkeys(spec.pool for spec in member.spec.states):
                where = self.kept.get(state_key(job, pool, node), "gone")
                if where != "gone":
                    self._broken("a_placement_ends_when_nothing_is_left", f"{job} leaves {node}: a state is {where}")

    # ---- what backends say -------------------------------------------------------------------------------------------

    def _sees(self, given: i.HostObserved) -> None:
        since = self.now + 1 if given.since is None or given.unreachable is not None else given.since
        nodes = self.host_nodes.get(given.host, ())
        self.stale = tuple(node for node in nodes if self.places[node].touched_at >= since)
        unclean = any(observation.used_mb > self.config.clean_tolerance_mb for observation in given.gpus)
        if unclean or given.unreachable is not None:
            self.trouble_at[given.host] = self.now

    # ---- what facts tell ---------------------------------------------------------------------------------------------

    def _started(self, fact: f.DaemonStarted) -> None:
        for node in self.places:
            self.out.setdefault(node, "not seen since the daemon started")

    def _host_added(self, fact: f.HostAdded) -> None:
        self.ram.setdefault(fact.host.id, [0, 0])[1] = fact.host.ram_mb
        self.host_nodes.setdefault(fact.host.id, [])

    def _host_booted(self, fact: f.HostBooted) -> None:
        given = self.given
        if not isinstance(given, i.HostObserved) or given.boot_id != fact.boot_id:
            self._broken("clean_is_what_was_verified", f"{fact.host} booted, by nobody's word")
        if fact.host in self.boots:  # nobody can rely on what is there: it was there before, or has come since
            nodes = self.host_nodes[fact.host]
            for member in self.members.values():
                for key in [key for key in member.kept.used if key.split("|")[2] in nodes]:
                    del member.kept.used[key]
        self.boots[fact.host] = fact.boot_id

    def _node_added(self, fact: f.NodeAdded) -> None:
        spec = fact.node
        known = self.places.get(spec.id)
        if known is not None and known.users:
            self._broken("a_node_is_in_one_group", f"{spec.id} changes, and jobs are placed on it")
        self.places[spec.id] = Place(spec.host, spec.gpus, spec.pools)
        if spec.id not in self.host_nodes[spec.host]:
            self.host_nodes[spec.host].append(spec.id)
        self.out[spec.id] = "not seen yet"

    def _node_removed(self, fact: f.NodeRemoved) -> None:
        place = self.places.pop(fact.node)
        self.host_nodes[place.host].remove(fact.node)
        self.out.pop(fact.node, None)
        if place.users:
            self._broken("a_node_is_in_one_group", f"{fact.node} is removed, and jobs are placed on it")

    def _node_up(self, fact: f.NodeUp) -> None:
        given = self.given
        if not isinstance(given, i.HostObserved) or given.unreachable or given.host != self.places[fact.node].host:
            self._broken("a_slot_holds_what_its_phase_claims", f"{fact.node} is up, and nobody saw it ({given})")
        self.out.pop(fact.node, None)
        self._disturbed(fact.node)

    def _node_out(self, fact: Any) -> None:
        self.out[fact.node] = f"it is {f.name(fact)}"
        self._disturbed(fact.node)

    def _verified_clean(self, fact: f.GpusVerifiedClean) -> None:
        self.clean_is_what_was_verified(fact)
        dirty_by = self.dirty_by
        for gpu in fact.gpus:
            if gpu in dirty_by:
                del dirty_by[gpu]
        place = self.places[fact.node]
        if place.not_clean:
            place.not_clean = not dirty_by.keys().isdisjoint(place.gpus)
            self._disturbed(fact.node)

    def _residual_memory_observed(self, fact: f.ResidualMemoryObserved) -> None:
        self.what_may_be_left_was_seen_of_a_parked_state(fact)
        left, key = self.places[fact.node].left, state_key(fact.job, fact.pool, fact.node)
        left[key] = max(fact.mb, left.get(key, 0))

    def _unclear(self, fact: f.GpusNotClean) -> None:
        self.places[fact.node].not_clean = True
        self._disturbed(fact.node)

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _inputs: ClassVar[Heeded] = {
        i.HostObserved: _sees,
    }
    _facts: ClassVar[Heeded] = {
        f.DaemonStarted: _started,
        f.HostAdded: _host_added,
        f.HostBooted: _host_booted,
        f.NodeAdded: _node_added,
        f.NodeRemoved: _node_removed,
        f.NodeUp: _node_up,
        f.NodeOccupied: _node_out,
        f.NodeUnknown: _node_out,
        f.NodeLost: _node_out,
        f.NodeQuarantined: _node_out,
        f.NodeDraining: _node_out,
        f.NodeDrained: _node_out,
        f.NodeUndrained: _node_out,
        f.GpusVerifiedClean: _verified_clean,
        f.GpusNotClean: _unclear,
        f.ResidualMemoryObserved: _residual_memory_observed,
    }
