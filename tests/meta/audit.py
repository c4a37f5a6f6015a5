"""``make check``, last step: does anybody know of a hole in what we depend on?

Asks https://osv.dev, which is the database behind pip-audit, about every version in ``constraints.txt``. By hand, with
the standard library: pip-audit would bring twenty packages into the environment that it is to judge, and says nothing
of packages that come from an index of one's own. Without a network it says that it was skipped, and fails nothing.
"""

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

URL = "https://api.osv.dev/v1/querybatch"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
WAIT_S = 10

#: holes that do not concern us: the id, and why
ACCEPTED: dict[str, str] = {}


def pinned(text: str) -> list[tuple[str, str]]:
    """Names and versions."""
    return re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", text, re.MULTILINE)


def holes(packages: list[tuple[str, str]], url: str = URL) -> dict[str, list[str]]:
    """What is known of each package that something is known of. Raises OSError where there is no network."""
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in packages]
    request = urllib.request.Request(
        url, json.dumps({"queries": queries}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        results = json.load(answer)["results"]
    if len(results) != len(packages):
        raise ValueError(f"{len(packages)} were asked about, and {len(results)} answered for")
    return {
        f"{name} {version}": found
        for (name, version), result in zip(packages, results, strict=True)
        if (found := [hole["id"] for hole in result.get("vulns", []) if hole["id"] not in ACCEPTED])
    }


def main(url: str = URL) -> int:
    """Print what is known; the exit status: 1 if there is a hole."""
    packages = pinned(CONSTRAINTS.read_text())
    try:
        found = holes(packages, url)
    except (OSError, ValueError, KeyError) as error:
        print(f"dependency audit: skipped: no network ({url}: {error})")
        return 0
    if not found:
        print(f"dependency audit: nothing is known against any of {len(packages)} packages")
        return 0
    for package, ids in found.items():
        print(f"dependency audit: {package}: {', '.join(f'https://osv.dev/{id_}' for id_ in ids)}")
    print("raise the version (make constraints), or say in tests/meta/audit.py why it does not concern us")
    return 1


if __name__ == "__main__":
    sys.exit(main())
