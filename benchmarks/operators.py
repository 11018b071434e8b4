"""Where the time of our training step goes on a CPU: by part of the model and kind of operation, and the dearest operations.

python -m benchmarks.operators [--dtype=float32] [--top=12] [--out=benchmarks/results/operators.json]

The work of `benchmarks.step`, three steps under JAX's profiler, whose events are XLA's own operations; several may run at once, so their sum
can exceed the step. "product" is an operation with a matrix product in it.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import tempfile
from pathlib import Path

import jax

from benchmarks.step import Stepper, reference

STEPS = 3
PARTS = ("sdpa", "qkv", "gate", "output", "mlp", "loss", "rest")


def describe(program: str) -> dict[str, dict]:
    """Operation -> part of the model, whether it holds a matrix product, shape and name: from the text of the program."""
    found, products, inside = {}, set(), ""
    for line in program.splitlines():
        if opens := re.match(r"%?([\w.\-]+) .*\{$", line):
            inside = opens[1]
        if not (operation := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\S+) ([a-z][\w\-]*)\(", line)):
            continue
        name, shape, kind = operation.groups()
        path = re.search(r'op_name="([^"]*)"', line)
        path = path[1] if path else ""
        part = next((p for p in PARTS if f"/{p}" in path), "rest")
        called = re.search(r"calls=%?([\w.\-]+)", line)
        if kind == "dot":
            products |= {inside, name}
            part = "loss" if part == "rest" else part  # no other product stands outside the layers
        elif called and called[1] in products:
            products.add(name)
            part = found.get(called[1], {}).get("part", part)
        found[name] = {"part": part, "shape": re.sub(r"\{.*", "", shape), "path": path}
        if kind == "dot":
            found[inside] = found[name]
    return {name: about | {"product": name in products} for name, about in found.items()}


def measure(dtype: str) -> dict:
    stepper = Stepper(reference(dtype))
    stepper.run(1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = stepper.run(STEPS) / STEPS
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    known = describe(stepper.program.as_text())
    times: collections.Counter = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in known and not event.name.startswith(("while", "call", "conditional")):  # these hold others
                    times[event.name] += event.duration_ns / 1e6 / STEPS
    parts: collections.Counter = collections.Counter()
    for name, ms in times.items():
        parts[known[name]["part"], known[name]["product"]] += ms
    return {
        "dtype": dtype,
        "jax": jax.__version__,
        "step_ms": 1e3 * seconds,
        "parts": {part: {"product_ms": parts[part, True], "other_ms": parts[part, False]} for part in PARTS},
        "operations": [{"name": name, "ms": ms} | known[name] for name, ms in times.most_common()],
    }


def table(result: dict, top: int = 12) -> str:
    lines = [
        f"A step of {result['step_ms']:,.0f} ms, {result['dtype']}:\n\n| part | matrix products, ms | the rest, ms |\n| --- | --- | --- |\n"
    ]
    for part, row in result["parts"].items():
        lines.append(f"| {part} | {row['product_ms']:,.0f} | {row['other_ms']:,.0f} |\n")
    total = [sum(row[key] for row in result["parts"].values()) for key in ("product_ms", "other_ms")]
    lines.append(
        f"| all | {total[0]:,.0f} | {total[1]:,.0f} |\n\n| the dearest | ms | result | where |\n| --- | --- | --- | --- |\n"
    )
    for row in result["operations"][:top]:
        where = "/".join(row["path"].split("/")[-3:])
        lines.append(f"| {'product' if row['product'] else 'other'} | {row['ms']:,.0f} | `{row['shape']}` | {where} |\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    args = parser.parse_args()
    result = measure(args.dtype)
    print(table(result, args.top))
    if args.out:
        result["operations"] = result["operations"][:60]
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
