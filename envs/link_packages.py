"""Give a new environment the packages that .venv already holds, as hard links.

torch and the CUDA libraries take about 6 GB an environment. Where TARGET's lock pins the version
that the environment of this Python holds, its files are linked and pip then finds them installed.
Where links cannot be made (another file system) nothing is done and pip installs as usual.

    .venv/bin/python envs/link_packages.py .venv-ndif envs/ndif-server.lock
"""

import os
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)")
LARGE = re.compile(r"^(torch|triton|nvidia-.+|cuda-.+)$")


def pins(lock: Path) -> dict[str, str]:
    """Package name -> pinned version."""
    return dict(
        found.groups() for line in lock.read_text().splitlines() if (found := PIN.match(line))
    )


def link(package: Distribution, source: Path, target: Path) -> None:
    """Hard-link every file of a package into another site-packages; OSError where it cannot be."""
    for file in package.files or []:
        path = source / file
        if ".." in file.parts or not path.is_file():
            continue
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            os.link(path, place)


def main(environment: str, lock: str) -> None:
    """Link what both environments pin alike; nothing where links between them cannot be made."""
    wanted = pins(Path(lock))
    for package in distributions():
        name = package.name.lower()
        if LARGE.match(name) and wanted.get(name) == package.version:
            source = Path(str(package.locate_file("")))
            target = Path(environment) / "lib" / source.parent.name / "site-packages"
            try:
                link(package, source, target)
            except OSError:
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
