"""The sentences of causes, each made for one reader."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from rollmuxd.core.causes import Cause
from rollmuxd.core.ids import JobId

#: the sentence of each code. ``{job}`` is a job's name, ``{cause}`` the sentence of the cause behind it
SENTENCES: Final[Mapping[str, str]] = {
    # what people, drivers, backends and policies wrote
    "said": "{text}",
    # nodes and their GPUs
    "drained": "drained by {by}",
    "drained_unconfigured": "drained by the configuration, which does not have it",
    "occupied": "{gpu} is used by {process} ({used_mb} MB)",
    "unread": "{gpu}: {text}",
    "no_backend": "no backend that is configured reaches it",
    "not_clean": "{gpus} not verified clean {cause}",
    "not_clean_in_time": "{cause}; not clean within {limit_s} s",
    "still_used": "{cause}: {used_gb}, of which {clean_gb:g} GB would be clean",
    "after_release": "after {job} held them",
    "after_order": "after {job} was to {kind}",
    "after_move": "after {job} moved away",
    "after_fault": "({cause})",
    "shared": "although another job has the node",
    "declared_clean": "declared clean",
    # orders, and what a state leaves on a GPU
    "order_failed": "could not {kind} its {pool} state on {node}: {cause}",
    "order_no_word": "no word of the {kind} of its {pool} state on {node}: {cause}",
    "not_begun": "it was not begun",
    "outcome_unknown": "the driver does not know what became of it",
    "not_done": "the driver says that it was not done",
    "no_driver": 'residency driver "{driver}" is not there',
    "nothing_to_move": "what it is about is gone (job {job}, node {node})",
    "daemon_restarted": "the daemon was restarted meanwhile",
    "suspected": "order {order} is not sent again, because the daemon crashed {crashes} times while it was open",
    "residual_memory": "its {pool} state left {left_gb:g} GB on {gpu} when parked, {agreed_gb:g} GB were agreed "
    "(residual_gb), and {cause}",
    "size_unknown": "how large it is when loaded is not known (gpu_gb)",
    "not_parked": "of a state of {state_gb:g} GB (gpu_gb) that is more than residual memory",
    "fit_unknown": "whether {job} fits beside that is not known (gpu_gb)",
    "does_not_fit": "{job} needs {needed_gb:g} GB of the GPU's {gpu_gb:g} GB",
    "memory_kept": "it keeps {kept_gb:g} GB on {gpu}, which it holds no longer ({clean_gb:g} GB would be clean), and "
    "declared no state for {pools}: declare one, or free the memory in the phase",
    # jobs, their processes and sessions
    "new_run": "run {run} has begun",
    "replaced": "replaced by a new run",
    "paused": "paused by {by}",
    "ended": "ended",
    "finished": "{text}",
    "evicted": "evicted from {node}",
    "slo_not_kept": "its slo of {slo:g} cannot be kept here",
    "slo_not_kept_there": "its slo of {slo:g} cannot be kept where it was",
    "status": "{status}",
    "status_because": "{status}: {cause}",
    "job_is": "its job is {status}",
    "process_gone": "its process (pid {pid} on {host}) is gone",
    "process_left": "its process (pid {pid}) left, and did not end the job",
    "no_heartbeat": "no heartbeat from pid {pid} on {host} for one lease time",
    "never_opened": "no process opened a session for it within {limit_s} s",
    "launch_failed": "its process could not be started on {host}: {cause}",
    "no_launcher": "no backend that starts processes reaches {host}",
    "host_restarted": "host {host} was restarted",
    "lost_too_often": "started again {times} times within {within_min} min and lost each time; the last time: {cause}; "
    "mend it, and reinstate it",
    "journal_lost": "{cause}, and does not say what the job did since; end this process, and start it again",
    "restored": "the journal was restored from a backup",
    "no_mark": "the journal has no readable mark that would say how far it had come",
    "another_journal": "another journal was used in this directory before this one",
    "facts_missing": "the journal lost its end (it ends at fact {last}, and fact {written} had been written)",
    "next_process": "another is to be started",
    "starts_elsewhere": "to be started on other nodes",
    "process_is_ended": "its process is ended, to be started on other nodes",
    # slots
    "takes_no_requests": "it is {status}: {cause}",
    "no_phase": "it has no phase {phase!r}; it registered {phases}",
    "waits_already": "slot {slot} already waits for phase {phase}; a job has one request at a time",
    "many_requests": "{waiting} requests are waiting, which is the limit; try again later",
    "many_of_owner": "{waiting} requests of owner {owner} are waiting, and its limit is {most} "
    "(owners.{owner}.max_waiting); try again later, or have the limit raised",
    "withdrawn": "withdrawn",
    "revoked": "revoked",
    "revoked_by": "revoked by {by}: {text}",
    "interrupted": "its process was interrupted",
    "not_asked_for": "no call asked for it for {limit_s} s",
    "another_session": "another session of its run was opened",
    "session_closed": "its session was closed",
    "job_ended": "job ended: {cause}",
    "job_quarantined": "job quarantined: {cause}",
    "overrun": "it ran for {ran_s} s, its {phase} is known to take {expected_s:g} s, and others wait for its GPUs",
    "not_yours": "the slot is not yours any more",
    "slot_is": "the slot is {status}",
    # loans to fillers
    "expected": "a job is expected on the node",
    "wanted": "the node is wanted for a job, or taken out of service",
    "not_given_back": "it did not give way within {limit_s:g} s",
    "host_ram": "host {host} has {ram_gb:g} GB for parked states, and {needed_gb:g} GB are needed",
    "gpu_memory": "a GPU of {node} has {gpu_gb:g} GB, and {needed_gb:g} GB are needed",
    "node_is": "node {node} is {status}",
    "emptier_node": "node {node} has fewer fillers",
    # moves and plans
    "node_drained": "node {nodes} is drained",
    "nodes_drained": "nodes {nodes} are drained",
    "promise_holds": "the promise that it asked for holds there",
    "saves": "saves {saves:.2f} per hour with {moves} move(s), which cost {costs:.2f}",
    "order_saves": "another order saves {saves:.2f} per hour, and costs {costs:.2f} once",
    "move_abandoned": "its move was abandoned: {cause}",
    "pause_asked": "it was paused by {by}",
    "target_out": "node {node}, where it was to go, is {status}",
    "source_out": "node {node}, from where it was to go, is {status}",
    "drain_ended": "{nodes}, from where it was to go, is no longer drained",
    "joined": "job {job} has joined its group meanwhile",
    "begins_late": "it has not come to the end of an iteration within {limit_s} s",
    "ends_late": "it has not parked what it had loaded within {limit_s} s",
    "times_left_plan": "phases of {job} take another time than was planned",
    "moves_planned": "loads and parks of {job} are in the plan now",
    "members_changed": "its members have changed",
    "at_risk": "its promise was at risk",
    "credit_spent": "{job} has spent the credit it had",
    "short_of_credit": "it is short of credit ({credit_s:.0f} s)",
    "hold_without": "{cause}; without this job the promises of its group hold",
    "earns_alone": "{cause}, and has nodes of its own until it has earned more",
    "guard_in_vain": "its credit has not grown over {iterations} iterations",
}
#: what stands for a part that is not known
UNKNOWN: Final[Mapping[str, str]] = {"host": "an unnamed host", "process": "an unknown process"}


def sentence(cause: Cause | None, name_of: Callable[[JobId], str] = str) -> str:
    """The cause in words; "" for none. ``name_of`` gives the name of a job that the reader may see."""
    if cause is None:
        return ""
    if cause.code not in SENTENCES:  # of a later version, or of a policy of your own
        return f"{cause.code} {cause.data}" if cause.data else cause.code
    parts = {key: name_of(value) if key == "job" else _in_words(key, value) for key, value in cause.data.items()}
    return SENTENCES[cause.code].format(**parts, cause=sentence(cause.cause, name_of))


def _in_words(name: str, part: Any) -> Any:
    """A part as it stands in a sentence: ids in a row; of a table, how many GB each has."""
    if isinstance(part, dict):
        return ", ".join(f"{key} has {value:g} GB" for key, value in part.items())
    if isinstance(part, list | tuple):
        return (" and " if name == "pools" else ", ").join(part)
    return part or UNKNOWN.get(name, part)


def refusal(error: Exception) -> str:
    """What a refusal of the core says, with the cause behind it."""
    words = sentence(getattr(error, "because", None))
    return f"{error} ({words})" if words else str(error)
