"""The client: imported next to torch, so httpx and msgspec, and of ours only ``rollmuxd.wire``.

Read in this order: ``phases`` (what users write), ``talk`` (the conversation behind it, as flows), ``steps`` (what a
flow is), ``calls`` (each call as data), ``sync`` and ``aio`` (the two senders), ``transport`` (the only httpx).
Beside them: ``heartbeat`` (a process of its own) and ``pulse`` (this side of it), ``channel`` (load and park),
``ranks`` (followers).
"""
