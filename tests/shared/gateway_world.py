"""The core before engines without a network: what it asks is done at once, what engines say waits in a mailbox."""

from array import array
from itertools import count

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.gateway import Gateway
from rollmuxd_gateway.core.model import Config, Replica, Request
from rollmuxd_gateway.fakes.hashlm import Engine, EngineDied, Model

STEP_MS = 10
#: what was made by an engine alone, by what it was asked
_MADE = {}


class World:
    def __init__(self, replicas=2, *, config=None, model=None, gpus=None, interval=1, **engine):
        self.gateway = Gateway(config or Config())
        self.model = model or Model(median=120, sigma=0.3)
        self.now, self.interval = 0, interval
        self.engines, self.asleep, self.ended, self.delivered = {}, set(), {}, {}
        self.mail, self._sent, self._names = [], {}, count()
        #: replicas that cannot be woken, and that take no weights
        self.broken, self.unwritable = set(), set()
        for number in range(replicas):
            name = f"r{number}"
            own = gpus[number] if gpus else (f"host1/gpu{number}",)
            self.engines[name] = Engine(self.model, seed=number, **engine)
            replica = Replica(name, f"http://{name}", gpus=own, positional_seed=engine.get("positional_seed", False))
            self.tell(i.Register(replica))

    # ---- what a client does ----

    def ask(self, prompt, *, call="", group="", **params):
        number = next(self._names)
        name = f"q{number}"
        most = params.pop("max_tokens", 64)
        streamed, target = params.pop("streamed", False), params.pop("target", "")
        request = Request(
            name, call or name, 0, group or name, array("i", prompt), None, params, max_tokens=most, streamed=streamed
        )
        request.target = target
        self.tell(i.Arrive([request]))
        return name

    # ---- the loop ----

    def tell(self, it):
        for effect in self.gateway.handle(it, self.now):
            match effect:
                case e.Open():
                    self._open(effect)
                case e.Abort(request, k, replica):
                    if replica in self.engines:
                        self.engines[replica].abort(f"{request}-{k}")
                case e.Deliver(request, start, end):
                    ids = self.gateway.requests[request].ids[start:end]
                    assert start == len(self.delivered.setdefault(request, array("i")))
                    self.delivered[request].extend(ids)
                case e.End(request):
                    assert request not in self.ended, "ended twice"
                    self.ended[request] = self.gateway.requests[request]
                case e.Probe(replica):
                    self.mail.append(("probe", replica))
                case e.Park(replica):
                    assert not self.engines[replica].running, "parked at work"
                    self.asleep.add(replica)
                    if not self.gateway.replicas[replica].keeps_weights:
                        self.engines[replica].model = Model(version="lost")
                    self.mail.append(("input", i.Parked(replica, True)))
                case e.Wake(replica):
                    ok = replica in self.engines and replica not in self.broken
                    if ok:
                        self.asleep.discard(replica)
                        self.check_gpus()
                    self.mail.append(("input", i.Woken(replica, ok)))
                case e.Write(replica):
                    if replica in self.engines and replica not in (*self.unwritable, *self.broken):
                        self.engines[replica].model = self.model
                        self.mail.append(("input", i.Weights((replica,), self.model.version)))
                    elif replica in self.unwritable:
                        self.mail.append(("input", i.Woken(replica, ok=False)))

    def check_gpus(self):
        """No GPU has two engines awake."""
        awake = [one for name, one in self.gateway.replicas.items() if name in self.engines and name not in self.asleep]
        gpus = [gpu for replica in awake for gpu in replica.gpus]
        assert len(gpus) == len(set(gpus)), f"two engines on one GPU: {[one.id for one in awake]}"

    def _open(self, it):
        engine = self.engines.get(it.replica)
        name = f"{it.request}-{it.k}"
        if engine is None:
            self.mail.append(("input", i.Fault(it.request, it.k, "connect", "nobody listens")))
            return
        assert it.replica not in self.asleep, "opened on a replica that sleeps"
        self._sent[name] = (it.request, it.k, it.replica)
        engine.submit(name, it.prompt, {**it.params, "stream_interval": self.interval}, self._news)

    def _news(self, job):
        request, k, _ = self._sent[job.id]
        ids, logprobs = job.out[job.sent :], job.logprobs[job.sent :]
        job.sent = len(job.out)
        self.mail.append(("input", i.Tokens(request, k, ids, logprobs, finish=job.finish, stop_reason=job.stop_reason)))

    def kill(self, replica):
        """The process is gone: sockets break."""
        engine = self.engines.pop(replica)
        for job in [*engine.running.values(), *engine.waiting.values()]:
            request, k, _ = self._sent[job.id]
            self.mail.append(("input", i.Fault(request, k, "reset", "the connection was reset")))

    def deliver(self):
        mail, self.mail = self.mail, []
        for kind, it in mail:
            if kind == "input":
                self.tell(it)
                continue
            engine = self.engines.get(it)
            if engine is None:
                self.tell(i.Probed(it, ok=False))
            else:
                self.tell(i.Probed(it, True, len(engine.running), len(engine.waiting), engine.paused))

    def step(self):
        self.now += STEP_MS
        for name in list(self.engines):
            if name in self.engines:
                try:
                    self.engines[name].step()
                except EngineDied:
                    self.kill(name)
        self.deliver()
        due = self.gateway.deadline()
        if due is not None and due <= self.now:
            self.tell(i.Tick())

    def run(self, steps=20_000):
        for _ in range(steps):
            if not self.mail and all(request.over for request in self.gateway.requests.values()):
                return self
            self.step()
        raise AssertionError(f"not done: {[r for r in self.gateway.requests.values() if not r.over]}")


def alone(model, prompt, **asked):
    """What one engine makes of a prompt, without a gateway. It is the same each time, so it is made once."""
    key = repr((model, list(prompt), asked))
    if key not in _MADE:
        _MADE[key] = _make(model, prompt, **asked)
    return _MADE[key]


def _make(model, prompt, *, max_tokens=64, engine=None, **params):
    one = Engine(model, **(engine or {}))
    job = one.submit("x", array("i", prompt), {**params, "max_tokens": max_tokens})
    while not job.finish:
        one.step()
    return job
