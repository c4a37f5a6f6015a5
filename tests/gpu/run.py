"""``make gpu``: what can only be seen on a GPU. Says on stderr what it does, and gives one JSON object on stdout.

memory            a torch state is parked: is its memory really free, and is every bit there after the load?
bandwidth         park and load against a plain copy of as many bytes between the GPU and pinned memory, in turns
overlap           one process parks while another loads: does it take less time than one after the other?
weights           a version of weights from its file in host memory into a model, against a plain copy of as many bytes
cuda_checkpoint   a torch process is taken off the GPU and brought back by the residency driver cuda-checkpoint
two_jobs          two torch jobs share one GPU under a real daemon: are their weights those of each one alone?

Runs on a bare CUDA image that has torch: what else is needed it puts into ``.venv-gpu`` beside that torch; where no
package index can be reached, the checks that need it say so and the others run. ``--cpu`` tries this program itself,
without a GPU and in small: its figures mean nothing.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-gpu"
#: imported without being installed: they need nothing but torch
sys.path.insert(0, str(ROOT / "plugins/channel"))
sys.path.insert(0, str(ROOT / "tests/shared"))

CHECKS = ("memory", "bandwidth", "overlap", "weights", "cuda_checkpoint", "two_jobs")
#: need what a daemon needs to be installed
NEED_DAEMON = ("weights", "cuda_checkpoint", "two_jobs")


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)


# ---- an interpreter that has what is needed -------------------------------------------------------------------------


def has_torch(python: str) -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_torch() -> str | None:
    """An interpreter whose torch sees a GPU."""
    there = (sys.executable, str(ROOT / ".venv/bin/python"), "python3", "python", "/opt/conda/bin/python")
    return next((python for python in dict.fromkeys(there) if has_torch(python)), None)


def has_daemon() -> bool:
    """Whether this interpreter has what a daemon needs, with rollmuxd installed."""
    names = ("msgspec", "httpx", "anyio", "uvicorn", "structlog", "pydantic_settings", "rollmuxd", "rollmuxd_channel")
    if not all(importlib.util.find_spec(name) for name in names):
        return False
    from importlib.metadata import entry_points

    return {"channel"} <= {point.name for point in entry_points(group="rollmuxd.residency")}


def prepare(wheels: str | None) -> str:
    """Go on in a virtual environment beside this interpreter's torch; why there is none, if there is none."""
    if os.environ.get("GPU_CHECKS_AGAIN"):
        return f"{VENV.name} was made, and still lacks something"
    say(f"installing what a daemon needs into {VENV.name}, beside the torch of {sys.executable}")
    python = str(VENV / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--retries", "1", "-c", str(ROOT / "constraints.txt")]
    offline = ["--no-index", "--find-links", wheels] if wheels else []
    for command in (
        [sys.executable, "-m", "venv", "--clear", "--system-site-packages", str(VENV)],
        [*pip, *offline, "-e", f"{ROOT}[daemon]"],
        # (the torch may be in an environment of its own, which is no other's system)
        [python, "-c", _BESIDE, str(Path(importlib.util.find_spec("torch").origin).parents[1])],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-300:]}"
    os.environ["GPU_CHECKS_AGAIN"] = "1"
    return os.execv(python, [python, __file__, *sys.argv[1:]])


_BESIDE = """
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "beside.pth").write_text(sys.argv[1])
"""


# ---- running --------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS), help="some of them, with commas")
    parser.add_argument(
        "--gb", type=float, help="of the states that are moved (default: 8, at most a third of the GPU)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wheels", help="a folder of wheels, where no package index can be reached")
    parser.add_argument("--cpu", action="store_true", help="try this program without a GPU, in small")
    asked = parser.parse_args()
    only = [name for name in asked.only.split(",") if name]
    if strange := [name for name in only if name not in CHECKS]:
        parser.error(f"{strange[0]} is none of {', '.join(CHECKS)}")
    if not asked.cpu:
        python = find_torch()
        if python is None:
            say("this needs a GPU and a torch that sees it, and found none (--cpu tries the program itself)")
            print(json.dumps({"ok": None, "why": "no torch that sees a GPU"}))
            return 2
        if python != sys.executable:
            os.execvp(python, [python, __file__, *sys.argv[1:]])
    if importlib.util.find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch; PYTHON=... names one that has")
    missing = ""
    if any(name in NEED_DAEMON for name in only) and not has_daemon():
        missing = f"what a daemon needs could not be installed: {prepare(asked.wheels)}"
    report = {"machine": machine(asked.cpu), "settings": vars(asked), "checks": {}}
    for name in only:
        report["checks"][name] = check(name, asked, missing if name in NEED_DAEMON else "")
    report["ok"] = all(found["ok"] is not False for found in report["checks"].values())
    print(json.dumps(report, indent=2))
    return 0 if report["ok"] else 1


def check(name: str, asked: argparse.Namespace, missing: str) -> dict:
    if missing:
        say(f"{name}: skipped: {missing}")
        return {"ok": None, "why": missing}
    began = time.monotonic()
    try:
        import moving
        import sharing

        found = getattr(moving if hasattr(moving, name) else sharing, name)(asked)
    except Exception as error:  # one check that fails hides none of the others
        traceback.print_exc()
        found = {"ok": False, "why": f"{type(error).__name__}: {error}"}
    found["took_s"] = round(time.monotonic() - began, 1)
    say(f"{name}: {({True: 'ok', False: 'FAILED', None: 'not to be had'})[found['ok']]} {json.dumps(found)}")
    return found


def machine(cpu: bool) -> dict:
    import torch

    about = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if not cpu:
        free, total = torch.cuda.mem_get_info()
        about |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_gb": round(total / 1e9, 1),
            "free_gb": round(free / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return about


if __name__ == "__main__":
    sys.exit(main())
