"""What happens inside one rollout: engines, lengths of responses, and what is generated where.

Pure: no clock, no IO, and randomness only from a generator that the caller passes. The simulator, the gateway and the
rounds of tail batching share it. Needs numpy (extra ``rollout``).

====================  ==============================================================================================
:mod:`.hardware`      GPUs, with the source of each figure; :mod:`.models` the same for language models
:mod:`.engine`        how long one replica takes: step by step, in jumps, and as an estimate for planning
:mod:`.lengths`       how many tokens the unfinished responses will have, as scenarios
:mod:`.plan`          the degree of tensor parallelism on each node, and which request goes to which replica
:mod:`.rebalance`     one bounded move from the slowest replica to the fastest
:mod:`.parallelism`   RollPacker's rule for the degree, from preemptions
:mod:`.calibrate`     three constants of an engine, from a log of it
====================  ==============================================================================================

The terms: a *replica* is one running engine on ``tp`` GPUs. A *response* has a length in tokens, which is known when it
is finished. A *group* is the responses to one prompt. Times are seconds, memory is bytes.
"""
