"""The client: imported next to torch, so httpx and msgspec, and of ours only ``rollmuxd.wire``.

Read first ``job`` (what users write), ``session`` (the conversation behind it, as flows), ``retry`` (what a flow is),
``calls`` (each call as data). Then ``sync`` and ``aio`` (the two senders), and ``transport`` (the only httpx). Beside
them: ``heartbeat`` (the side of the job), ``heartbeat_process`` (a process), ``channel`` (load and park),
``rank_group`` (followers).
"""
