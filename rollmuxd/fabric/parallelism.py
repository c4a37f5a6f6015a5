"""How a model generates, by name: apart, because whatever reads a workload needs the names and no numpy."""

from typing import Final, Literal, TypeAlias, get_args

#: how a model generates. ``tpN``: tensor parallelism over N GPUs. ``epN``: experts over N GPUs; each token goes to its
#: experts, and comes back. ``afd``: attention and feed-forward on hosts of their own; each token goes there, and back
Parallelism: TypeAlias = Literal["tp8", "tp16", "ep32", "ep64", "afd"]
PARALLELISMS: Final[tuple[Parallelism, ...]] = get_args(Parallelism)
