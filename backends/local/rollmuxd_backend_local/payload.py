"""What is sent to a host to be run there: the modules of :mod:`rollmuxd_backend_local.onhost`, and a question.

A host needs Python 3.8 or newer for it, and nothing is left there: the payload is read from standard input.
"""

import functools
import json
import zlib
from importlib.resources import files
from typing import Any, Final

#: the modules that questions need, in the order in which these need each other
_LOOK: Final = ("machine", "nvml", "made_up", "gpus", "ask")
_ALL: Final = ("machine", "nvml", "made_up", "gpus", "processes", "ask")

#: The program that opens a payload, for ``python3 -c``. Having no quotes, backslashes or line ends, it gets through any
#: shell.
OPEN: Final = "import sys,json,zlib;p=json.loads(zlib.decompress(sys.stdin.buffer.read()));exec(p[0])"

_UNPACK: Final = """
import types
_, name, modules, mark, question = p
package = types.ModuleType(name)
package.__path__ = []
sys.modules[name] = package
for short, source in modules:
    module = types.ModuleType(name + "." + short)
    module.__package__ = name
    sys.modules[module.__name__] = module
    setattr(package, short, module)
    exec(compile(source, "<rollmuxd: %s>" % short, "exec", dont_inherit=True), module.__dict__)
print(mark + json.dumps(package.ask.answer(question)), flush=True)
"""


def pack(question: dict[str, Any], mark: str) -> bytes:
    """A payload. The line of output that begins with ``mark`` is the answer; other lines are other programs'."""
    modules = _sources(_LOOK if question["ask"] in ("look", "about", "output") else _ALL)
    return zlib.compress(json.dumps([_UNPACK, "rollmuxd_onhost", modules, mark, question]).encode(), 1)


def unpack(output: bytes, mark: str) -> dict[str, Any]:
    """The answer in a program's output. Raises ValueError where there is none."""
    for line in output.splitlines():
        found = line.partition(mark.encode())
        if found[1]:
            answer = json.loads(found[2])
            if isinstance(answer, dict):
                return answer
    raise ValueError("it did not answer")


@functools.cache
def _sources(names: tuple[str, ...]) -> list[tuple[str, str]]:
    folder = files("rollmuxd_backend_local") / "onhost"
    return [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in names]
