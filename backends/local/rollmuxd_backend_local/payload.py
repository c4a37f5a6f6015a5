"""What is sent to a host to be run there: modules, with a question for :mod:`rollmuxd_backend_local.onhost` or not.

A host needs Python 3.8 or newer for it, and nothing is left there: the payload is read from standard input.
"""

import functools
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

#: the modules that questions need, in the order in which these need each other
_LOOK: Final = ("machine", "nvml", "made_up", "gpus", "ask")
_ALL: Final = ("machine", "nvml", "made_up", "gpus", "processes", "ask")
#: and those of a process that stays (:class:`~rollmuxd_backend_local.agent.SentAgent`)
_AGENT: Final = ("onnode", "serve")
_NAME: Final = "rollmuxd_onhost"

#: The program that opens a payload, for ``python3 -c``: all of its input, or as many bytes as its argument says. Having
#: no quotes, backslashes or line ends, it gets through any shell. It ends at once: to take the interpreter apart would
#: be a tenth of all that it takes.
OPEN: Final = (
    "import gc,os,sys,json,zlib;gc.disable();"
    "p=json.loads(zlib.decompress(sys.stdin.buffer.read(*map(int,sys.argv[1:2]))));exec(p[0]);os._exit(0)"
)

_UNPACK: Final = """
import types
_, name, modules, *rest = p
package = types.ModuleType(name)
package.__path__ = []
sys.modules[name] = package
for short, source in modules:
    module = types.ModuleType(name + "." + short)
    module.__package__ = name
    sys.modules[module.__name__] = module
    setattr(package, short, module)
    exec(compile(source, "<rollmuxd: %s>" % short, "exec", dont_inherit=True), module.__dict__)
"""
_ANSWER: Final = _UNPACK + "print(rest[0] + json.dumps(package.ask.answer(rest[1])), flush=True)\n"
_SERVE: Final = _UNPACK + "gc.enable()\npackage.serve.main(*rest)\n"


def pack(question: dict[str, Any], mark: str) -> bytes:
    """A payload. The line of output that begins with ``mark`` is the answer; other lines are other programs'."""
    return _packed(_ANSWER, _sources("onhost", needed(question)), mark, question)


def needed(question: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that a question needs."""
    return _LOOK if question["ask"] in ("look", "about", "output") else _ALL


def questions() -> tuple[str, str, str, dict[str, str]]:
    """What a process that stays makes payloads of: the programs that open one and answer it, a name, the modules."""
    return OPEN, _ANSWER, _NAME, dict(_sources("onhost", _ALL))


def agent(mark: str, silent_s: float) -> bytes:
    """A payload that says so in a line with ``mark``, and then serves until it is silent for so long."""
    return _packed(_SERVE, _sources("agent", _AGENT), mark, silent_s, questions())


def _packed(program: str, modules: list[tuple[str, str]], *rest: Any) -> bytes:
    return zlib.compress(json.dumps([program, _NAME, modules, *rest]).encode(), 1)


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
def _sources(folder: str, names: tuple[str, ...]) -> list[tuple[str, str]]:
    there = files("rollmuxd_backend_local") / folder
    return [(name, (there / f"{name}.py").read_text(encoding="utf-8")) for name in names]
