"""The lengths of one step's responses, drawn from recorded ones.

``skythought``: Qwen2.5-32B-Instruct on MATH500, 3 prompting settings each; one in 38 runs away to the limit. ``aime``:
DeepSeek-R1-Distill-Qwen-1.5B on AIME problems, 8 samples each, cut at 16,000 tokens. ``mix``: half of the prompts from
each, cut at 16,000. The source of ``aime`` states no licence, so you bring its file: ``rollmuxd/sim/data/README.md``.
"""

import csv
import io
import random
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.sim.workload import Malformed, find

#: by name: whose lengths, and the limit in tokens
SOURCES: Final[Mapping[str, tuple[tuple[str, ...], int]]] = {
    "skythought": (("skythought",), 32_768),
    "aime": (("aime",), 16_000),
    "mix": (("aime", "skythought"), 16_000),
}
_COLUMNS: Final = ("prompt", "tokens")
#: under your data folder
AIME: Final = "response_lengths/aime_r1distill_1p5b_a.csv"
_AIME_COLUMNS: Final = ("prompt_id", "output_tokens")
_AIME_ORIGIN: Final = (
    f"aime and mix need it, with the columns {' and '.join(_AIME_COLUMNS)}, made of reports/week01/per_record_stats.csv"
    " of github.com/zacksifakis/task-hardness-analysis, which states no licence; skythought needs no file"
)
MOST_BYTES: Final = 64_000_000
MOST_TOKENS: Final = 10_000_000
#: of each prompt the lengths of its samples
_Source: TypeAlias = tuple[tuple[int, ...], ...]


class Lengths(Struct, frozen=True):
    """Recorded lengths: of each source the prompts, of each prompt the lengths of its samples."""

    name: str
    sources: tuple[_Source, ...]
    #: tokens of a response at most
    limit: int

    def draw(self, prompts: int, samples: int, seed: str) -> list[list[int]]:
        """The lengths of one step, by prompt. Equal seeds, equal lengths.

        Prompts are drawn without repetition, an equal share from each source. The samples of a prompt are drawn from
        its recorded ones, each as often as it comes.
        """
        chance = random.Random(f"lengths {self.name} {seed}")
        found: list[list[int]] = []
        for place, source in enumerate(self.sources):
            share = prompts * (place + 1) // len(self.sources) - prompts * place // len(self.sources)
            chosen = chance.sample(source, share) if share <= len(source) else chance.choices(source, k=share)
            found += [[min(self.limit, length) for length in _drawn(chance, prompt, samples)] for prompt in chosen]
        chance.shuffle(found)
        return found


def _drawn(chance: random.Random, recorded: Sequence[int], samples: int) -> Sequence[int]:
    if samples <= len(recorded):
        return chance.sample(recorded, samples)
    return chance.choices(recorded, k=samples)


def read(name: str, data: str = "") -> Lengths:
    """Lengths by name, or from a CSV file with the columns ``prompt`` and ``tokens``.

    ``data``: the folder that has the file of ``aime``; "": ``$ROLLMUX_DATA``.

    Raises:
        Malformed: the file is no such table; says line and column.
        FileNotFoundError: there is neither such a name nor such a file.
    """
    if name in SOURCES:
        whose, limit = SOURCES[name]
        return Lengths(name, tuple(_aime(data) if it == "aime" else _skythought() for it in whose), limit)
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"there are no lengths {name!r}: name a CSV file, or one of {', '.join(SOURCES)}")
    source = _opened(path, _COLUMNS)
    return Lengths(path.stem, (source,), max(max(prompt) for prompt in source))


def _aime(data: str) -> _Source:
    return _opened(find(AIME, data, _AIME_ORIGIN), _AIME_COLUMNS)


def _skythought() -> _Source:
    file = "lengths_skythought.csv"
    return _parse((resources.files("rollmuxd.sim") / "data" / file).read_bytes(), file, _COLUMNS)


def _opened(path: Path, columns: tuple[str, str]) -> _Source:
    """A file of the user's."""
    if path.stat().st_size > MOST_BYTES:
        most = MOST_BYTES // 1_000_000
        raise Malformed(str(path), 1, columns[1], f"the file is larger than {most} MB; pass a part of it")
    return _parse(path.read_bytes(), str(path), columns)


def _parse(body: bytes, file: str, columns: tuple[str, str]) -> _Source:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise Malformed(file, line, "", f"byte {error.start} is no UTF-8, expected a text file (CSV)") from None
    reader = csv.reader(io.StringIO(text))
    head = [cell.strip() for cell in next(reader, [])]
    for column in columns:
        if column not in head:
            raise Malformed(file, 1, column, f"there is no such column (the columns are {', '.join(head)[:200]})")
    at_prompt, at_tokens = map(head.index, columns)
    prompts: dict[str, list[int]] = {}
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(head):
            raise Malformed(file, reader.line_num, head[0], f"{len(cells)} cells are there, expected {len(head)}")
        there = cells[at_tokens].strip()
        tokens = int(there) if there.isascii() and there.isdigit() and len(there) < 10 else 0
        if not 1 <= tokens <= MOST_TOKENS:
            wanted = f"expected a whole number, 1 to {MOST_TOKENS}"
            raise Malformed(file, reader.line_num, columns[1], f"{there[:60]!r} is there, {wanted}")
        prompts.setdefault(cells[at_prompt], []).append(tokens)
    if not prompts:
        raise Malformed(file, 2, columns[1], "no row is there, expected at least one")
    return tuple(map(tuple, prompts.values()))
