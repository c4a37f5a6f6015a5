"""A whole program that follows the facts, as a dashboard or an exporter does."""

import json
import time

from rollmuxd.client.errors import Unavailable, Unreachable
from rollmuxd.client.sync import Daemon

daemon, after = Daemon(), 0
while True:
    try:
        page = daemon.get("/v1/facts", after=after, wait_ms=20_000)
    except (Unavailable, Unreachable):
        time.sleep(0.05)
        continue
    after = page["last"]
    if page["facts"]:
        seqs = [fact["seq"] for fact in page["facts"]]
        print(json.dumps({"at": time.monotonic(), "event": "facts", "seqs": seqs}), flush=True)
