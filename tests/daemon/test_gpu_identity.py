"""A GPU that is seen through two hosts is one GPU: the second is refused, whoever of the two comes first."""

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.core import model as m
from rollmuxd.core.effects import Observe
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.core.state import State
from rollmuxd.daemon.hosts.actuator import Actuator
from rollmuxd.daemon.hosts.gpu_identity import GpuIdentities
from rollmuxd.explain.causes import sentence
from rollmuxd.spi import ContactLost, Observation


def observation(host, *names):
    gpus = [f"{host}/gpu{number}" for number in range(len(names))]
    return Observation(tuple(GpuObservation(gpu, 0) for gpu in gpus), "boot1", dict(zip(gpus, names, strict=True)))


def all_of(host):
    return {f"{host}/gpu{number}" for number in range(8)}


def test_the_second_way_to_a_gpu_is_refused_and_the_first_goes_on():
    identities = GpuIdentities()
    for _ in range(2):
        identities.check("box", observation("box", "GPU-a", "GPU-b"), all_of("box"))
        with pytest.raises(
            ContactLost, match=r"alias/gpu0 is the same GPU as box/gpu1 \(GPU-b\): alias is a second way"
        ):
            identities.check("alias", observation("alias", "GPU-b", "GPU-c"), all_of("alias"))


def test_two_hosts_may_be_one_machine_if_each_has_gpus_of_its_own():
    identities = GpuIdentities()
    identities.check("box", observation("box", "GPU-a", "GPU-b"), {"box/gpu0"})
    identities.check("alias", observation("alias", "GPU-a", "GPU-b"), {"alias/gpu1"})


def test_a_gpu_that_was_replaced_is_forgotten_and_may_be_elsewhere():
    identities = GpuIdentities()
    identities.check("box", observation("box", "GPU-a"), all_of("box"))
    identities.check("box", observation("box", "GPU-new"), all_of("box"))
    identities.check("other", observation("other", "GPU-a"), all_of("other"))


def test_gpus_without_names_are_taken_as_they_are():
    GpuIdentities().check("box", Observation((GpuObservation("box/gpu0", 0),), "boot1"), all_of("box"))


@pytest.mark.asyncio
async def test_the_core_hears_that_the_second_host_cannot_be_reached():
    state, posted = State(), []
    for host in ("box", "alias"):
        state.hosts[host] = m.Host(host, "fake", 1000)
        state.nodes[f"{host}/gpu0"] = m.Node(f"{host}/gpu0", host, {f"{host}/gpu0": m.Gpu()}, ("rollout",))

    class Backend:
        async def observe(self, host):
            return observation(host, "GPU-a")

    actuator = Actuator({"fake": Backend()}, {}, state=lambda: state, post=posted.append, now=lambda: 0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(actuator.run)
        for number, host in enumerate(("box", "alias"), 1):
            actuator.perform([Observe(host)])
            with anyio.fail_after(PATIENCE_S):
                while len(posted) < number:
                    await anyio.sleep(0)
        tasks.cancel_scope.cancel()
    first, second = posted

    assert first.unreachable is None
    assert "same GPU as box/gpu0" in sentence(second.unreachable)
    assert await actuator.observe("alias", ["alias/gpu0"]) == (), "a release must not rest on it either"
