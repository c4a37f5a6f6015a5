"""What would happen if these jobs came."""

from rollmuxd.daemon import plan
from rollmuxd.daemon.http.aside import aside, fresh_policy, packed
from rollmuxd.daemon.http.glue import Call, Routes
from rollmuxd.daemon.http.routes._query import BODY
from rollmuxd.daemon.http.routes.jobs import job_spec
from rollmuxd.wire.plan import PlanBody, PlanView

routes = Routes("plan")


@routes.post("/v1/plan", problems=BODY)
async def make_plan(call: Call, body: PlanBody) -> PlanView:
    """Where these jobs would be placed if they came now, in this order; what it would cost, and whom it would slow.

    Nothing changes. ``on=empty``: on the nodes that there are, without the jobs; ``pools``: on nodes made up.
    Jobs that would wait are told why, and (the first ten) what would let them in.
    """
    services, caller = call.services, call.caller
    settings = services.settings
    specs = [job_spec(job, settings.defaults) for job in body.jobs]
    state, config, now = await call.read(lambda core, now: (packed(core.state), core.config, now))

    asked = plan.Question(
        state=state,
        config=config,
        policy=fresh_policy(settings),
        owner=caller.owner,
        user=caller.user,
        jobs=specs,
        on=body.on,
        pools=body.pools,
        now=now,
        may_read_of=caller.may_read_of,
    )
    return await aside(lambda: plan.answer(asked))
