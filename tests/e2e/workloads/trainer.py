"""A trainer that does what it is told, line by line on stdin, and tells on stdout what came of it.

Everything goes through the public API and runs on the main thread, as a training loop would. Times are those of the
machine's monotonic clock.
"""

import json
import os
import sys
import time
from typing import Any

import rollmuxd
import rollmuxd.client.job
import rollmuxd.client.transport  # now, and not when a test waits for it


def tell(**what: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


class Trainer:
    job: rollmuxd.Job
    phase: Any = None
    slot: rollmuxd.Slot | None = None
    #: what the hook of a kind raises from now on
    trouble: dict[str, str]

    def make(self, name: str, settings: dict[str, Any]) -> None:
        self.trouble = {}
        self.job = rollmuxd.job(name, **settings)

    def hooks(self, kinds: list[str], seconds: float = 0.0) -> None:
        """Register hooks that tell that they were called, and by what, and then take some time."""
        for kind in kinds:

            def hook(order: Any, kind: str = kind) -> None:
                tell(event="hook", kind=order.kind, hook=kind, pool=order.pool, warm=order.warm, pid=os.getpid())
                time.sleep(seconds)
                if self.trouble.get(kind):
                    raise RuntimeError(self.trouble[kind])

            getattr(self.job, f"on_{kind}")(hook)

    def spoil(self, **trouble: str) -> None:
        self.trouble.update(trouble)

    def start(self) -> dict[str, Any]:
        self.job.start()
        return {"id": self.job.id}

    def enter(self, phase: str, then: str | None = None) -> dict[str, Any]:
        self.phase = self.job.phase(phase, then=then)
        self.slot = self.phase.__enter__()
        said = {"slot": self.slot.id, "fence": self.slot.fence, "gpus": self.slot.gpus, "phase": phase}
        tell(event="granted", **said)
        return said

    def leave(self) -> None:
        assert self.slot is not None
        tell(event="leaving", slot=self.slot.id)
        self.slot = None
        self.phase.__exit__(None, None, None)

    def loop(
        self, rounds: int, seconds: float, phases: tuple[str, ...] = ("rollout", "train"), then: bool = False
    ) -> None:
        """Iterations, as a training loop has them; with ``then`` the next phase is asked for by the release."""
        stays = [phase for _ in range(rounds) for phase in phases]
        for number, phase in enumerate(stays):
            following = stays[number + 1] if then and number + 1 < len(stays) else None
            self.enter(phase, following)
            time.sleep(seconds)
            self.leave()

    def progress(self, done: int, total: int) -> None:
        assert self.slot is not None
        self.slot.progress(done, total)

    def directive(self) -> dict[str, Any]:
        """What the daemon asks of us now."""
        assert self.slot is not None
        asked = self.slot.directive
        return {"kind": asked and asked.kind, "keep": asked and asked.keep}

    def shrink(self, keep: list[str]) -> None:
        assert self.slot is not None
        gone = [gpu for gpu in self.slot.gpus if gpu not in keep]
        tell(event="shrinking", slot=self.slot.id, gone=gone)
        self.slot.shrink(keep)

    def interrupt(self, paths: list[str], heard: bool) -> None:
        """Interrupt the next call of each path, as Ctrl-C does: before it is sent, or before it is answered."""
        kind = rollmuxd.client.sync.Daemon
        send, left = kind.call, list(paths)

        def interrupted(daemon: Any, call: Any) -> Any:
            if not left or not call.path.endswith(left[0]):
                return send(daemon, call)
            if heard:
                send(daemon, call)
            raise KeyboardInterrupt(left.pop(0))

        kind.call = interrupted  # type: ignore[method-assign]

    def end(self) -> None:
        self.job.end()


def main() -> None:
    trainer = Trainer()
    for line in sys.stdin:
        told = json.loads(line)
        do, number = told.pop("do"), told.pop("number")
        try:
            answer = getattr(trainer, do)(**told) or {}
        except (Exception, KeyboardInterrupt) as error:
            kind = type(error).__name__
            data = getattr(error, "data", {})
            tell(number=number, error=kind, text=str(error), status=getattr(error, "status", 0), data=data)
        else:
            tell(number=number, **answer)


if __name__ == "__main__":
    main()
