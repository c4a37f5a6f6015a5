"""Weights on their way between hosts of this machine, over the loopback: real sockets, real files, real kills."""

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
from click.testing import CliRunner
from patience import PATIENCE_S, until

from rollmuxd_weights import Busy, Incomplete, NoRoom, Older, Publisher, Puller, Stale, command
from rollmuxd_weights.apply import sglang, vllm
from rollmuxd_weights.ask import ask, status
from rollmuxd_weights.bench import in_namespaces, loopback, picture
from rollmuxd_weights.between import Between
from rollmuxd_weights.core import delta
from rollmuxd_weights.core.fence import parse
from rollmuxd_weights.hosts import Address
from rollmuxd_weights.hosts import hosts as read
from rollmuxd_weights.namespaces import Clusters, unavailable
from rollmuxd_weights.publish import serve
from rollmuxd_weights.pull import Superseded, Transfer
from rollmuxd_weights.store import Store

CHUNK = 1 << 14
KEY = "a key of this run"


def weights(version, words=200_000):
    """What version so and so has: known to every process."""
    return {"a": np.random.default_rng(version).integers(0, 1 << 16, words, dtype=np.uint16), "b": np.arange(7.0)}


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Both:
    """Trainers and pullers of one job, each with a folder of its own."""

    def __init__(self, folder, train=1, rollout=2, **publisher):
        self.hosts = loopback(train, rollout)
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._given = {"chunk": CHUNK, "key": KEY, **publisher}
        self.trainers = [self.trainer(host) for host in self.hosts["trainers"]]
        self.pullers = [self.puller(host) for host in self.hosts["rollouts"]]

    def trainer(self, host, **more):
        given = {"dir": self.folder / host, **self._given, **more}
        return self._stack.enter_context(Publisher("job", self.hosts, me=host, **given))

    def puller(self, host, hosts=None, **more):
        made = Puller("job", hosts or self.hosts, me=host, **{"dir": self.folder / host, "key": KEY, **more})
        self._stack.callback(made.close)
        return made

    def publish(self, version, tensors=None, **more):
        made = [one.publish(tensors or weights(version), version, **more) for one in self.trainers]
        return made[0]

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._stack.close()


# ---- a version arrives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("train", "rollout"), [(1, 1), (1, 3), (3, 1), (2, 4)])
def test_every_host_shows_the_bytes_that_were_published(tmp_path, train, rollout):
    with Both(tmp_path, train, rollout) as both:
        for one in both.pullers:
            one.start()
        for step in (1, 2):
            made = both.publish(step)
            paths = [one.ready(step, PATIENCE_S) for one in both.pullers]
            assert {digest(path) for path in paths} == {digest(made.path)}
            both.trainers[0].wait_pulled(made.identity, hosts=rollout, timeout_s=PATIENCE_S)
        assert both.trainers[0].pulled_by(made.identity) == list(both.hosts["rollouts"])


def test_one_copy_crosses_whatever_the_number_of_hosts(tmp_path):
    with Both(tmp_path, 2, 4) as both:
        made = both.publish(1)
        found = at_once(both.pullers)
        crossed = sum(one.slow_bytes for one in found)
        # A host that is late on a busy machine is helped: then some chunks cross twice. Flat it would be four copies.
        assert made.bytes <= crossed < 2 * made.bytes
        assert sum(one.fabric_bytes for one in found) + crossed >= 4 * made.bytes


def test_the_next_version_says_what_each_line_carried_of_the_one_before(tmp_path):
    with Both(tmp_path, 2, 2) as both:
        measured = {}
        for step in (1, 2, 3):
            made = both.publish(step)
            assert both.trainers[0].store.manifest(made.identity).rates.keys() == measured.keys()
            for one in at_once(both.pullers):
                measured |= one.rates
            for trainer in both.trainers:
                trainer.wait_pulled(made.identity, hosts=2, timeout_s=PATIENCE_S)
        assert {"train0/0-roll0/0", "train1/0-roll1/0"} <= measured.keys()
    with Publisher("job", dir=tmp_path / "train0") as begun_again:
        assert (begun_again.store.folder / "pulled.json").exists()


def test_differences_cross_instead_of_chunks_and_give_the_same_bytes(tmp_path):
    with Both(tmp_path, 2, 2, delta=True) as both:
        first = both.publish(1)
        at_once(both.pullers)
        changed = weights(1)
        changed["a"][::100] ^= np.uint16(1)
        made = both.publish(2, changed)
        assert 0 < made.delta_bytes < first.bytes / 20
        found = at_once(both.pullers)
        assert {digest(one.path) for one in found} == {digest(made.path)} != {digest(first.path)}
        assert sum(one.slow_bytes for one in found) < first.bytes / 10
        same = both.publish(3, changed)
        assert same.delta_bytes == 0
        assert {digest(one.path) for one in at_once(both.pullers)} == {digest(same.path)}


def test_a_host_without_the_base_fetches_all_the_bytes_beside_one_that_has_it(tmp_path):
    with Both(tmp_path, 1, 2, delta=True) as both:
        both.publish(1)
        at_once(both.pullers[:1])
        changed = weights(1)
        changed["a"][::100] ^= np.uint16(1)
        made = both.publish(2, changed)
        found = at_once(both.pullers)
        assert {digest(one.path) for one in found} == {digest(made.path)}


def changed_by(made, step):
    """The words of version 1, of which some hundredths change with each step."""
    made["a"][step::100] ^= np.uint16(1)
    return made


def test_differences_are_pulled_to_their_end_while_newer_versions_are_published(tmp_path, monkeypatch):
    monkeypatch.setattr("rollmuxd_weights.core.pull.MOST_CHUNKS", 1)
    tensors = weights(1)
    with Both(tmp_path, 1, 1, delta=True) as both:
        (publisher,), (puller,) = both.trainers, both.pullers
        size = both.publish(1, tensors).bytes
        puller.pull()
        both.publish(2, changed_by(tensors, 2))
        for step in (3, 4, 5):
            newer = []

            def publishes(came, step=step, newer=newer):
                if not newer:
                    newer.append(publisher.publish(changed_by(tensors, step), step))

            puller.on_chunk = publishes
            found = puller.pull()
            assert (found.identity.version, found.slow_bytes < size / 10) == (step - 1, True)
            (made,) = newer
        puller.on_chunk = None
        assert digest(puller.pull().path) == digest(made.path)


@pytest.mark.parametrize("delta", [False, True])
def test_a_pull_that_takes_longer_than_many_versions_are_apart_ends_while_no_host_has_its_version(
    tmp_path, monkeypatch, delta
):
    monkeypatch.setattr("rollmuxd_weights.core.pull.MOST_CHUNKS", 1)
    monkeypatch.setattr("rollmuxd_weights.publish._PULLED_S", PATIENCE_S)
    tensors = weights(1)
    with Both(tmp_path, 1, 1, delta=delta) as both:
        (publisher,), (puller,) = both.trainers, both.pullers
        both.publish(1, tensors)
        made = []

        def publishes(came):
            if len(made) < 20:  # of 25 chunks: none is published while the pull ends
                made.append(publisher.publish(changed_by(tensors, 2 + len(made)), 2 + len(made)))
                assert len(publisher.store.whole()) == 2

        puller.on_chunk = publishes
        found = puller.pull()
        assert found.identity == parse("0.0.0.1")
        assert len(made) == 20
        publisher.wait_pulled(found.identity, hosts=1, timeout_s=PATIENCE_S)
        puller.on_chunk = None
        found = puller.pull()
        assert digest(found.path) == digest(made[-1].path)
        assert (found.slow_bytes < made[-1].bytes / 2) == delta


def test_a_version_that_no_host_asks_for_any_more_or_that_one_has_is_not_kept(tmp_path, monkeypatch):
    with Both(tmp_path, 1, 1) as both:
        (publisher,), (puller,) = both.trainers, both.pullers
        steps = lambda: [one.version for one in publisher.store.whole()]
        both.publish(1)
        asked(both.hosts["trainers"]["train0"][0], "/weights/0.0.0.1/bytes", Range="bytes=0-9")
        both.publish(2)
        both.publish(3)
        assert steps() == [1, 3]
        monkeypatch.setattr("rollmuxd_weights.publish._PULLED_S", 0.0)
        both.publish(4)
        assert steps() == [3, 4]
        monkeypatch.setattr("rollmuxd_weights.publish._PULLED_S", PATIENCE_S)
        made = puller.pull()
        publisher.wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)
        both.publish(5)
        both.publish(6)
        assert steps() == [5, 6]


def test_a_pull_of_the_newest_ends_even_if_the_trainer_has_not_heard_that_the_one_before_is_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("rollmuxd_weights.core.pull.MOST_CHUNKS", 1)
    monkeypatch.setattr("rollmuxd_weights.publish._PULLED_S", PATIENCE_S)
    monkeypatch.setattr(Puller, "_report", lambda *asked: False)
    with Both(tmp_path, 1, 1) as both:
        (puller,) = both.pullers
        both.publish(1)
        puller.pull()
        both.publish(2)
        newer = []
        puller.on_chunk = lambda came: newer or newer.append(both.publish(3))
        assert puller.pull().identity == parse("0.0.0.2")
        assert puller.pull().identity == parse("0.0.0.3")


def test_a_puller_says_that_the_version_it_pulled_was_dropped_and_goes_on_with_the_newer_one(tmp_path, monkeypatch):
    monkeypatch.setattr("rollmuxd_weights.core.pull.MOST_CHUNKS", 1)
    monkeypatch.setattr("rollmuxd_weights.publish._PULLED_S", 0.0)
    with Both(tmp_path, 1, 1) as both:
        (puller,) = both.pullers
        both.publish(1)

        def drops(came):
            puller.on_chunk = waits
            both.publish(2)
            both.publish(3)

        def waits(came):
            puller.on_chunk = None
            until(
                "it is said",
                lambda: "0.0.0.1 was not whole here" in status("job", read(both.hosts), KEY)["roll0"]["error"],
            )

        puller.on_chunk = drops
        puller.start()
        assert puller.ready(3, PATIENCE_S)
        until("it is over", lambda: not status("job", read(both.hosts), KEY)["roll0"]["error"])


def at_once(pullers):
    """Pull on all of them at the same time."""
    found = [None] * len(pullers)

    def one(place, puller):
        found[place] = puller.pull(wait_s=PATIENCE_S)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(pullers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(found), [one.failure for one in pullers]
    return found


# ---- what a loop is told -----------------------------------------------------------------------------------------


def test_a_version_that_is_past_is_stale_and_one_that_does_not_come_is_incomplete(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        for step in (1, 2, 3):
            both.publish(step)
            both.pullers[0].pull()
        assert both.pullers[0].ready(3, 0) == both.pullers[0].ready(3, PATIENCE_S)
        with pytest.raises(Stale, match=r"0\.0\.0\.3 is here, which is newer"):
            both.pullers[0].ready(1, 0)
        with pytest.raises(Incomplete, match="rollmuxd weights status") as raised:
            both.pullers[0].ready(4, 0)
        assert raised.value.ranges == []


@pytest.mark.parametrize("puller_too", [False, True])
def test_pullers_and_trainer_say_that_a_new_run_is_needed_where_the_trainers_store_was_emptied(tmp_path, puller_too):
    with Both(tmp_path, 1, 1) as both:
        (trainer,), (puller,) = both.trainers, both.pullers
        puller.start()
        made = both.publish(50)
        trainer.wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)
        trainer.close()
        for path in (tmp_path / "train0").iterdir():
            path.unlink()
        trainer = both.trainer("train0")
        if puller_too:
            puller.close()
            puller = both.puller("roll0")
            puller.start()
        made = trainer.publish(weights(1), 1)
        with pytest.raises(Older, match=r"roll0 has version 0\.0\.0\.50, and the newest one here is 0\.0\.0\.1"):
            trainer.wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)
        until("status says why", lambda: "a new run: run=1" in status("job", read(both.hosts), KEY)["roll0"]["error"])
        with pytest.raises(Stale, match="give the publishers a new run"):
            puller.ready(1, 0)
        trainer.close()
        again = both.trainer("train0", run=1)
        made = again.publish(weights(1), 1)
        again.wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)
        assert digest(puller.ready(1, 0)) == digest(made.path)


def test_a_report_that_was_lost_is_made_again_by_the_next_puller_and_until_the_trainer_answers(tmp_path, monkeypatch):
    taken, report = [], Puller._report
    monkeypatch.setattr(Puller, "_report", lambda *asked: taken.append(report(*asked)) or taken[-1])
    with Both(tmp_path, 1, 1) as both:
        made = both.publish(1)
        both.pullers[0].pull()
        both.pullers[0].close()
        (tmp_path / "train0" / "pulled.json").unlink()  # as if the puller had been killed before it told it
        both.trainers[0].close()
        both.puller("roll0")
        until("the trainer that is away was told in vain", lambda: False in taken)
        both.trainer("train0").wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)


def test_a_run_that_begins_again_is_waited_for_by_its_identity_and_not_by_the_step(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        (puller,) = both.pullers
        for step in (1, 2):
            old = both.publish(step, fence="1.4")
            puller.pull()
        with pytest.raises(Incomplete, match=r"0\.1\.9\.2"):
            puller.ready(2, 0, fence="1.9")
        with pytest.raises(Incomplete):
            puller.ready(1, 0, run=1)
        assert puller.ready(old.identity, 0) == puller.ready(2, 0, fence="1.4") == puller.ready(2, 0)
        made = both.publish(1, fence="1.9")
        puller.pull()
        assert digest(puller.ready(1, 0, fence="1.9")) == digest(made.path)
        with pytest.raises(Stale, match=r"0\.1\.9\.1 is here"):
            puller.ready(1, 0, fence="1.4")


def test_a_host_whose_trainers_do_not_answer_gets_a_version_from_its_peers(tmp_path):
    with Both(tmp_path, 1, 2) as both:
        for step in (1, 2):
            made = both.publish(step)
            both.pullers[0].pull()
        both.trainers[0].close()
        found = both.pullers[1].pull()
        assert (found.identity, found.slow_bytes) == (made.identity, 0)
        assert digest(found.path) == digest(made.path)
        assert both.pullers[1].pull() is None


def test_a_host_behind_a_dead_line_pulls_beside_its_peers_and_the_trainers_hear_that_it_has_the_version(tmp_path):
    with Both(tmp_path, 2, 2) as both:
        both.pullers[1].close()
        behind = both.puller("roll1", {**both.hosts, "trainers": loopback(2, 1)["trainers"]})
        begun = lambda: list((tmp_path / "roll1").glob("*.part"))
        both.pullers[0].on_chunk = lambda came: until("the host behind the dead line pulls, too", begun)
        behind.start()
        made = both.publish(1)
        found = both.pullers[0].pull(wait_s=PATIENCE_S)
        assert digest(behind.ready(1, PATIENCE_S)) == digest(found.path) == digest(made.path)
        for trainer in both.trainers:
            trainer.wait_pulled(made.identity, hosts=2, timeout_s=PATIENCE_S)


def test_a_pull_that_nothing_comes_of_names_the_bytes_and_leaves_the_version_before(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        before = both.publish(1)
        both.pullers[0].pull()
        made = both.publish(2)
        # The trainer still has its manifest, and not its bytes any more.
        made.path.unlink()
        both.pullers[0].give_up_s = 0.5
        with pytest.raises(Incomplete, match="the version before is still there") as raised:
            both.pullers[0].pull()
        assert raised.value.ranges == [(0, made.bytes)]
        with pytest.raises(Incomplete) as raised:
            both.pullers[0].ready(2, 0)
        assert raised.value.ranges == [(0, made.bytes)]
        assert digest(both.pullers[0].ready(1, 0)) == digest(before.path)


def test_a_publish_that_does_not_fit_writes_nothing_and_says_how_to_mend_it(tmp_path):
    with Both(tmp_path, 1, 1, ram_gb=0.0005) as both:
        with pytest.raises(NoRoom, match="raise it, and the job's ram_gb"):
            both.publish(1)
        assert not [path for path in (tmp_path / "train0").iterdir() if path.name != "lock"]


@pytest.mark.parametrize("ram_gb", [-1, 0, "40", float("nan"), True])
def test_room_that_is_no_number_of_gigabytes_is_refused_at_the_start(tmp_path, ram_gb):
    with pytest.raises(ValueError, match=re.escape(f"ram_gb={ram_gb!r}: gigabytes, above 0")):
        Publisher("job", dir=tmp_path, ram_gb=ram_gb)


def test_what_waits_where_nothing_was_ever_pulled_is_told_to_start_a_puller(tmp_path):
    with pytest.raises(
        Incomplete, match=f"nothing was ever pulled to {tmp_path}: start `rollmuxd weights pull job` on"
    ):
        Puller("job", dir=tmp_path).ready(1, 0)


def test_a_hosts_file_that_is_not_there_is_said_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"hosts\.toml: there is no such file; it has \[trainers\] and \[rollouts\]"):
        Publisher("job", tmp_path / "hosts.toml", dir=tmp_path)


@pytest.fixture
def small(tmp_path):
    """A file system in memory, of 2 MiB."""
    (tmp_path / "small").mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path / "small")]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield tmp_path / "small"
    subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


def test_a_publish_that_fills_the_file_system_leaves_nothing_and_the_next_one_that_fits_is_published(
    small, monkeypatch
):
    with Publisher("job", dir=small / "t", chunk=CHUNK, delta=True) as publisher:
        made = publisher.publish(weights(1, 380_000), 1)
        with monkeypatch.context() as patch, pytest.raises(NoRoom, match="became full"):
            patch.setattr(Store, "free_bytes", lambda _: 1 << 40)  # as if another user had filled it since
            publisher.publish(weights(2, 800_000), 2)
        assert sorted(path.name for path in (small / "t").iterdir()) == [
            "0.0.0.1.json", "0.0.0.1.safetensors", "current", "lock",
        ]  # fmt: skip
        same = publisher.publish(weights(1, 380_000), 3)
        assert same.delta_bytes == 0
        # Files of versions that are past make room: the draft and the differences of a publisher that was killed, too.
        publisher.store.path(parse("0.0.0.2"), "draft").write_bytes(bytes(300_000))
        publisher.publish(weights(1, 380_000), 4)
        assert digest(publisher.store.path(parse("0.0.0.4"))) == digest(same.path) != made.path


def test_differences_that_would_take_the_room_that_is_left_are_not_made(small):
    changed = weights(1, 300_000)
    changed["a"][::5] ^= np.uint16(1)
    with Publisher("job", dir=small / "t", chunk=CHUNK, delta=True) as publisher:
        first = publisher.publish(weights(1, 300_000), 1)
        publisher.publish(weights(1, 300_000), 2)
        left = os.statvfs(small).f_bavail * 4096
        (small / "other").write_bytes(bytes(left - 100_000))
        made = publisher.publish(changed, 3)
        assert (made.delta_bytes, made.bytes) == (None, first.bytes)
        assert not list((small / "t").glob("0.0.0.3.delta"))
        (small / "other").unlink()
        changed["a"][::5] ^= np.uint16(1)
        assert 100_000 < publisher.publish(changed, 4).delta_bytes < first.bytes / 2


def test_a_pull_whose_differences_do_not_fit_is_not_begun(tmp_path, small):
    changed = weights(1, 400_000)
    changed["a"][::5] ^= np.uint16(1)
    with Both(tmp_path, 1, 1, delta=True) as both:
        both.pullers[0].close()
        puller = both.puller("roll0", dir=small / "r")
        both.publish(1, weights(1, 400_000))
        puller.pull()
        made = both.publish(2, changed)
        (small / "other").write_bytes(bytes(os.statvfs(small).f_bavail * 4096 - made.bytes - made.delta_bytes // 2))
        with pytest.raises(Incomplete, match=f"takes {made.bytes + made.delta_bytes} bytes"):
            puller.pull()
        (small / "other").unlink()
        assert digest(puller.pull().path) == digest(made.path)


def test_a_pull_that_fills_the_file_system_ends_with_a_sentence_and_is_not_begun_again_in_vain(tmp_path, small):
    with Both(tmp_path, 1, 1) as both:
        both.pullers[0].close()
        puller = both.puller("roll0", dir=small / "r")
        both.publish(1, weights(1, 600_000))
        chunks = []

        def fills(came):
            if not chunks:  # another user of the file system comes meanwhile
                (small / "other").write_bytes(bytes(os.statvfs(small).f_bavail * 4096 - 5 * CHUNK))
            chunks.append(came.chunk)

        puller.on_chunk = fills
        with pytest.raises(Incomplete, match=r"cannot be written to .* No space left"):
            puller.pull()
        with pytest.raises(
            Incomplete, match=r"make that file system larger, or name another folder with dir= \(--dir\)"
        ):
            puller.pull()
        puller.start()
        until("status says why", lambda: "system larger" in status("job", read(both.hosts), KEY)["roll0"]["error"])
        (small / "other").unlink()
        puller.on_chunk = None
        assert digest(puller.ready(1, PATIENCE_S))


def test_what_killed_processes_left_is_removed_and_what_an_engine_loads_from_is_not(tmp_path):
    store = Store(tmp_path / "r")
    left = [store.folder / "rollmuxd-weights-killed" / "config.json", store.folder / ".current.7.tmp"]
    left[0].parent.mkdir()
    for path in left:
        path.write_text("left")
    os.utime(left[1], (0, 0))
    (store.folder / ".pulled.json.8.tmp").write_text("is being written")
    with store.shown() as loads, store.alone():
        assert loads.exists()
        assert not left[0].parent.exists()
        assert not left[1].exists()
        assert (store.folder / ".pulled.json.8.tmp").exists()


def test_two_versions_are_kept_and_no_third_is_ever_there(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        for step in range(1, 5):
            both.publish(step)
            both.pullers[0].pull()
            for folder in ("train0", "roll0"):
                assert len(list((tmp_path / folder).glob("*.safetensors"))) == min(step, 2)


def test_differences_take_a_third_version_at_most_and_ram_gb_counts_it(tmp_path):
    with Both(tmp_path, 1, 1, delta=True, ram_gb=0.0013) as both:
        tensors = weights(1)
        for step, every in enumerate((1, 4, 4, 5, 1, 1), 1):  # (each word, every fourth and so on)
            tensors["a"][::every] += np.uint16(1 + step)
            made = both.publish(step, tensors)
            assert (made.delta_bytes is None) == (every == 1), "differences of all words are not worth their room"
            at_once(both.pullers)
            for folder in ("train0", "roll0"):
                files = list((tmp_path / folder).glob("[0-9]*.*.*.*.*"))  # (no small file that is being written)
                assert sum(path.stat().st_size for path in files if path.suffix != ".json") <= 3 * made.bytes
        assert digest(made.path) == digest(both.pullers[0].ready(6, 0))
    less = Publisher("job", dir=tmp_path / "less", delta=True, ram_gb=0.001)
    with less, pytest.raises(NoRoom, match="two versions and their differences take up to"):
        less.publish(weights(1), 1)


def test_a_version_keeps_its_differences_after_a_publish_that_failed(tmp_path, monkeypatch):
    with Both(tmp_path, 1, 1, delta=True) as both:
        (publisher,), (puller,) = both.trainers, both.pullers
        tensors = weights(1)
        first = both.publish(1, tensors)
        puller.pull()
        # Until it is told, version 1 counts as being pulled, and would be kept in place of version 2.
        publisher.wait_pulled(first.identity, hosts=1, timeout_s=PATIENCE_S)
        made = both.publish(2, changed_by(tensors, 2))
        monkeypatch.setattr(publisher, "_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publisher.publish(weights(3), 3)
        found = puller.pull()
        assert (found.identity, found.slow_bytes) == (made.identity, made.delta_bytes)
        assert digest(found.path) == digest(made.path)


def test_one_process_writes_a_store(tmp_path):
    with (
        Both(tmp_path, 1, 1),
        pytest.raises(Busy, match="need a folder each: name one with dir="),
    ):
        Publisher("job", dir=tmp_path / "train0")


def test_an_address_that_is_taken_is_named(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        taken = both.hosts["trainers"]["train0"][0]
        with pytest.raises(OSError, match=f"nothing can listen at {re.escape(taken)} here: Address already in use"):
            both.trainer("train0", dir=tmp_path / "other")


def test_a_host_gives_nothing_of_its_job_to_one_that_asks_for_another(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        both.publish(1)
        both.pullers[0].close()
        with contextlib.closing(Puller("typo", both.hosts, me="roll0", dir=tmp_path / "typo", key=KEY)) as typo:
            assert typo.pull(wait_s=0.1) is None
            assert "serves the weights of job 'job', not of 'typo'" in str(typo.failure)
            found = status("job", read(both.hosts), KEY)
            assert found["train0"]["id"] == "0.0.0.1"
            assert "job 'typo', not of 'job'" in found["roll0"]["error"]


@pytest.mark.parametrize(
    ("nothing", "said"),
    [
        ({}, r"such as model\.state_dict\(\)"), (object(), r"such as model\.state_dict\(\)"),
        (["a"], r"such as model\.state_dict\(\)"), ({"a": [1, 2]}, "tensor a is a list: give torch tensors or numpy"),
        ({"a": np.array(["x"])}, "tensor a is of type <U1"),
    ],
)  # fmt: skip
def test_what_has_no_tensors_by_name_is_not_published(tmp_path, nothing, said):
    with Publisher("job", dir=tmp_path / "t") as publisher:
        with pytest.raises(ValueError, match=said):
            publisher.publish(nothing, 1)
        assert publisher.store.current() is None


@pytest.mark.skipif(os.getuid() != 0, reason="a folder is given to another user: root only")
def test_a_folder_within_another_users_folder_in_shared_memory_is_refused(tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "theirs").mkdir()
    os.chown(shared / "theirs", 12345, 12345)
    with pytest.raises(PermissionError, match="theirs is not a folder of this user's"):
        Store(shared / "theirs" / "job")
    (shared / "mine").mkdir()
    os.chown(shared, 12345, 12345)
    monkeypatch.chdir(shared)  # where another user's folder is the working one, its name is not to be looked up in it
    assert Store(Path("mine")).folder == shared / "mine"
    shared.chmod(0o755)  # where root alone may make folders, theirs was made on purpose
    Store(shared / "theirs" / "job")


def test_a_folder_of_another_kind_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user's"):
        Store(tmp_path / "here")
    with pytest.raises(ValueError, match="the job's name"):
        Publisher("../../etc")


# ---- which version -----------------------------------------------------------------------------------------------


def test_an_older_fence_or_step_is_refused_by_publisher_and_puller(tmp_path):
    with Both(tmp_path, 2, 1) as both:
        first, second = both.trainers
        made = first.publish(weights(5), 5, fence="1.18")
        both.pullers[0].pull()
        for step, fence in ((5, "1.18"), (4, "1.18"), (9, "1.17"), (9, None)):
            with pytest.raises(Older, match="not newer"):
                first.publish(weights(step), step, fence=fence)
        # A trainer that has lost its slot, and does not know it, publishes on a host of its own.
        second.publish(weights(9), 9, fence="1.17")
        first.close()
        assert both.pullers[0].pull() is None
        assert digest(both.pullers[0].ready(5, 0)) == digest(made.path)


@pytest.mark.slow
def test_fence_every_file_that_is_shown_is_of_one_version_whatever_is_published_meanwhile(tmp_path):
    """200 publishes while two hosts pull and a reader reads what they show."""
    shown, over = set(), threading.Event()
    with Both(tmp_path, 1, 2, delta=True) as both:
        made = {}

        def read_on(folder):
            while not over.wait(0.002):  # (else readers would have the processor, and not who publishes)
                with contextlib.suppress(OSError):
                    name = os.readlink(folder / "current")
                    with (folder / name).open("rb") as file:
                        found = hashlib.file_digest(file, "sha256").hexdigest()
                    shown.add((parse(name.removesuffix(".safetensors")).version, found))

        readers = [threading.Thread(target=read_on, args=(tmp_path / host,)) for host in both.hosts["rollouts"]]
        for one in both.pullers:
            one.start()
        for one in readers:
            one.start()
        tensors = weights(0, 40_000)
        for step in range(1, 201):
            tensors["a"][:: 1 + step % 7] += np.uint16(step)
            published = both.publish(step, tensors)
            made[step] = digest(published.path)
            if step % 50 == 0:  # (else a slow machine might never pull a whole one)
                for one in both.pullers:
                    one.ready(step, PATIENCE_S)
        for one in both.pullers:
            assert digest(one.ready(200, PATIENCE_S)) == made[200]
        over.set()
        for one in readers:
            one.join()
    assert shown <= set(made.items()), "a file that is shown has the bytes of the version that it is named after"
    assert len(shown) >= 4


# ---- killed ------------------------------------------------------------------------------------------------------

_PROGRAM = """
import json, sys, time
import numpy as np
from rollmuxd_weights import Older, Publisher, Puller

def weights(version, words):
    return {"a": np.random.default_rng(version).integers(0, 1 << 16, words, dtype=np.uint16), "b": np.arange(7.0)}

config = json.loads(sys.argv[1])
given = dict(me=config["me"], dir=config["dir"], key=config["key"])
if config["me"] in config["hosts"]["trainers"]:
    with Publisher("job", config["hosts"], chunk=config["chunk"], delta=True, **given) as publisher:
        print("started", flush=True)
        pulled = False
        if config["version"]:
            publisher.publish(weights(config["version"] - 1, config["words"]), config["version"] - 1)
            publisher.copy(weights(config["version"], config["words"]), config["version"])
            print("copied", flush=True)
            time.sleep(3600)
        while True:
            # All trainers publish the same: the version that the clock says.
            version = int(4 * min(time.time(), config["stop"] or time.time()))
            try:
                publisher.publish(weights(version, config["words"]), version)
            except Older:
                time.sleep(0.02)
            current = publisher.store.current()
            if config["stop"] and not pulled and current.version == int(4 * config["stop"]):
                publisher.wait_pulled(current, hosts=len(config["hosts"]["rollouts"]))
                print("pulled", flush=True)
                pulled = True
else:
    def slowly(came):
        print("chunk", came.chunk, flush=True)
        time.sleep(config["pause"])
    with Puller("job", config["hosts"], on_chunk=slowly if config["pause"] else None, **given) as puller:
        print("started", flush=True)
        if config["pause"]:
            puller.ready(config["version"])
            print("ready", flush=True)
        time.sleep(3600)
"""


def started(hosts, host, folder, **config):
    told = {
        "hosts": hosts,
        "me": host,
        "dir": str(folder / host),
        "key": KEY,
        "chunk": CHUNK,
        "pause": 0,
        "version": 0,
        **config,
    }
    process = forked.Popen([sys.executable, "-c", _PROGRAM, json.dumps(told)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    return process


def ended(process):
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.e2e
def test_killed_publishers_and_pullers_end_whole_and_identical(tmp_path):
    """50 times kill -9 at random moments; then all hosts show the last version, and it is right."""
    draw = random.Random(11)
    hosts = loopback(2, 3)
    names = [*hosts["trainers"], *hosts["rollouts"]]
    running = {name: started(hosts, name, tmp_path, words=200_000, stop=0) for name in names}
    seen = set()
    try:
        for _ in range(50):
            time.sleep(draw.uniform(0, 0.3))  # (the moment of the kill)
            name = draw.choice(names)
            ended(running[name])
            current = Store(tmp_path / name).current()
            if current is not None:
                path = Store(tmp_path / name).path(current)
                assert digest(path) == expected(tmp_path, current.version, 200_000), (
                    f"{path} is shown, and is not whole"
                )
                seen.add(current.version)
            running[name] = started(hosts, name, tmp_path, words=200_000, stop=0)
        for name in hosts["trainers"]:  # all, before the first begins: none publishes beyond `stop`
            ended(running[name])
        stop = time.time() + 1
        for name in hosts["trainers"]:
            running[name] = started(hosts, name, tmp_path, words=200_000, stop=stop)
        last = int(stop * 4)
        for name in hosts["rollouts"]:
            path = Puller("job", dir=tmp_path / name).ready(last, PATIENCE_S)
            assert digest(path) == expected(tmp_path, last, 200_000)
        for name in hosts["trainers"]:
            assert running[name].stdout.readline() == "pulled\n", "each trainer heard of each puller"
    finally:
        for process in running.values():
            ended(process)
    assert len(seen) > 5


def expected(folder, version, words):
    with Publisher("job", dir=folder / "expected" / str(version), chunk=CHUNK) as publisher:
        known = publisher.store.whole()
        return digest(
            publisher.store.path(known[0]) if known else publisher.publish(weights(version, words), version).path
        )


@pytest.mark.e2e
def test_a_publisher_killed_between_copy_and_sums_has_shown_nothing_and_publishes_the_version_again(tmp_path):
    hosts = loopback(1, 1)
    with contextlib.ExitStack() as stack:
        process = started(hosts, "train0", tmp_path, version=2, words=200_000)
        stack.callback(ended, process)
        puller = Puller("job", hosts, me="roll0", dir=tmp_path / "roll0", key=KEY)
        stack.callback(puller.close)
        assert process.stdout.readline() == "copied\n"
        assert digest(puller.pull(wait_s=PATIENCE_S).path) == expected(tmp_path, 1, 200_000), "the copy is not shown"
        ended(process)
        assert list((tmp_path / "train0").glob("*.draft"))
        with Publisher("job", hosts, me="train0", dir=tmp_path / "train0", key=KEY, chunk=CHUNK) as publisher:
            assert not list((tmp_path / "train0").glob("*.draft"))
            assert publisher.store.current().version == 1
            publisher.publish(weights(2), 2)
            assert digest(puller.pull(wait_s=PATIENCE_S).path) == expected(tmp_path, 2, 200_000)


@pytest.mark.e2e
def test_a_killed_puller_fetches_again_what_was_under_way_and_no_more(tmp_path):
    hosts = loopback(1, 1)
    with Publisher("job", hosts, me="train0", dir=tmp_path / "train0", key=KEY, chunk=CHUNK) as publisher:
        made = publisher.publish(weights(1), 1)
        chunks = -(-made.bytes // CHUNK)
        process = started(hosts, "roll0", tmp_path, pause=0.05, version=1, words=0)
        for _ in range(chunks // 2):
            assert process.stdout.readline().startswith("chunk")
        ended(process)
        with contextlib.closing(Puller("job", hosts, me="roll0", dir=tmp_path / "roll0", key=KEY)) as puller:
            found = puller.pull(wait_s=PATIENCE_S)
    assert found.resumed >= chunks // 2
    assert found.slow_bytes <= (chunks - found.resumed) * CHUNK, "what was here is not fetched again"
    assert digest(found.path) == digest(made.path)


def test_what_was_damaged_while_a_puller_was_away_is_fetched_again(tmp_path):
    hosts = loopback(1, 1)
    with Publisher("job", hosts, me="train0", dir=tmp_path / "train0", key=KEY, chunk=CHUNK) as publisher:
        made = publisher.publish(weights(1), 1)
        process = started(hosts, "roll0", tmp_path, pause=0.05, version=1, words=0)
        for _ in range(4):
            process.stdout.readline()
        ended(process)
        (part,) = (tmp_path / "roll0").glob("*.part")
        with part.open("r+b") as file:
            file.write(b"damaged")
        with contextlib.closing(Puller("job", hosts, me="roll0", dir=tmp_path / "roll0", key=KEY)) as puller:
            assert digest(puller.pull(wait_s=PATIENCE_S).path) == digest(made.path)


def test_the_bytes_of_a_trainer_that_is_gone_come_from_the_others(tmp_path):
    with Both(tmp_path, 2, 2) as both:
        made = both.publish(1)
        both.trainers[1].close()
        found = at_once(both.pullers)
        assert {digest(one.path) for one in found} == {digest(made.path)}


def test_chunks_that_are_wrong_are_named_and_come_from_another_trainer(tmp_path):
    with Both(tmp_path, 2, 2) as both:
        made = both.publish(1)
        path = both.trainers[1].store.path(made.identity)
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(made.bytes // 2)
            file.write(os.urandom(made.bytes // 2))
        found = at_once(both.pullers)
        assert {digest(one.path) for one in found} == {digest(made.path)}
        assert any(both.hosts["trainers"]["train1"][0] in source for one in found for source in one.wrong)


def test_a_trainer_that_is_wrong_is_not_asked_without_pause_and_is_named_where_nothing_else_comes(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        made = both.publish(1)
        made.path.chmod(0o600)
        made.path.write_bytes(os.urandom(made.bytes))
        both.pullers[0].give_up_s = 2.0
        with pytest.raises(Incomplete, match=r"wrong or late chunks: \d+ from .* at 127\.0\.0\.1") as raised:
            both.pullers[0].pull()
        times = int(re.search(r"chunks: (\d+) from", str(raised.value))[1])
        assert 1 <= times <= 30, "a pause of 0.2 s is between two requests"


@contextlib.contextmanager
def dead_line():
    """An address whose packets are dropped: its queue of one connection is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_line_that_died_counts_as_dead_in_the_next_version_and_as_well_once_it_carries_again(tmp_path, monkeypatch):
    """(What a dead line is given: a chunk, see the tests of the core.)"""
    line, known = "train1/0-roll1/0", []
    with Both(tmp_path, 2, 2) as both, dead_line() as nothing:
        behind = {**both.hosts, "trainers": {**both.hosts["trainers"], "train1": [nothing]}}
        for step, hosts in enumerate((both.hosts, behind, both.hosts, both.hosts), 1):
            both.pullers[1].close()
            both.pullers[1] = both.puller("roll1", hosts)
            made = both.publish(step)
            known.append(both.trainers[0].store.manifest(made.identity).rates.get(line))
            with monkeypatch.context() as patch:
                # Where the line is well its host fetches its shard itself, however slow this machine is.
                patch.setattr("rollmuxd_weights.core.pull.STALL_S", 0.3 if hosts is behind else PATIENCE_S)
                patch.setattr("rollmuxd_weights.pull.PEER_TIMEOUT_S", 0.5 if hosts is behind else PATIENCE_S)
                if hosts is behind:
                    both.pullers[1].pull()
                    both.pullers[0].pull()
                else:
                    at_once(both.pullers)
            assert {digest(one.ready(made.identity, 0)) for one in both.pullers} == {digest(made.path)}
            both.trainers[0].wait_pulled(made.identity, hosts=2, timeout_s=PATIENCE_S)
    assert known[0] is None
    assert known[1] > 0
    assert known[2] == 0
    assert known[3] > 0


class BadPeer:
    """A rollout host that offers everything, and sends ``body`` instead. If that is empty it sends a byte at times."""

    def __init__(self, address, chunks, body):
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self.asked = 0
        peer = self
        over = self.over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                told, status_ = json.dumps({"log": [], "next": 0, "whole": True, "delta": True}).encode(), 200
                if self.path.endswith("/bytes"):
                    peer.asked += 1
                    begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                    told, status_ = body(end + 1 - begin), 206
                self.send_response(status_)
                self.send_header("Content-Length", str(len(told or bytes(end + 1 - begin))))
                self.end_headers()
                self.wfile.write(told)
                while not told and not over.wait(0.1):
                    self.wfile.write(b"x")

            def log_message(self, *args):
                pass

        host, _, port = address.partition(":")
        self.server = ThreadingHTTPServer((host, int(port)), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize("body", [bytes, lambda size: b""], ids=["wrong", "trickles"])
def test_a_peer_that_offers_everything_and_sends_wrong_chunks_or_a_byte_at_times_is_left_out_and_named(
    tmp_path, body, monkeypatch
):
    monkeypatch.setattr("rollmuxd_weights.pull.PEER_TIMEOUT_S", 0.5)
    with Both(tmp_path, 1, 2) as both:
        made = both.publish(1)
        both.pullers[1].close()
        address = both.hosts["rollouts"]["roll1"][0]
        with contextlib.closing(BadPeer(address, -(-made.bytes // CHUNK), body)) as peer:
            both.pullers[0].give_up_s = 20.0
            found = both.pullers[0].pull()
        assert digest(found.path) == digest(made.path)
        assert found.wrong == {f"roll1 at {address}": 2}
        assert peer.asked == 2


def test_a_line_waits_for_its_own_trainer_if_that_publishes_a_little_later(tmp_path, monkeypatch):
    """(To ask another one would slow that one's line, and the request would still be under way.)"""
    monkeypatch.setattr("rollmuxd_weights.core.pull.STALL_S", PATIENCE_S)
    with Both(tmp_path, 2, 2) as both:
        late, asked_of = both.trainers[1], []
        own = both.hosts["trainers"]["train1"][0]
        made = both.trainers[0].publish(weights(1), 1)
        fetch = Transfer._fetch

        def publishes_when_asked_a_third_time(transfer, connection, address, run, buffer, over, *, slow):
            if slow and transfer._me == "roll1":
                asked_of.append(str(address))
                if len(asked_of) == 3:
                    late.publish(weights(1), 1)
            return fetch(transfer, connection, address, run, buffer, over, slow=slow)

        monkeypatch.setattr(Transfer, "_fetch", publishes_when_asked_a_third_time)
        found = at_once(both.pullers)
        assert {digest(one.path) for one in found} == {digest(made.path)}
        assert len(asked_of) >= 3
        assert set(asked_of) == {own}


def test_a_line_asks_another_trainer_meanwhile_and_goes_back_to_its_own_once_that_has_published(tmp_path):
    with Both(tmp_path, 2, 1) as both:
        late, asked_of = both.trainers[1], []
        both.trainers[0].publish(weights(1), 1)
        fetch = Transfer._fetch

        def first_publish(transfer, connection, address, run, *more, **given):
            asked_of.append(str(address))
            if len(asked_of) == 6:
                late.publish(weights(1), 1)
            time.sleep(0.01)  # (a line of some length, so that not all has come before the other publishes)
            return fetch(transfer, connection, address, run, *more, **given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transfer, "_fetch", first_publish)
            patch.setattr("rollmuxd_weights.core.pull.MOST_CHUNKS", 1)
            patch.setattr("rollmuxd_weights.core.pull.STALL_S", 0)
            patch.setattr("rollmuxd_weights.core.pull.STALL_CHUNKS", 0)
            both.pullers[0].pull()
        own = both.hosts["trainers"]["train1"][0]
        assert asked_of[12:].count(own) > 3, asked_of


# ---- what a host answers to whom ---------------------------------------------------------------------------------


def asked(address, path, *, key=KEY, method="GET", body=None, **headers):
    host, _, port = address.partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)) as connection:
        given = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(
            method, path, body, {**given, **{name.replace("_", "-"): value for name, value in headers.items()}}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture
def serving(tmp_path):
    """A trainer with one version: where it is, and what it has."""
    with Both(tmp_path, 1, 1) as both:
        made = both.publish(1)
        (tmp_path / "secret").write_text("nobody's business")
        yield both.hosts["trainers"]["train0"][0], made


@pytest.mark.parametrize("key", ["", "another key", KEY + "x", KEY[:-1]])
def test_a_host_answers_nothing_without_the_key(serving, key):
    address, made = serving
    for path in ("/weights/current", f"/weights/{made.identity}/manifest", f"/weights/{made.identity}/bytes"):
        status_, body = asked(address, path, key=key, Range="bytes=0-9")
        assert status_ == 401
        assert b"ROLLMUX_WEIGHTS_KEY" in body


def test_without_a_key_a_host_serves_this_machine_alone(tmp_path):
    everywhere = {"trainers": {"t": ["0.0.0.0:7501"]}, "rollouts": {"r": ["127.0.0.1:7501"]}}
    with pytest.raises(ValueError, match="there is no key: set ROLLMUX_WEIGHTS_KEY"):
        Publisher("job", everywhere, me="t", dir=tmp_path / "t", key="")


@pytest.mark.parametrize(
    ("path", "range_", "status_"),
    [
        ("/weights/{id}/bytes", "bytes=0-9", 206), ("/weights/{id}/bytes", None, 416),
        ("/weights/{id}/bytes", "bytes=9-3", 416), ("/weights/{id}/bytes", "bytes=0-99999999", 416),
        ("/weights/{id}/bytes", "bytes=0-9,20-30", 416), ("/weights/{id}/bytes", "bytes=" + "9" * 30 + "-", 416),
        ("/weights/{id}/delta", "bytes=0-9", 404), ("/weights/0.0.0.9/bytes", "bytes=0-9", 404),
        ("/weights/../secret/bytes", "bytes=0-9", 404), ("/weights/../bytes", "bytes=0-9", 400),
        ("/weights/%2e%2e%2fsecret/manifest", None, 400),
        ("/weights/../../../etc/passwd", None, 404), ("/etc/passwd", None, 404), ("/weights/{id}/secret", None, 404),
        ("/weights/{id}/have?after=-5", None, 200), ("/weights/{id}/have?after=x", None, 400),
        ("/weights/current?wait_ms=x", None, 400), ("/weights/current?wait_ms=-9999999999999", None, 200),
    ],
)  # fmt: skip
def test_only_versions_and_ranges_within_them_can_be_had(serving, path, range_, status_):
    address, made = serving
    headers = {"Range": range_} if range_ else {}
    found, body = asked(address, path.format(id=made.identity), **headers)
    assert found == status_, body
    assert b"nobody's business" not in body
    if status_ == 206:
        assert body == made.path.read_bytes()[:10]


@pytest.mark.parametrize(
    ("body", "status_"),
    [
        (b'{"host": "roll0"}', 200), (b"", 404), (b"x" * (1 << 21), 404), (b"{}", 400), (b'{"host": "../x"}', 400),
        (b'{"host": "roll0", "rates": {"line": -1}}', 400), (b'{"host": "roll0", "rates": {"line": 1e99}}', 400),
        (b'{"host": "roll0", "to": "train0"}', 404),
    ],
)  # fmt: skip
def test_what_a_puller_reports_is_bounded_and_checked(serving, body, status_):
    address, made = serving
    with contextlib.suppress(ConnectionError):  # (it stops reading what is too large)
        assert asked(address, f"/weights/{made.identity}/done", method="POST", body=body)[0] == status_
    assert asked(address, "/weights/current")[0] == 200


def test_a_rollout_host_hands_a_report_on_to_trainers_of_the_hosts_file_only(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        made = both.publish(1)
        at = both.hosts["rollouts"]["roll0"][0]

        def handed(to):
            body = json.dumps({"host": "roll7", "to": to})
            return asked(at, f"/weights/{made.identity}/done", method="POST", body=body)

        assert handed("train0")[0] == 200
        assert both.trainers[0].pulled_by(made.identity) == ["roll7"]
        assert handed("roll0")[0] == 400
        both.trainers[0].close()
        status_, body = handed("train0")
        assert (status_, b"trainer train0 does not answer" in body) == (502, True)


def test_noise_on_the_line_ends_that_connection_only(serving):
    address, _ = serving
    host, _, port = address.partition(":")
    for noise in (b"\x00" * 100, b"GET " + b"x" * 100_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as line, contextlib.suppress(OSError):
            line.sendall(noise)
            line.shutdown(socket.SHUT_WR)
            line.recv(1000)
    assert asked(address, "/weights/current")[0] == 200


def test_a_connection_that_sends_its_request_byte_by_byte_is_ended(serving, monkeypatch):
    monkeypatch.setattr("rollmuxd_weights.serve.IDLE_S", 0.5)
    address, _ = serving
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as line:

        def is_ended():
            try:
                line.sendall(b"G")
            except OSError:
                return True
            return False

        until("it is ended", is_ended)
    assert asked(address, "/weights/current")[0] == 200


class Liar:
    """A trainer that answers each path with what it is told to."""

    def __init__(self, answers):
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = next((told for part, told in answers.items() if part in self.path), b"{}")
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize(
    "answers",
    [
        {"current": b'{"id": "../../x"}'}, {"current": b"[]"}, {"current": b"\xff"},
        {"current": b'{"id": "0.0.0.1"}', "manifest": b"{}"},
        {"current": b'{"id": "0.0.0.1"}', "manifest": b'{"id":"0.0.0.2","bytes":2000,"chunk":1024,"crc":[1,2]}'},
        {"current": b'{"id": "0.0.0.1"}', "manifest": b'{"id":"0.0.0.1","bytes":999999999999,"chunk":1024,"crc":[1]}'},
    ],
)  # fmt: skip
def test_a_trainer_that_lies_about_a_version_changes_nothing_here(tmp_path, answers):
    with contextlib.closing(Liar(answers)) as liar:
        hosts = {**loopback(1, 1), "trainers": {"t": [liar.address]}}
        with contextlib.closing(Puller("job", hosts, me="roll0", dir=tmp_path / "r", key="")) as puller:
            assert puller.pull() is None
            assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["lock"]


def test_a_version_that_does_not_fit_is_refused_before_it_is_begun(tmp_path):
    size = 1 << 45
    told = {"id": "0.0.0.1", "bytes": size, "chunk": 64 << 20, "crc": [0] * (size // (64 << 20))}
    with contextlib.closing(Liar({"current": b'{"id": "0.0.0.1"}', "manifest": json.dumps(told).encode()})) as liar:
        hosts = {**loopback(1, 1), "trainers": {"t": [liar.address]}}
        with contextlib.closing(Puller("job", hosts, me="roll0", dir=tmp_path / "r", key="")) as puller:
            with pytest.raises(Incomplete, match="make that file system larger"):
                puller.pull()
            assert not list((tmp_path / "r").glob("*.part"))


# ---- hosts files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"\[trainers\] is missing"), ({"trainers": {"t": ["h:1"]}}, r"\[rollouts\] is missing"),
        ({"trainers": {"t": []}, "rollouts": {"r": ["h:1"]}}, "a list of addresses"),
        ({"trainers": {"t": ["h"]}, "rollouts": {"r": ["h:1"]}}, "no address"),
        ({"trainers": {"t": ["h:99999"]}, "rollouts": {"r": ["h:1"]}}, "no address"),
        ({"trainers": {"t": ["h"]}, "rollouts": {"r": ["h:1"]}}, r"hosts: \[trainers\] t: 'h' is no address"),
        ({"trainers": {"t": ["h:0"]}, "rollouts": {"r": ["h:1"]}}, "no address; .* port 1 to 65535"),
        ({"trainers": {"t": ["h:1"]}, "rollouts": {"r": ["h:1"]}}, "h:1 is an address of t and of r"),
        ({"trainers": {"../t": ["h:1"]}, "rollouts": {"r": ["h:1"]}}, "a host's name"),
        ({"trainers": {"t": ["h:1"]}, "rollouts": {"t": ["h:2"]}}, "in .trainers. and in"),
        ({"trainer": {}}, "'trainer' is unknown"),
    ],
)  # fmt: skip
def test_a_hosts_file_that_cannot_be_says_what_is_wrong(given, said):
    with pytest.raises(ValueError, match=said):
        read(given)


def test_status_shows_every_host_and_what_is_wrong_with_it(tmp_path):
    with Both(tmp_path, 1, 2) as both:
        made = both.publish(1)
        both.pullers[0].pull()
        both.pullers[1].close()
        found = status("job", read(both.hosts), KEY)
    assert found["train0"]["id"] == found["roll0"]["id"] == str(made.identity)
    assert "refused" in found["roll1"]["error"]
    assert [one["answers"] for one in found.values()] == [True, True, False]


def test_status_of_hosts_that_do_not_answer_ends_with_an_error(tmp_path):
    (tmp_path / "hosts.toml").write_text(as_toml(loopback(1, 1)))
    ran = CliRunner().invoke(command.weights, ["status", "job", "--hosts", str(tmp_path / "hosts.toml")])
    assert ran.exit_code == 1
    assert "none of the 2 hosts" in ran.output


def as_toml(hosts):
    """A hosts file."""
    sides = (
        f"[{side}]\n" + "".join(f"{host} = {json.dumps(at)}\n" for host, at in of.items()) for side, of in hosts.items()
    )
    return "\n".join(sides)


def test_a_pull_once_whose_version_was_dropped_ends_with_one_line(tmp_path, monkeypatch):
    def superseded(puller, wait_s):
        raise Superseded("version 0.0.0.1 was dropped")

    monkeypatch.setattr(Puller, "pull", superseded)
    (tmp_path / "hosts.toml").write_text(as_toml(loopback(1, 1)))
    words = ["pull", "job", "--hosts", tmp_path / "hosts.toml", "--host", "roll0", "--dir", tmp_path / "r", "--once"]
    ran = CliRunner().invoke(command.weights, list(map(str, words)))
    assert ran.exit_code == 1
    assert ran.output.splitlines()[1:] == ["rollmuxd: version 0.0.0.1 was dropped"]


def test_a_host_that_ends_before_it_answers_is_told_as_that():
    with socket.create_server(("127.0.0.1", 0)) as listens:

        def ends():
            with listens.accept()[0] as connection:
                connection.recv(1000)

        threading.Thread(target=ends, daemon=True).start()
        at = Address("127.0.0.1", listens.getsockname()[1])
        with pytest.raises(ConnectionError, match="closed the connection without an answer: it has just ended"):
            ask(at, "/weights/current", KEY, "job")


def test_a_line_end_after_the_key_is_not_part_of_it_and_a_key_that_cannot_be_is_not_shown(tmp_path, monkeypatch):
    with Both(tmp_path, 1, 1, key=f"{KEY}\r\n") as both:
        monkeypatch.setenv("ROLLMUX_WEIGHTS_KEY", f"{KEY}\n")
        made = both.publish(1)
        both.pullers[0].close()
        with contextlib.closing(both.puller("roll0", key=None)) as puller:
            assert puller.pull().identity == made.identity
    for wrong in ("secret\nword", "secret\x7fword", "secret-wörd"):
        with pytest.raises(ValueError, match="not printable ASCII") as raised:
            Puller("job", both.hosts, me="roll0", dir=tmp_path / "roll0", key=wrong)
        assert "secret" not in str(raised.value)


def test_a_wait_ends_where_all_hosts_have_gone_on_to_a_version_of_another_trainer(tmp_path):
    with Both(tmp_path, 2, 1) as both:
        made = both.publish(1)
        first, second = both.trainers
        both.pullers[0].pull()
        first.wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)
        newer = second.publish(weights(2), 2)
        both.pullers[0].pull()
        until("it is told", lambda: first.pulled_by(newer.identity))
        first.wait_pulled(made.identity, hosts=1, timeout_s=PATIENCE_S)


# ---- into an engine -----------------------------------------------------------------------------------------------


def answering(answers):
    """An engine's server: what it is asked, and an answer for each path."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked_of_it = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, query = self.path.partition("?")
            asked_of_it.append((path, query, json.loads(body or b"null")))
            told = answers.get(path, (200, {}))
            status_, answer = told(json.loads(body)) if callable(told) else told
            packed = json.dumps(answer).encode()
            self.send_response(status_)
            self.send_header("Content-Length", str(len(packed)))
            self.end_headers()
            self.wfile.write(packed)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}", asked_of_it


@contextlib.contextmanager
def engine(answers):
    server, url, asked_of_it = answering(answers)
    try:
        yield url, asked_of_it
    finally:
        server.shutdown()
        server.server_close()


def test_vllm_is_told_the_identity_of_a_version_and_goes_on_unless_it_may_hold_a_mixture(tmp_path):
    """(``make real-weights`` holds this against the real one.)"""
    path = tmp_path / "0.1.17.42.safetensors"
    calls = ["/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
    with engine({}) as (url, asked_of_it):
        vllm.update(url, path)
    assert [path for path, _, _ in asked_of_it] == [*calls, "/finish_weight_update", "/resume"]
    assert asked_of_it[3][2] == {"update_info": {"id": "0.1.17.42"}}
    assert asked_of_it[4][2] == {"weight_version": "42"}
    with engine({"/update_weights": (500, {"error": "no"})}) as (url, asked_of_it):
        with pytest.raises(RuntimeError, match="answers 500 to POST /update_weights"):
            vllm.update(url, path)
        assert asked_of_it[-1][0] == "/update_weights", "an engine that may hold a mixture answers no request"
    with engine({"/init_weight_transfer_engine": (500, {"error": "no folder"})}) as (url, asked_of_it):
        with pytest.raises(RuntimeError, match="no folder"):
            vllm.update(url, path)
        assert asked_of_it[-1][0] == "/resume", "its weights are those of before"
    unwell = {"/init_weight_transfer_engine": (500, {"error": "no folder"}), "/resume": (500, {})}
    with engine(unwell) as (url, _), pytest.raises(RuntimeError, match="no folder"):
        vllm.update(url, path)
    with engine({"/pause": (404, {})}) as (url, _), pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
        vllm.update(url, path)


def test_sglang_is_shown_a_folder_with_the_models_configuration_and_the_new_weights(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (model / name).write_text(f"old {name}")
    path = tmp_path / "0.1.17.42.safetensors"
    path.write_bytes(b"new weights")
    seen = {}

    def loads(body):
        seen.update({one.name: one.read_text() for one in Path(body["model_path"]).iterdir()})
        return 200, {"success": body["weight_version"] == "42", "message": "done"}

    with engine({"/update_weights_from_disk": loads}) as (url, _):
        sglang.update(url, path, model)
    assert seen == {"config.json": "old config.json", "model.safetensors": "new weights"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0.1.17.42.safetensors", "model"], "nothing is left"
    for missing, model_ in ((path.with_name("0.1.17.43.safetensors"), model), (path, tmp_path / "other")):
        with pytest.raises(FileNotFoundError, match=r"is not on this host .* runs on the rollout host"):
            sglang.update("http://127.0.0.1:9", missing, model_)
    elsewhere = tmp_path / "elsewhere" / path.name
    with pytest.raises(FileNotFoundError):
        sglang.update("http://127.0.0.1:9", elsewhere, model)
    assert not elsewhere.parent.exists()
    no = (400, {"success": False, "message": "out of memory"})
    with engine({"/update_weights_from_disk": no}) as (url, _), pytest.raises(RuntimeError, match="out of memory"):
        sglang.update(url, path, model)


def test_an_engine_is_not_asked_through_a_proxy(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as found:
        nothing = f"http://127.0.0.1:{found.getsockname()[1]}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, nothing)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "0.1.17.42.safetensors"
    path.write_bytes(b"new weights")
    with engine({"/update_weights_from_disk": (200, {"success": True})}) as (url, asked_of_it):
        vllm.update(url, path)
        sglang.update(url, path, tmp_path)
        assert len(asked_of_it) == 7


def test_a_mover_publishes_on_every_host_and_waits_and_loads_on_one_rank(tmp_path):
    loaded = []
    with Both(tmp_path, 2, 2) as both:
        for one in both.pullers:
            one.start()
        first, second = both.trainers
        ranks = [
            Between(first, lambda: weights(1), loaded.append, rollouts=2, expected_s=7.0),
            Between(None, lambda: weights(1), None, rollouts=2, expected_s=7.0),
            Between(second, lambda: weights(1), None, rollouts=2, expected_s=7.0),
        ]
        for _ in range(2):
            for rank in ranks:
                rank.publish("1.4")
            for rank in reversed(ranks):  # (the first one waits for the pullers)
                rank.wait()
            assert first.store.current() == second.store.current()
            assert len(first.pulled_by(first.store.current())) == 2
            for rank in ranks:
                rank.load()
    assert [str(one) for one in loaded] == ["0.1.4.1", "0.1.4.2"]


def test_a_rank_that_loads_needs_a_publisher():
    with pytest.raises(ValueError, match="load=None on the ranks that load nothing"):
        Between(None, dict, print, rollouts=1, expected_s=7.0)


def test_movers_agree_on_the_version_even_if_the_store_of_one_host_was_emptied(tmp_path):
    with Both(tmp_path, 2, 1) as both:
        movers = [Between(one, lambda: weights(1), None, rollouts=1, expected_s=7.0) for one in both.trainers]
        for mover in movers:
            mover.publish("1.4")
            mover.wait()
        for path in (tmp_path / "train1").iterdir():
            path.unlink()
        for mover in movers:
            mover.publish("1.4")
            mover.wait()
        assert [str(one.store.current()) for one in both.trainers] == ["0.1.4.2", "0.1.4.2"]


def test_a_mover_hears_of_pulls_from_the_process_that_serves_its_store(tmp_path):
    hosts, loaded = loopback(1, 1), []
    with (
        Publisher("job", dir=tmp_path / "t") as publisher,
        contextlib.closing(serve("job", publisher.store, read(hosts), "train0", KEY)),
        contextlib.closing(Puller("job", hosts, me="roll0", dir=tmp_path / "r", key=KEY)) as puller,
    ):
        mover = Between(publisher, lambda: weights(1), loaded.append, rollouts=1, expected_s=7.0)
        puller.start()
        mover.publish()
        mover.wait()
        mover.load()
    assert loaded == [parse("0.0.0.1")]


def test_a_mover_without_a_fence_publishes_after_a_version_that_has_one(tmp_path):
    with Publisher("job", dir=tmp_path / "t", run=1) as publisher:
        publisher.publish(weights(1), 5, fence="1.18")
        mover = Between(publisher, lambda: weights(2), None, rollouts=1, expected_s=7.0)
        for expected in ("1.1.18.6", "1.1.18.7"):
            mover.publish()
            mover.wait()
            assert publisher.store.current() == parse(expected)


def test_movers_without_a_fence_agree_after_a_hosts_store_was_emptied_once_their_publishers_have_a_new_run(tmp_path):
    for run, emptied in ((0, False), (1, True), (1, False)):
        if emptied:
            for path in (tmp_path / "train1").iterdir():
                path.unlink()
        with Both(tmp_path, 2, 1, run=run) as both:
            movers = [Between(one, lambda: weights(1), None, rollouts=1, expected_s=7.0) for one in both.trainers]
            for mover in movers:
                mover.publish()
                mover.wait()
            first, second = (one.store.current() for one in both.trainers)
        assert first == second
    assert first == parse("1.0.0.2")


def test_a_mover_copies_in_the_slot_and_sums_and_compares_and_shows_after_it(tmp_path, monkeypatch):
    happened, encode = [], delta.encode
    sums = SimpleNamespace(crc32=lambda chunk: happened.append("summed") or zlib.crc32(chunk))
    monkeypatch.setattr("rollmuxd_weights.publish.zlib", sums)
    monkeypatch.setattr(delta, "encode", lambda base, chunk: happened.append("compared") or encode(base, chunk))
    with Publisher("job", dir=tmp_path / "t", delta=True, chunk=CHUNK) as publisher:
        mover = Between(publisher, lambda: weights(1), None, rollouts=1, expected_s=7.0)
        for step in (1, 2):
            before = publisher.store.current()
            mover.publish("1.4")
            assert publisher.store.current() == before
            assert not publisher.store.path(parse(f"0.1.4.{step}"), "json").exists()
            happened.append("released")
            mover.wait()
            assert publisher.store.current() == parse(f"0.1.4.{step}")
            assert happened[0] == "released"
            assert set(happened[1:]) == ({"summed"} if step == 1 else {"summed", "compared"})
            happened.clear()


def test_a_copy_is_offered_once_and_a_second_try_leaves_what_is_shown(tmp_path):
    with Publisher("job", dir=tmp_path / "t") as publisher:
        copied = publisher.copy(weights(1), 1)
        made = publisher.offer(copied)
        with pytest.raises(Older, match=r"version 0\.0\.0\.1 was offered before, or another copy has followed it"):
            publisher.offer(copied)
        assert publisher.store.manifest(made.identity) is not None
        assert publisher.store.current() == made.identity


# ---- lines between clusters --------------------------------------------------------------------------------------


@pytest.fixture
def namespaces():
    if why := unavailable():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("namespaces")
def test_a_line_that_is_cut_in_mid_transfer_is_made_up_for_and_nothing_is_left_of_the_namespaces():
    def spaces():
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    with Clusters(3, 3, slow=4, fast=200) as clusters:
        mine = clusters.command("switch")[3].rpartition("-")[0]
        assert spaces().count(mine) == 7

        def cut():
            until("some of it has crossed", lambda: clusters.crossed() > 2_000_000)
            clusters.cut("roll1")

        with in_namespaces(clusters) as run:
            found = run.transfer(1, 8, during=cut)
        assert found["identical"]
        assert found["taken_over"] > 0
        assert found["slow_bytes"] < 1.5 * found["bytes"]
        assert "<svg" in picture(found, "cut", 1.0)
        with pytest.raises(ZeroDivisionError), Clusters(1, 1, slow=10, fast=10):
            raise ZeroDivisionError
    assert mine not in spaces()
    assert subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout.count("fab0") == 0


@pytest.mark.e2e
def test_the_bench_moves_weights_over_the_loopback_and_draws_them(tmp_path):
    words = ["--train", "2", "--rollout", "2", "--mb", "2", "--json", "--html", str(tmp_path / "w.html")]
    words = [sys.executable, "-m", "rollmuxd", "weights", "bench", *words]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    told = json.loads(ran.stdout)
    assert told["identical"] is True
    assert told["bytes"] <= told["slow_bytes"] < 3 * told["bytes"]
    assert "chunk 0 at" in (tmp_path / "w.html").read_text()


def test_without_numpy_the_bench_says_what_brings_it(monkeypatch):
    monkeypatch.setattr("rollmuxd.cli.common.find_spec", lambda name: None)
    found = CliRunner().invoke(command.weights, ["bench", "--train", "1", "--rollout", "1", "--mb", "1"])
    assert found.stderr == "rollmuxd: random weights need numpy: pip install 'rollmuxd[weights]'\n"


def test_a_bench_whose_picture_cannot_be_written_does_not_run_and_one_that_moved_other_bytes_fails(monkeypatch):
    ran = []

    def transfer(*asked):
        ran.append(asked)
        return {"identical": False, "bytes": 1, "seconds": 1.0}

    monkeypatch.setattr("rollmuxd_weights.bench.Run.__enter__", lambda run: run)
    monkeypatch.setattr("rollmuxd_weights.bench.Run.transfer", transfer)
    found = CliRunner().invoke(command.weights, ["bench", "--html", "/nonexistent/x.html"])
    assert (found.exit_code, ran) == (1, [])
    assert "No such file or directory" in found.output
    found = CliRunner().invoke(command.weights, ["bench", "--json"])
    assert (found.exit_code, len(ran)) == (1, 1)
    assert "not every host has the bytes" in found.output


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_the_commands_serve_and_pull_what_a_publisher_of_another_process_writes(tmp_path):
    hosts = loopback(1, 1)
    (tmp_path / "hosts.toml").write_text(as_toml(hosts))

    def typed(*words):
        given = [sys.executable, "-m", "rollmuxd", "weights", *words, "--hosts", str(tmp_path / "hosts.toml")]
        env = {**os.environ, "ROLLMUX_WEIGHTS_KEY": KEY, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(given, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    pulls = typed("pull", "job", "--host", "roll0", "--dir", str(tmp_path / "r"))
    at = hosts["rollouts"]["roll0"][0]
    assert pulls.stdout.readline() == f"pulling to {tmp_path / 'r'}, serving peers at {at}\n"
    assert pulls.stdout.readline().startswith("rollmuxd: trainer train0 at "), "none answers yet"
    serves = typed("serve", "job", "--host", "train0", "--dir", str(tmp_path / "t"))
    try:
        assert serves.stdout.readline().startswith("serving")
        with Publisher("job", dir=tmp_path / "t", chunk=CHUNK) as publisher:
            made = publisher.publish(weights(1), 1)
        assert pulls.stdout.readline().startswith("0.0.0.1: ")
        assert digest(Puller("job", dir=tmp_path / "r").ready(1, PATIENCE_S)) == digest(made.path)
        shows = typed("status", "job", "--json")
        told = json.loads(shows.communicate(timeout=PATIENCE_S)[0])
        assert [one["id"] for one in told.values()] == ["0.0.0.1", "0.0.0.1"]
        again = typed("pull", "job", "--host", "roll0", "--dir", str(tmp_path / "r"))
        assert "another process writes" in again.communicate(timeout=PATIENCE_S)[0]
        assert again.returncode == 1
    finally:
        for process in (serves, pulls):
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, process.stdout.read()
            process.stdout.close()


def test_ready_waits_for_what_another_process_pulls(tmp_path):
    with Both(tmp_path, 1, 1) as both:
        watches = Puller("job", dir=tmp_path / "roll0")
        found = []
        waits = threading.Thread(target=lambda: found.append(watches.ready(1, PATIENCE_S)))
        waits.start()
        both.publish(1)
        both.pullers[0].pull()
        waits.join()
    until("the file is there", lambda: found and found[0].exists())
