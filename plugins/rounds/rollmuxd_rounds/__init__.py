"""RollPacker's tail batching as a library for training loops: short rounds, long rounds, rewards per sample.

    rounds = Rounds(prompts, OpenAI(url, model="m", max_tokens=4096), n=8, want=128, reward=score)
    rounds.load_state_dict(checkpoint.get("rounds"))
    while not rounds.epoch_done:
        async with rounds.next() as rnd:
            batch = [group async for group in rnd]
        trainer.step(batch)
        rounds.commit(rnd)
        checkpoint["rounds"] = rounds.state_dict()

Needs httpx and msgspec. :class:`EarlyStart` and :class:`Accumulator` are for loops that train while they generate. The
rollout gateway chooses the parallelism of the engines.
"""

from rollmuxd_rounds.core.ledger import Ledger, Plan
from rollmuxd_rounds.core.limits import Adaptive, RewardTimeout
from rollmuxd_rounds.core.stream import Accumulator, EarlyStart
from rollmuxd_rounds.generate import Generate, OpenAI, Refused, Response, Unavailable
from rollmuxd_rounds.judge import Judge
from rollmuxd_rounds.runner import Group, MixedWeights, Round, Rounds, Sample

__all__ = [
    "Accumulator",
    "Adaptive",
    "EarlyStart",
    "Generate",
    "Group",
    "Judge",
    "Ledger",
    "MixedWeights",
    "OpenAI",
    "Plan",
    "Refused",
    "Response",
    "RewardTimeout",
    "Round",
    "Rounds",
    "Sample",
    "Unavailable",
]
