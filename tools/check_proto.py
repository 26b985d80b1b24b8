"""Says whether the committed stubs are what `make proto` would write now.

python -m tools.check_proto
"""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

from tools import make_proto


def stale(committed: Path, fresh: Path) -> list[str]:
    """Names of generated files that are missing, left over or different between the two folders."""
    names = {path.name for folder in (committed, fresh) for path in folder.iterdir() if path.suffix in {".py", ".pyi"}}
    _, different, missing = filecmp.cmpfiles(committed, fresh, sorted(names), shallow=False)
    return sorted([*different, *missing])


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        make_proto.generate(Path(folder))
        names = stale(make_proto.ROOT / make_proto.PACKAGE, Path(folder) / make_proto.PACKAGE)
    for name in names:
        print(f"{make_proto.PACKAGE}/{name} is not what proto/ says", file=sys.stderr)
    if names:
        print("run: make proto", file=sys.stderr)
        return 1
    print(f"{make_proto.PACKAGE} is fresh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
