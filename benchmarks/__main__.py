"""All that benchmarks/README.md shows, measured again and written there.

python -m benchmarks [--only=peers-float32,operators,growth,costs,startup,loss] [--maxtext=PYTHON] [--render]

Each measurement is a process of its own, one after the other: three quarters of an hour on an idle machine. peers-bfloat16 is run only
when it is named: PyTorch takes minutes a step where the processor has no instructions for bfloat16. They leave their JSON in
benchmarks/results; the README's tables, between the comments that name them, are made from all that is there (--render: that alone).
peers needs the `hf` extra, and MaxText's column an environment with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
# Name of the table -> (module, what it is given).
RUNS = {
    "peers-float32": ("peers", ["--dtype=float32"]),
    "peers-bfloat16": ("peers", ["--dtype=bfloat16"]),
    "operators": ("operators", []),
    "growth": ("growth", []),
    "costs": ("costs", []),
    "startup": ("startup", []),
    "loss": ("loss", []),
}


def render(text: str) -> str:
    """The page with the tables of the results that are there between the comments <!-- NAME --> and <!-- end -->."""
    for name, (module, _) in RUNS.items():
        path = FOLDER / "results" / f"{name}.json"
        if path.exists():
            table = importlib.import_module(f"benchmarks.{module}").table(json.loads(path.read_text()))
            text, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.S)
            if count != 1:
                raise SystemExit(
                    f"{PAGE} must have one place for {name!r}, between <!-- {name} --> and <!-- end -->: it has {count}"
                )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in RUNS if name != "peers-bfloat16"]
    parser.add_argument("--only", type=lambda text: text.split(","), default=usual, help=f"of {', '.join(RUNS)}")
    parser.add_argument("--maxtext", help="the Python of an environment with MaxText")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if unknown := set(args.only) - set(RUNS):
        parser.error(f"--only={','.join(sorted(unknown))}: must be among {', '.join(RUNS)}")
    failed = []
    for name in [] if args.render else args.only:
        module, options = RUNS[name]
        if args.maxtext and module in ("peers", "startup"):
            options = [*options, f"--maxtext={args.maxtext}"]
        print(f"== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", f"benchmarks.{module}", f"--out={FOLDER / 'results' / name}.json", *options]
        if subprocess.run(command, cwd=FOLDER.parent).returncode:
            failed.append(name)
    PAGE.write_text(render(PAGE.read_text()))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; their tables stay as they were")


if __name__ == "__main__":
    main()
