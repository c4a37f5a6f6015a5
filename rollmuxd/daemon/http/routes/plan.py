"""What would happen if these jobs came."""

from rollmuxd.core.errors import Rejected
from rollmuxd.core.ids import Millis
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec
from rollmuxd.daemon import plan
from rollmuxd.daemon.http.background import ask, copy_of
from rollmuxd.daemon.http.limits import Slices, check_plan
from rollmuxd.daemon.http.routes.jobs import check_spec, job_spec
from rollmuxd.daemon.http.routing import Call, Routes
from rollmuxd.wire.plan import PlanBody, PlanView

routes = Routes("plan")


@routes.post("/v1/plan", problems=(429,))
async def make_plan(call: Call, body: PlanBody) -> PlanView:
    """Where these jobs would be placed if they came now, in this order; what it would cost, and which jobs it would
    slow.

    Nothing changes. ``on=empty``: on the nodes that there are, without the jobs; ``pools``: on made-up nodes. These are
    at most 5,000, and their GPUs times the jobs at most a million. For jobs that would wait the answer says why, and
    (for the first ten) what would let them in. The answer also has the fewest nodes that would do for these jobs alone.
    The search for them takes a second of processor time at most, and eight with ``least``. An answer that takes more
    than 20 s of processor time, or 60 s in all, is 422. Too many plans of one owner at a time are 429.
    """
    check_plan(body)
    caller, defaults = call.caller, call.services.settings.defaults
    specs: list[JobSpec] = []
    refused: dict[int, Rejected] = {}
    slices = Slices()
    for place, job in enumerate(body.jobs):
        await slices.pause()  # a job can name hundreds of URLs, and the check of each takes time
        specs.append(job_spec(job, defaults))
        try:
            check_spec(specs[-1], call.services.drivers, caller)
        except Rejected as why:
            refused[place] = why

    def look(core: Scheduler, now: Millis) -> plan.PlanQuestion:
        return plan.PlanQuestion(
            copy=copy_of(call, core),
            caller=caller,
            jobs=specs,
            refused=refused,
            on=body.on,
            pools=body.pools,
            least=body.least,
            now=now,
        )

    return await ask(call, look)
