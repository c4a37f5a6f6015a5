"""Who is known by what, and as whom. Which routes that opens to them is in ``test_roles``."""

import os

import pytest

from rollmuxd.daemon.access.keys import Role, fits, new_key

pytestmark = pytest.mark.asyncio


async def test_to_a_stranger_a_foreign_job_and_no_job_look_the_same(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        await world.job(alice, "hers")
        foreign, none = await stranger.get("/v1/jobs/j1"), await stranger.get("/v1/jobs/j2")
        assert foreign.status_code == none.status_code == 404
        assert foreign.json()["detail"].replace("j1", "j2") == none.json()["detail"]
        assert (await stranger.get("/v1/jobs")).json()["items"] == []
        assert (await stranger.get("/v1/slots", params={"job": "j1"})).status_code == 404


async def test_a_job_is_found_by_its_name_within_the_callers_owner_only(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        mine, theirs = await world.job(alice, "math"), await world.job(stranger, "math")
        assert (await alice.get("/v1/jobs/math")).json()["job"] == mine.id
        assert (await stranger.get("/v1/jobs/math")).json()["job"] == theirs.id
        async with world.client("root") as root:
            ambiguous = await root.get("/v1/jobs/math")
            assert ambiguous.status_code == 403
            assert mine.id in ambiguous.json()["detail"]


async def test_a_user_cannot_end_a_colleagues_run_by_registering_its_name(running, body_of_job):
    async with running() as world, world.client("alice") as alice, world.client("bob") as bob:
        await world.job(alice, "math")
        answer = await bob.post("/v1/jobs", json=body_of_job("math", replace=True))
        assert answer.status_code == 403
        assert world.state.jobs["j1"].user == "alice"
        assert world.state.jobs["j1"].run == 1


async def test_owner_and_user_come_from_the_key_and_a_body_cannot_say_them(running, body_of_job):
    async with running() as world, world.client("alice") as alice:
        answer = await alice.post("/v1/jobs", json=body_of_job("math", owner="others"))
        assert answer.status_code == 422
        assert answer.json()["data"]["field"] == "owner"
        view = (await alice.post("/v1/jobs", json=body_of_job("math"))).json()
        assert (view["owner"], view["user"]) == ("team", "alice")


async def test_at_the_unix_socket_the_uid_is_owner_and_user_and_root_is_admin(running, body_of_job):
    async with running() as world, world.on_socket(54321) as nobody, world.on_socket(0) as root:
        view = (await nobody.post("/v1/jobs", json=body_of_job("math"))).json()
        assert (view["owner"], view["user"]) == ("uid54321", "uid54321")
        assert (await nobody.get("/v1/keys")).status_code == 403
        assert (await root.get("/v1/keys")).status_code == 200
        assert (await root.get(f"/v1/jobs/{view['job']}")).status_code == 200
    async with running() as world, world.on_socket(os.getuid()) as own:
        assert (await own.get("/v1/keys")).status_code == 200


async def test_a_wrong_key_is_401_at_the_unix_socket_too(running):
    async with running() as world, world.on_socket(0) as root:
        answer = await root.get("/v1/jobs", headers={"Authorization": "Bearer rmx_00000000_nonsense"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer ", "Basic eDp5", "Bearer rmx", "Bearer rmx__x", "Bearer \xff"])
async def test_whatever_stands_for_a_key_and_is_none_is_401(running, sent):
    async with running() as world, world.client(None) as client:
        answer = await client.get("/v1/jobs", headers=[(b"authorization", sent.encode("latin-1"))])
        assert answer.status_code == 401


async def test_a_key_works_from_its_making_until_it_is_revoked_and_its_secret_is_told_once(running, capsys):
    async with running() as world, world.client("root") as root:
        made = (await root.post("/v1/keys", json={"owner": "team", "user": "dan", "role": "viewer"})).json()
        secret = made["secret"]
        assert secret.startswith(f"rmx_{made['key']}_")
        world.secrets["dan"] = secret
        async with world.client("dan") as dan:
            assert (await dan.get("/v1/jobs")).status_code == 200
            listed = await root.get("/v1/keys")
            assert made["key"] in listed.text
            kept = [str(key) for key in await world.journal.list_keys()]
            for text in (listed.text, *kept, str(await world.journal.read(0, 1000))):
                assert secret not in text
                assert secret.split("_", 2)[2] not in text
            assert (await root.delete(f"/v1/keys/{made['key']}")).json()["revoked"] is True
            assert (await dan.get("/v1/jobs")).status_code == 401
        said = capsys.readouterr()
        assert secret not in said.out + said.err


async def test_a_key_is_revoked_before_the_fact_says_so_as_a_journal_that_loses_its_end_may_lose_the_later_one(
    running, monkeypatch
):
    async with running() as world, world.client("root") as root:
        made = (await root.post("/v1/keys", json={"owner": "team", "user": "dan", "role": "viewer"})).json()
        steps = []
        revoke, append = world.journal.revoke_key, world.journal.append
        monkeypatch.setattr(world.journal, "revoke_key", lambda *args: (steps.append("revoked"), revoke(*args))[1])
        monkeypatch.setattr(world.journal, "append", lambda *args: (steps.append("said"), append(*args))[1])
        assert (await root.delete(f"/v1/keys/{made['key']}")).json()["revoked"] is True
        assert steps == ["revoked", "said"]


async def test_a_key_expires_by_itself_and_says_so_to_whoever_has_it(running):
    async with running() as world, world.client("root") as root:
        made = (await root.post("/v1/keys", json={"owner": "team", "user": "dan", "expires_s": 60})).json()
        world.secrets["dan"] = made["secret"]
        async with world.client("dan") as dan, world.client(None) as nobody:
            assert (await dan.get("/v1/jobs")).status_code == 200
            world.clock.not_before(world.clock.now() + 60_001)
            answer = await dan.get("/v1/jobs")
            assert answer.status_code == 401
            assert "expired" in answer.json()["detail"]
            guessed = {"Authorization": f"Bearer {made['secret'][:-1]}x"}
            assert "expired" not in (await nobody.get("/v1/jobs", headers=guessed)).text
        (listed,) = [key for key in (await root.get("/v1/keys")).json()["items"] if key["key"] == made["key"]]
        assert (listed["expired"], listed["revoked"]) == (True, False)
        assert listed["expires_at"] == made["expires_at"]


async def test_secrets_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "rollmuxd.daemon.access.keys.hmac.compare_digest", lambda a, b: compared.append((a, b)) or False
    )
    key, secret = new_key("team", "alice", Role.USER, 7)
    assert not fits(key, secret), "another comparison decides"
    assert [len(side) for side in compared[0]] == [64, 64], "what is compared has the same length, whatever was sent"


async def test_without_required_keys_whoever_reaches_the_port_is_an_operator(running):
    async with running(access={"require_keys": False}) as world, world.client(None) as client:
        assert (await client.get("/v1/keys")).status_code == 200
