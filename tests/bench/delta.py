"""W8 of the weight mover's acceptance: differences between two versions over slow lines, lossless."""

from figures import Json, at_least, at_most, say, short
from weights import FAST, SLOW, machine

from rollmuxd_weights.bench import in_namespaces
from rollmuxd_weights.namespaces import Clusters, removed_on_signals, unavailable


def run(budget_s: float, *, small: bool = False) -> Json:
    """1 % of the bf16 words changed at random, then all of them."""
    del budget_s
    if why := unavailable():
        raise OSError(f"no network namespaces here: {why}")
    mb = 8 if small else 64
    with (
        removed_on_signals(),
        Clusters(4, 4, slow=2 * SLOW, fast=FAST) as clusters,
        in_namespaces(clusters, delta=True) as hosts,
    ):
        first = hosts.transfer(1, mb)
        one = hosts.transfer(2, mb, changed=0.01)
        say(f"  1 % changed: {one['slow_bytes'] / one['bytes']:.4f} of the bytes, {one['seconds']:.2f} s")
        everything = hosts.transfer(3, mb, changed=1.0)
        say(f"  100 % changed: {everything['slow_bytes'] / everything['bytes']:.4f} of the bytes")
    identical = first["identical"] and one["identical"] and everything["identical"]
    size = one["bytes"]
    return {
        **machine(),
        "bytes": size,
        "slow_bytes": one["slow_bytes"],
        "slow_share": short(one["slow_bytes"] / size),
        "slow_share_all_changed": short(everything["slow_bytes"] / size),
        "identical": identical,
        "seconds": {
            "full": short(first["seconds"]),
            "delta": short(one["seconds"]),
            "all": short(everything["seconds"]),
        },
        "publish_s": {"full": short(first["publish_s"]), "delta": short(one["publish_s"])},
        "copy_s": {"full": short(first["copy_s"]), "delta": short(one["copy_s"])},
        "targets": {
            "slow_share": at_most(one["slow_bytes"] / size, 0.06),
            "slow_share_all_changed": at_most(everything["slow_bytes"] / size, 1.001),
            "identical": at_least(float(identical), 1.0),
        },
    }
