"""What is decided without clock, threads and network: identities, manifests, differences, and what to fetch next."""

import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmuxd_weights import safetensors
from rollmuxd_weights.core import delta, fence, manifest
from rollmuxd_weights.core.pull import Meter, Pull, cut, lines

# ---- identities --------------------------------------------------------------------------------------------------


def test_a_later_fence_is_newer_whatever_its_step():
    made = [fence.identity(step, fence=held, run=run) for run, held, step in
            [(0, None, 7), (0, "1.17", 3), (0, "1.18", 1), (0, "2.1", 0), (1, None, 0)]]  # fmt: skip
    assert made == sorted(made)
    assert str(made[1]) == "0.1.17.3"
    assert fence.parse("0.1.17.3") == made[1]


@pytest.mark.parametrize("text", ["", "1.2.3", "a.b.c.d", "0.1.2.-3", "../../etc", "1.2.3.4.5", "0.1.2.3\n", "9" * 20])
def test_what_is_no_identity_is_refused(text):
    with pytest.raises(ValueError, match="no identity"):
        fence.parse(text)


@pytest.mark.parametrize(("version", "held"), [(-1, None), (1, "17"), (1, "a.b"), (1 << 60, None), (1, 17)])
def test_what_cannot_be_a_version_or_a_fence_is_refused(version, held):
    with pytest.raises(ValueError, match=r"identity|fence"):
        fence.identity(version, fence=held, run=0)


# ---- manifests ---------------------------------------------------------------------------------------------------

GOOD = {"id": "0.0.0.1", "bytes": 5000, "chunk": 2048, "crc": [1, 2, 3]}


def test_a_manifest_says_where_each_chunk_is():
    found = manifest.decode(msgspec.json.encode({**GOOD, "base": "0.0.0.0", "delta": [0, 12, 904]}))
    assert [found.span(chunk) for chunk in range(3)] == [(0, 2048), (2048, 4096), (4096, 5000)]
    assert found.offsets(delta=False) == [0, 2048, 4096, 5000]
    assert found.offsets(delta=True) == [0, 0, 12, 916]


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../../x"}, {"bytes": 0}, {"bytes": 1 << 60}, {"chunk": 0}, {"chunk": 1 << 40}, {"crc": [1, 2]},
        {"crc": [1, 2, -3]}, {"crc": [1, 2, 1 << 32]}, {"base": "x", "delta": [0, 0, 0]}, {"base": "0.0.0.0"},
        {"base": "0.0.0.0", "delta": [0, 0, 905]}, {"base": "0.0.0.0", "delta": [0, -1, 0]},
        {"rates": {"line": -1}}, {"rates": {"x" * 301: 1}},
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"manifest|identity"):
        manifest.decode(msgspec.json.encode({**GOOD, **wrong}))


def test_what_is_no_json_is_no_manifest():
    with pytest.raises(ValueError, match="no manifest"):
        manifest.decode(b"\x00\xff")


# ---- differences -------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 4000), st.floats(0, 0.3))
def test_a_difference_gives_back_every_bit(seed, words, share):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 1 << 16, words, dtype=np.uint16)
    new = base.copy()
    new[rng.integers(0, words, int(share * words))] ^= rng.integers(0, 1 << 16, int(share * words), dtype=np.uint16)
    packed = delta.encode(base.tobytes(), new.tobytes())
    if packed is not None:
        assert len(packed) < new.nbytes
        assert delta.decode(base.tobytes(), packed) == new.tobytes()


def test_one_percent_of_the_words_is_a_thirtieth_of_the_bytes_and_all_of_them_are_no_difference():
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = base.copy()
    new[rng.integers(0, len(new), len(new) // 100)] ^= np.uint16(1)
    packed = delta.encode(base.tobytes(), new.tobytes())
    assert len(packed) < new.nbytes / 30
    assert delta.encode(base.tobytes(), rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16).tobytes()) is None
    assert delta.encode(base.tobytes(), base.tobytes()) == b""


@pytest.mark.parametrize("cut_to", [1, 3, 4, 10])
def test_a_difference_that_is_cut_off_is_refused(cut_to):
    base = bytes(2000)
    packed = delta.encode(base, b"\x01" * 20 + bytes(1980))
    with pytest.raises(ValueError, match=r"cut off|inflate"):
        delta.decode(base, packed[:cut_to])


def test_a_difference_inflates_to_no_more_than_its_chunk():
    bomb = (10).to_bytes(4, "little") + zlib.compress(bytes(1 << 24))
    assert len(delta.decode(bytes(2000), bomb)) == 2000, "the first sixty bytes of it are read, and the rest never is"
    with pytest.raises(ValueError, match="4000000000 words"):
        delta.decode(bytes(2000), (4_000_000_000).to_bytes(4, "little") + bomb[4:])
    with pytest.raises(ValueError, match="larger chunk"):
        delta.decode(bytes(2000), delta.encode(bytes(4000), bytes(3998) + b"\x01\x01"))


# ---- the container -----------------------------------------------------------------------------------------------


def test_a_header_places_every_tensor_and_is_read_back():
    head, spans = safetensors.header({"a": ("BF16", (2, 3)), "empty": ("F32", (0,)), "b": ("F32", ())})
    assert len(head) % 8 == 0
    file = bytearray(head + bytes(16))
    file[spans["a"].start : spans["a"].stop] = b"x" * 12
    found = {name: (one.shape, bytes(body)) for name, one, body in safetensors.tensors(memoryview(file))}
    assert found == {"a": ([2, 3], b"x" * 12), "empty": ([0], b""), "b": ([], bytes(4))}


def test_the_library_reads_what_is_written_here(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    head, _ = safetensors.header({"a": ("F32", (2,))})
    (tmp_path / "a.safetensors").write_bytes(head + np.array([1, 2], dtype="<f4").tobytes())
    assert library.load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "file",
    [
        b"", b"\x00" * 7, (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"xx",
        (56).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(56),
        (56).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}'.ljust(56) + bytes(16),
        (56).to_bytes(8, "little") + b'{"a":{"dtype":"F99","shape":[0],"data_offsets":[0,0]}}'.ljust(56) + bytes(16),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(file):
    with pytest.raises(ValueError, match=r"no safetensors|does not fit"):
        list(safetensors.tensors(memoryview(file)))


# ---- what to fetch -----------------------------------------------------------------------------------------------


def test_every_trainer_and_every_card_has_a_line():
    assert [str(line) for line in lines({"t0": 1, "t1": 1}, {"r0": 1, "r1": 1, "r2": 1})] == [
        "t0/0-r0/0", "t1/0-r1/0", "t0/0-r2/0",
    ]  # fmt: skip
    assert [str(line) for line in lines({"t0": 1, "t1": 1, "t2": 1}, {"r0": 1, "r1": 1})] == [
        "t0/0-r0/0", "t2/0-r0/0", "t1/0-r1/0",
    ]  # fmt: skip
    assert [str(line) for line in lines({"t0": 2}, {"r0": 2})] == ["t0/0-r0/0", "t0/1-r0/1"]


def test_shards_follow_measured_rates():
    between = lines({"t0": 1}, {"r0": 1, "r1": 1, "r2": 1})
    offsets = [at * 100 for at in range(301)]
    assert [len(part) for part in cut(offsets, between, {})] == [100, 100, 100]
    rates = {"t0/0-r0/0": 300.0, "t0/0-r1/0": 100.0}
    first, second, third = (len(part) for part in cut(offsets, between, rates))
    assert first + second + third == 300
    assert 2.8 < first / second < 3.2
    assert third == 100, "as the mean of both"


@pytest.mark.parametrize("chunks", [3, 4, 32, 300])
@pytest.mark.parametrize("dead", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_a_dead_line_keeps_a_chunk_to_be_measured_by(chunks, dead):
    between = lines({"t0": 1}, {"r0": 1, "r1": 1, "r2": 1})
    rates = {str(line): 0.0 if number in dead else 100.0 for number, line in enumerate(between)}
    found = cut(range(chunks + 1), between, rates)
    assert all(len(found[number]) == 1 for number in dead if len(dead) < 3)
    # Chunks of differences that have not changed have no bytes to measure by.
    offsets = [at // 4 * 100 for at in range(4 * chunks + 4)]
    found = cut(offsets, between, rates)
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, len(offsets) - 1)
    assert all(offsets[part.stop] > offsets[part.start] for part in found)


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [0, 5], [0, 5, 9]])
def test_shards_of_few_chunks_or_of_none_are_all_of_them(offsets):
    between = lines({"t0": 1}, {"r0": 1, "r1": 1, "r2": 1})
    assert [chunk for part in cut(offsets, between, {}) for chunk in part] == list(range(len(offsets) - 1))


def test_a_line_is_measured_while_it_is_asked_even_if_nothing_comes_and_not_while_it_rests():
    dead, good, early = Meter(), Meter(), Meter()
    for meter in (dead, good):
        meter.ask(10.0)
        meter.ask(10.25)  # (a second stream)
    good.bytes = 300
    for meter in (dead, good):
        meter.end(10.5)
        meter.end(10.75)
        meter.ask(100.0)
    assert dead.rate(100.125) is None, "0.875 s are not enough to call it dead"
    assert (dead.rate(100.25), good.rate(100.25)) == (0.0, 300 / 1)
    early.ask(10.0)
    early.end(20.0, in_vain=True)
    assert early.rate(30.0) is None


def test_shards_are_of_equal_bytes_where_chunks_are_not():
    between = lines({"t0": 1}, {"r0": 1, "r1": 1})
    assert cut([0, 90, 95, 100, 105, 200], between, {}) == [range(3), range(3, 5)]


class Hosts:
    """Some rollout hosts in lockstep. A round is a chunk's time over a slow line; the fabric takes none."""

    def __init__(self, count, chunks, *, slow=(), dead=()):
        names = [f"r{number}" for number in range(count)]
        self.between = lines({f"t{number}": 1 for number in range(count)}, dict.fromkeys(names, 1))
        cuts = cut([at * 10 for at in range(chunks + 1)], self.between, {})
        self.pulls = {name: Pull(name, self.between, cuts, chunks=chunks, have=(), now=0.0) for name in names}
        self.slow, self.dead = dict(slow), set(dead)
        self.logs = {name: [] for name in names}
        self.heard = {(a, b): 0 for a in names for b in names if a != b}
        self.runs = dict.fromkeys(names)
        self.fetched = 0
        self.now = 0.0

    def round(self):
        self.now += 0.2
        for number, (name, pull) in enumerate(self.pulls.items()):
            run = self.runs[name] = self.runs[name] or pull.over_line(number, self.now)
            if not run:
                continue
            self.logs[name] += [-(chunk + 1) for chunk in run if -(chunk + 1) not in self.logs[name]]
            if name in self.dead or (name in self.slow and round(self.now / 0.2) % self.slow[name]):
                continue
            chunk = run.pop(0)
            self.fetched += 1
            if pull.got(chunk, self.now, took_s=0.2):
                self.logs[name].append(chunk + 1)
        for (name, peer), after in self.heard.items():
            self.pulls[name].heard(peer, self.logs[peer][after:], self.now)
            self.heard[name, peer] = len(self.logs[peer])
            while run := self.pulls[name].from_peer(peer):
                for chunk in run:
                    self.pulls[name].got(chunk, self.now)

    def rounds(self, most=10_000):
        for number in range(1, most):
            self.round()
            if all(pull.whole for pull in self.pulls.values()):
                return number
        raise AssertionError({name: pull.missing for name, pull in self.pulls.items()})


def test_every_chunk_crosses_once_and_no_host_waits_for_another():
    hosts = Hosts(8, 256)
    assert hosts.rounds() == 32
    assert hosts.fetched == 256


def test_the_chunks_of_a_dead_line_are_taken_over_by_all_others():
    hosts = Hosts(8, 256)
    for _ in range(12):
        hosts.round()
    hosts.dead.add("r3")
    took = 12 + hosts.rounds()
    assert took <= 32 + 3 + 3, "the lost share over seven lines, and a little"
    assert hosts.fetched <= 256 + 3
    assert sum(pull.taken_over for pull in hosts.pulls.values()) >= 20


def test_a_host_that_is_dead_from_the_start_holds_up_no_other():
    hosts = Hosts(4, 64, dead={"r0"})
    hosts.heard = {pair: at for pair, at in hosts.heard.items() if pair[1] != "r0"}
    assert hosts.rounds() <= 16 + 6 + 8


def test_a_slow_host_is_helped_from_the_end_of_its_shard():
    hosts = Hosts(4, 128, slow={"r1": 4})
    took = hosts.rounds()
    assert took < 50, "alone it would take 128"
    assert hosts.fetched <= 128 + 4


def test_no_chunk_is_left_out_whatever_fails():
    """Requests fail at random, hosts go away and come back; in the end all chunks are on all hosts."""
    rng = np.random.default_rng(7)
    for _ in range(30):
        hosts = Hosts(int(rng.integers(1, 6)), int(rng.integers(1, 60)))
        for _ in range(40):
            hosts.round()
            name = rng.choice(list(hosts.pulls))
            if rng.random() < 0.3 and hosts.runs[name]:
                hosts.pulls[name].failed(hosts.runs[name])
                hosts.runs[name] = None
            peer = rng.choice(list(hosts.pulls))
            if peer != name and rng.random() < 0.2:
                hosts.pulls[name].lost(peer)
                hosts.heard[name, peer] = 0
        hosts.rounds(2_000)


def test_a_peer_that_tells_of_chunks_that_there_are_not_is_not_believed():
    pull = Hosts(2, 8).pulls["r0"]
    for entry in (9, -9, 0):
        with pytest.raises(ValueError, match="there are 8"):
            pull.heard("r1", [entry], 0.0)
