"""Jobs: registering, looking, pausing, ending."""

from collections.abc import Mapping
from functools import partial

from msgspec import UNSET, UnsetType, structs

from rollmuxd.core.errors import Conflict, Impossible
from rollmuxd.core.ids import JobId, Millis
from rollmuxd.core.inputs import EndJob, PauseJob, RegisterJob, ResumeJob
from rollmuxd.core.model import Job, JobStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import (
    Asynchronous,
    Filler,
    IfUnmet,
    JobSpec,
    LaunchSpec,
    Movable,
    OnLoss,
    Park,
    PhaseSpec,
    StateSpec,
    Want,
)
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller, Forbidden, check_act, find_job
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.background import ask, copy_of
from rollmuxd.daemon.http.limits import REGISTRATION
from rollmuxd.daemon.http.routing import Call, Id, PageQuery, Routes
from rollmuxd.daemon.http.wait_reasons import WaitReasons
from rollmuxd.daemon.settings import DefaultsTable, mb, ms
from rollmuxd.spi import Residency, TakesOptions
from rollmuxd.wire.answers import Explanation, JobView, Page, RegisteredView
from rollmuxd.wire.requests import EndBody, PhaseBody, RegisterBody, StateBody

routes = Routes("jobs")


class JobsQuery(PageQuery, frozen=True):
    """Filters of the list of jobs."""

    owner: Id | UnsetType = UNSET
    status: JobStatus | UnsetType = UNSET
    pool: Id | UnsetType = UNSET
    #: those that have ended or are lost, too
    over: bool = True


@routes.post("/v1/jobs", status=201, also=(200,), problems=(409, 429), max_body=REGISTRATION)
async def register_job(call: Call, body: RegisterBody) -> RegisteredView:
    """Register a job, or a new run of it. 200 instead of 201: this idempotency key's run was registered before.

    The body has at most 32,000 bytes: the daemon keeps it in memory and in the journal.
    """
    caller = call.caller
    await call.act_on(_may_register, body.name)
    spec = job_spec(body, call.services.settings.defaults)
    runs = ", ".join(check_spec(spec, call.services.drivers, caller))
    # From that look to the decision no other input comes in between: ``submit`` decides in this turn of the loop.
    given = RegisterJob(
        owner=caller.owner,
        user=caller.user,
        spec=spec,
        idempotency_key=body.idempotency_key,
        replace=body.replace,
    )
    known = call.services.writer.scheduler.state.job_named(caller.owner, body.name)
    anothers = known is not None and known.status is not JobStatus.ENDED and not caller.owns(known)
    # A lead takes another's place, or an admin has something run.
    what = "to be started" if body.launch is not None else f"has {runs} run" if runs else "registered again"
    noted = anothers or body.launch is not None or bool(runs)
    answer = await call.submit(given, f"{caller.owner}/{body.name}", reason=what, always=noted)
    if answer.repeated:
        call.status = 200
    assert answer.job is not None
    view = await _show(call, answer.job)
    return RegisteredView(**structs.asdict(view), journal=call.services.journal.id)


@routes.get("/v1/jobs", problems=(429,))
async def list_jobs(call: Call, query: JobsQuery) -> Page[JobView]:
    """The jobs that the caller may see; ended ones too, while the daemon remembers them.

    The ``reason`` of a job that waits (for a placement, or for its turn) is the first of its reasons. On a page with
    many kinds of jobs, the first 50 kinds have one. ``explain`` has all.

    A page ends after 2 MB. More than 100 pages of one owner at a time are 429.
    """
    return await page_of_jobs(call, query)


async def page_of_jobs(call: Call, query: JobsQuery, *, turns: bool = True) -> Page[JobView]:
    """A page of the list of jobs. ``turns``: say why those wait, too, that have their place."""

    def wanted(state: State, job: Job) -> bool:
        return (
            call.caller.may_read(job)
            and query.owner in (UNSET, job.owner)
            and query.status in (UNSET, job.status)
            and (query.over or job.status not in (JobStatus.ENDED, JobStatus.LOST))
            and (query.pool is UNSET or any(want.pool == query.pool for want in job.spec.wants))
        )

    why = WaitReasons(turns=turns)

    def view(visibility: Visibility, job: Job, now: Millis) -> JobView:
        return views.job_view(visibility, job, now, waiting=False, reason=why.first(visibility, job, now))

    return await call.page(query, lambda state: state.jobs, view, wanted)


@routes.get("/v1/jobs/{job}")
async def get_job(call: Call, job: str) -> JobView:
    """One job, by its id or its name; while it waits, also why, and what would let it in."""
    return await call.read(lambda core, now: _view(call, core, find_job(core.state, call.caller, job), now))


@routes.get("/v1/jobs/{job}/explain", problems=(422, 429))
async def explain_job(call: Call, job: str) -> Explanation:
    """Why it waits, or where it sits and why: as data and as sentences.

    Too many explanations of one owner's waiting jobs at a time are 429.
    """

    def look(core: Scheduler, now: Millis) -> Explanation | None:
        known = find_job(core.state, call.caller, job)
        if known.status is JobStatus.WAITING:
            return None
        return views.explanation(call.visibility(core), known, now, views.silence(core, known, now))

    def question(core: Scheduler, now: Millis) -> views.ExplainQuestion:
        known = find_job(core.state, call.caller, job)
        return views.ExplainQuestion(copy_of(call, core), known.id, now, call.caller, views.silence(core, known, now))

    found = await call.read(look)
    return await ask(call, question) if found is None else found


@routes.post("/v1/jobs/{job}/pause", problems=(409,))
async def pause_job(call: Call, job: str) -> JobView:
    """Let its running slot end, then give it no other until it is resumed."""
    return await _tell(call, PauseJob(job=await _mine(call, job), by=call.caller.name))


@routes.post("/v1/jobs/{job}/resume", problems=(409,))
async def resume_job(call: Call, job: str) -> JobView:
    """Let a paused job resume."""
    return await _tell(call, ResumeJob(job=await _mine(call, job), by=call.caller.name))


@routes.post("/v1/jobs/{job}/reinstate", problems=(409,))
async def reinstate_job(call: Call, job: str) -> JobView:
    """Take a quarantined job back among those that wait for a placement."""
    return await _tell(call, ResumeJob(await _mine(call, job), call.caller.name, quarantined=True), always=True)


@routes.delete("/v1/jobs/{job}", problems=(409,))
async def end_job(call: Call, job: str, body: EndBody) -> JobView:
    """End a job and free all it held."""
    # Seen at once, and decided before anything else is: no newer run can come in between.
    mine = await call.act_on(partial(_find_run, body.run), job)
    given = EndJob(job=mine.id, by=call.caller.name, reason=body.reason, session=body.session, finished=body.finished)
    return await _tell(call, given, body.reason)


def _find_run(run: int | None, state: State, caller: Caller, ref: str, *, act: bool) -> Job:
    job = find_job(state, caller, ref, act=act)
    if run not in (None, job.run):
        raise Conflict(f"run {run} is not the present one of job {job.spec.name}, which is run {job.run}: nothing ends")
    return job


def _may_register(state: State, caller: Caller, name: str, *, act: bool) -> None:
    """A new run ends what is left of the one before it: that takes the right to act on the job."""
    known = state.job_named(caller.owner, name)
    if known is not None and known.status is not JobStatus.ENDED:
        check_act(caller, known)


async def _mine(call: Call, ref: str) -> JobId:
    return (await call.act_on(find_job, ref)).id


async def _tell(call: Call, given: PauseJob | ResumeJob | EndJob, reason: str = "", *, always: bool = False) -> JobView:
    """Tell the core. What is done to another's job is written down; ``always``: to one's own too."""
    await call.submit(given, given.job, reason=reason, always=always)
    return await _show(call, given.job)


async def _show(call: Call, job: JobId) -> JobView:
    return await call.read(lambda core, now: _view(call, core, core.state.job(job), now))


def _view(call: Call, core: Scheduler, job: Job, now: Millis) -> JobView:
    return views.job_view(call.visibility(core), job, now, waiting=True)


# ---- what a registration says, in the core's words -------------------------------------------------------------------


def job_spec(body: RegisterBody, defaults: DefaultsTable) -> JobSpec:
    """The body of a registration as the core wants it; what it leaves open is as the configuration says."""
    # For a lazy park, ranks would have to agree on a moment while they are anywhere in their loop. Inside the release
    # call all of them stand still.
    park = body.park or ("lazy" if body.ranks == 1 else "at_release")
    return JobSpec(
        name=body.name,
        phases=tuple(_phase(phase, body.states) for phase in body.phases),
        wants=tuple(
            Want(pool, want.nodes, want.gpus, tuple(dict.fromkeys(want.named))) for pool, want in body.wants.items()
        ),
        side=tuple(_phase(phase, {}) for phase in body.side),
        states=tuple(_state(pool, state, defaults) for pool, state in body.states.items()),
        slo=defaults.slo if body.slo is None and body.filler is None else body.slo,
        priority=body.priority,
        on_loss=_on_loss(body, defaults),
        movable=Movable(body.movable),
        park=Park(park),
        if_unmet=IfUnmet(body.if_unmet),
        colocate=body.colocate,
        ranks=body.ranks,
        launch=None
        if body.launch is None
        else LaunchSpec(argv=tuple(body.launch.argv), cwd=body.launch.cwd, env=dict(body.launch.env)),
        asynchronous=None
        if body.asynchronous is None
        else Asynchronous(
            None if body.asynchronous.pace_s is None else ms(body.asynchronous.pace_s), body.asynchronous.ahead
        ),
        filler=None if body.filler is None else Filler(ms(body.filler.yield_s), ms(body.filler.min_run_s)),
    )


def check_spec(spec: JobSpec, drivers: Mapping[str, Residency], caller: Caller) -> list[str]:
    """Whether the drivers of a job's states could move them as it says. Of a driver that is not there the core tells.

    Returns the options that have something run as the daemon's user: only an admin has given such.

    Raises Impossible, and Forbidden for what has something run as the daemon's user.
    """
    if spec.launch is not None and caller.role is not Role.ADMIN:
        raise Forbidden(
            f"launch: {caller.name} may not have processes started (they run as the daemon's user, so that takes role "
            "admin); start the process yourself, and leave launch out"
        )
    runs: list[str] = []
    for state in spec.states:
        driver = drivers.get(state.driver)
        given = [key for key, _ in state.options]
        if driver is None:
            continue
        if not isinstance(driver, TakesOptions):
            if given:
                raise Impossible(
                    f"states.{state.pool}: driver {state.driver} takes no options, and {', '.join(given)} is given"
                )
            continue
        if forbidden := [key for key in given if key in driver.admin_options]:
            if caller.role is not Role.ADMIN:
                raise Forbidden(
                    f"states.{state.pool}.options: {caller.name} may not give {', '.join(forbidden)} (it is run as the "
                    "daemon's user, so that takes role admin)"
                )
            runs += [f"states.{state.pool}.options.{key}" for key in forbidden]
        try:
            driver.check(state)
        except ValueError as error:
            raise Impossible(f"states.{state.pool}: {error}") from error
    return runs


def _on_loss(body: RegisterBody, defaults: DefaultsTable) -> OnLoss:
    """As it says, else as configured; a process that comes by itself cannot be relaunched, whatever the default is."""
    if body.on_loss is None and defaults.on_loss == "relaunch" and body.launch is None:
        return OnLoss.HOLD
    return OnLoss(body.on_loss or defaults.on_loss)


def _phase(body: PhaseBody, states: Mapping[str, StateBody]) -> PhaseSpec:
    """A phase of the cycle on one pool, where the job keeps several engines, can begin and end on one of them."""
    state = states.get(body.pools[0])
    engine_gpus = 0 if len(body.pools) > 1 or state is None else state.engine_gpus
    return PhaseSpec(
        name=body.name,
        pools=tuple(dict.fromkeys(body.pools)),
        planned_ms=None if body.seconds is None else ms(body.seconds),
        gap_ms=ms(body.gap_s),
        min_gpus=body.min_gpus or engine_gpus,
        every=body.every,
        traffic=body.traffic or "",
    )


def _state(pool: str, body: StateBody, defaults: DefaultsTable) -> StateSpec:
    residual_gb = body.residual_gb
    if residual_gb is None:
        residual_gb = min(defaults.residual_gb, body.gpu_gb / 4) if body.gpu_gb else defaults.residual_gb
    return StateSpec(
        pool=pool,
        gpu_mb=mb(body.gpu_gb),
        residual_mb=mb(residual_gb),
        ram_mb=mb(body.ram_gb),
        driver=body.driver,
        load_ms=ms(body.load_s),
        park_ms=ms(body.park_s),
        engine_gpus=body.engine_gpus,
        options=tuple(
            (key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(body.options.items())
        ),
    )
