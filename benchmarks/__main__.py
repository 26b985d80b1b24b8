"""`python -m benchmarks` lists the measurements, `python -m benchmarks NAME [--json] [options]` runs one."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def main() -> int:
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name[0] != "_")
    asked = sys.argv[1] if len(sys.argv) > 1 else None
    if asked is None:
        for name in names:
            about = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
            print(f"{name:16} {about}")
        return 0
    if asked not in names:
        print(f"there is no measurement {asked!r}, only {', '.join(names)}", file=sys.stderr)
        return 2
    importlib.import_module(f"benchmarks.{asked}").main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
