"""Check a built sdist and wheel against the sources: ``python check_dist.py SOURCES DIST``."""

import sys
import tarfile
import zipfile
from pathlib import Path

SOURCES, DIST = (Path(argument).resolve() for argument in sys.argv[1:])
(WHEEL,) = DIST.glob("gpuq-*.whl")
(SDIST,) = DIST.glob("gpuq-*.tar.gz")


def files_below(folder: str) -> set[str]:
    """Return what git would keep of a folder, as the archives name it."""
    return {
        path.relative_to(SOURCES).as_posix()
        for path in (SOURCES / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in (".nbi", ".nbc")
    }


def demand(wanted: set[str], names: set[str], archive: Path) -> None:
    """End with what is missing."""
    if missing := sorted(wanted - names):
        sys.exit(f"{archive.name} lacks {', '.join(missing)}")


with zipfile.ZipFile(WHEEL) as wheel:
    in_wheel = set(wheel.namelist())
with tarfile.open(SDIST) as sdist:
    in_sdist = {name.partition("/")[2] for name in sdist.getnames()}

package = files_below("gpuq")
assert {"gpuq/py.typed", "gpuq/host/device.py", "gpuq/kernels/queue.py"} <= package
demand(package, in_wheel, WHEEL)
demand(package | files_below("tests") | files_below("docs"), in_sdist, SDIST)
demand(
    {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"}, in_sdist, SDIST
)
if not any(name.endswith(".dist-info/licenses/LICENSE") for name in in_wheel):
    sys.exit(f"{WHEEL.name} lacks LICENSE")
if extra := sorted(
    name for name in in_wheel - package if not name.split("/")[0].endswith(".dist-info")
):
    sys.exit(f"{WHEEL.name} has what is no part of the package: {', '.join(extra)}")
print(f"{WHEEL.name}: {len(package)} files of gpuq; {SDIST.name}: {len(in_sdist)} entries")
