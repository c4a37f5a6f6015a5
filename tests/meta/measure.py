"""How much code there is, and how branched it is: ``python tests/meta/measure.py`` (``--json``: one object).

The figures of a folder include its sub-folders; ``files_here`` counts the modules that lie in the folder itself. Tests
are left out. Branches are counted per function: 1, and 1 for each ``if``, loop, handler, ``case``, conditional
expression, comprehension and further operand of ``and`` and ``or``.
"""

import argparse
import ast
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[2]
PRODUCT: Final = ("rollmuxd", "backends", "plugins")
#: the files that explain the system, in the order in which they are read; those that are there count
READING_PATH: Final = (
    *("__init__", "spec", "model", "inputs", "facts"),
    *("lifecycle", "reconcile", "clean", "steps/dispatch", "steps/reclaim"),
)
#: what came after the size was agreed on: not counted
LATER: Final = (
    *("plugins/gateway", "plugins/rounds", "plugins/weights", "plugins/fabric-polatis"),
    *("rollmuxd/fabric", "rollmuxd/rollout", "rollmuxd/sim/rollouts"),
    *("rollmuxd/sim/executions/engines.py", "rollmuxd/sim/executions/network.py", "rollmuxd/sim/other_gpus.py"),
    *("rollmuxd/sim/inside.py", "rollmuxd/sim/fabric_study.py"),
    *("rollmuxd/sim/validate.py", "rollmuxd/sim/report/fabric.py", "rollmuxd/sim/report/rollouts.py"),
    *("rollmuxd/cli/sim/fabric.py", "rollmuxd/cli/sim/rollout.py", "rollmuxd/cli/sim/validate.py"),
    *("rollmuxd/spi/fabric.py", "rollmuxd/spi/fake_fabric.py", "rollmuxd/spi/contract/fabric.py"),
    *("rollmuxd/sim/report/page.py", "rollmuxd/sim/report/pictures.py", "rollmuxd/sim/report/colours.py"),
    *("backends/slurm", "rollmuxd/daemon/hosts/endings.py", "rollmuxd/sim/sacct.py", "rollmuxd/cli/sim/accounting.py"),
    *("rollmuxd/cli/other_gpus.py", "plugins/evaluation/rollmuxd_evaluation/workloads/across_racks.py"),
    *("rollmuxd/core/steps/lend.py", "rollmuxd/explain/fillers.py"),
    *("rollmuxd/sim/fillers.py", "plugins/evaluation/rollmuxd_evaluation/workloads/asynchronous.py"),
    *("rollmuxd/cli/fabric.py", "rollmuxd/daemon/hosts/circuits.py", "rollmuxd/daemon/http/routes/fabric.py"),
)
LONG: Final = 60
_ONE_BRANCH: Final = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler),
    *(ast.IfExp, ast.comprehension, ast.match_case),
)


def branches(function: ast.AST) -> int:
    """How many ways there are through a function, about."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, _ONE_BRANCH):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def p90(values: Sequence[int]) -> int:
    """The value that nine of ten do not exceed; 0 of none."""
    return sorted(values)[round(0.9 * (len(values) - 1))] if values else 0


def lines_of(path: Path) -> int:
    """Lines of a file, blank ones and comments included."""
    return path.read_text(encoding="utf-8").count("\n")


@functools.cache  # a file is in each folder above it
def functions_of(path: Path) -> list[tuple[int, int]]:
    """Lines and branches of each function of a file."""
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, branches(node))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def figures(folder: Path, files: Sequence[Path]) -> dict[str, int]:
    """What one folder has, with its sub-folders."""
    mine = [path for path in files if folder in path.parents]
    functions = [function for path in mine for function in functions_of(path)]
    return {
        "lines": sum(map(lines_of, mine)),
        "files": len(mine),
        "files_here": sum(path.parent == folder for path in mine),
        "branches_p90": p90([function[1] for function in functions]),
        "functions_over_60": sum(function[0] > LONG for function in functions),
    }


def measure(root: Path = REPOSITORY) -> dict[str, Any]:
    """Every folder with Python of the product in it, by its path, and the reading path."""
    files = [
        path
        for top in PRODUCT
        for path in sorted((root / top).rglob("*.py"))
        if "tests" not in path.relative_to(root).parts and "__pycache__" not in path.parts
    ]
    folders = sorted({parent for path in files for parent in path.parents if parent != root and root in parent.parents})
    found: dict[str, Any] = {str(folder.relative_to(root)): figures(folder, files) for folder in folders}
    found["product_lines"] = sum(map(lines_of, files))
    found["product_lines_without_later"] = sum(
        lines_of(path) for path in files if not any(path.is_relative_to(root / later) for later in LATER)
    )
    core = root / "rollmuxd" / "core"
    found["reading_path_lines"] = sum(
        lines_of(path) for name in READING_PATH if (path := core / f"{name}.py").is_file()
    )
    return found


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Lines, files, branches and long functions of each folder.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    found = measure()
    if asked.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'FOLDER':48} {'LINES':>7} {'FILES':>6} {'HERE':>5} {'P90':>4} {'OVER 60':>8}")
    for name, row in found.items():
        if isinstance(row, dict):
            cells = f"{row['lines']:7} {row['files']:6} {row['files_here']:5} {row['branches_p90']:4}"
            print(f"{name:48} {cells} {row['functions_over_60']:8}")
    print(f"product: {found['product_lines']} lines, {found['product_lines_without_later']} without what came later")
    print(f"reading path: {found['reading_path_lines']} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
