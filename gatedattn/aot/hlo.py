"""Reads what XLA made of a program: its collectives and its memory traffic, each counted as often as it runs.

`cost_analysis()` counts the body of a loop once. Here a computation's weight is the product of the trip counts of the loops around it.
The text is that of `compiled.as_text()`: one device's program.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
# Instructions that move no data by themselves.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all", "iota",
    "partition-id", "replica-id", "opt-barrier", "optimization-barrier", "add-dependency", "async-done", "async-update",
}  # fmt: skip
ENTERS = {"while", "call", "conditional", "fusion", "async-start"}  # instructions that run other computations
GROUPS = r"replica_groups=(mesh\[[^\]]*\] \{[^}]*\}|\[[\d,]*\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{[\d,{} ]*\})"
BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Shape:
    """An array in memory; `space` 0 is the device's main memory (HBM), 1 a TPU's VMEM or a GPU's buffers for collectives, 5 the host's."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.dtype)
        if bits is None:
            bits = int(re.search(r"\d+", self.dtype)[0])  # f32, bf16, s4, u8, f8e4m3fn, c64
        return math.prod(self.dims) * bits // 8


@dataclass
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result; several for a tuple
    operands: tuple[str, ...]
    rest: str  # attributes
    root: bool = False

    def called(self) -> list[str]:
        found = re.findall(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", self.rest)
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.rest):
            found += re.findall(r"%?([\w.\-]+)", branches[1])
        return found


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)


@dataclass(frozen=True)
class Collective:
    """A collective operation: `times` a step, over groups of `group` devices, `bytes` of operands on each device.

    `spans`: over how many slices (or hosts) a group spreads, at most. Between them goes the network; what enters a slice over it is
    shared out evenly to the group's devices there, and handed on inside.
    """

    kind: str
    name: str
    times: int
    bytes: int
    group: int
    shapes: tuple[Shape, ...]
    spans: int = 1

    @property
    def payload(self) -> int:
        """Bytes of the whole array: what an all-gather makes, what the others take."""
        return self.bytes * (self.group if self.kind == "all-gather" else 1)

    @property
    def received(self) -> float:
        """Bytes each device receives when the work is shared evenly (a ring): the least that must move."""
        n = max(self.group, 1)
        share = {
            "all-gather": n - 1.0,
            "all-reduce": 2 * (n - 1) / n,
            "collective-permute": 1.0,
            "collective-broadcast": 1.0,
            "recv": 1.0,
        }
        return self.bytes * share.get(self.kind, (n - 1) / n)

    @property
    def network(self) -> float:
        """Of these, the least that comes from other slices."""
        n, slices = self.group, self.spans
        match self.kind:
            case _ if slices == 1:
                return 0.0
            case "all-gather" | "all-reduce" | "reduce-scatter":  # once a slice, what the others have
                return self.received * (slices - 1) / (n - 1)
            case "collective-broadcast":
                return self.received * slices / n
            case "collective-permute" | "recv":
                return self.received
        return self.bytes * (slices - 1) / slices  # all-to-all: each pair of devices has its own

    @property
    def wire(self) -> float:
        """And the rest, over the links inside a slice."""
        return self.received - self.network


class Program:
    """A compiled module. `slice_of[i]`: the slice (or host) of the i-th device of the mesh; all in one by default. `fast_memory`: space 1
    is a memory of its own (a TPU's VMEM), not a part of the main one (a GPU's buffers for collectives)."""

    def __init__(self, text: str, slice_of: list[int] | None = None, fast_memory: bool = True):
        self.computations, self.entry = _parse(text)
        partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        self.partitions = int(partitions[1]) if partitions else 1
        self.slice_of = slice_of or [0] * self.partitions
        self.main_memory = (0,) if fast_memory else (0, 1)
        self.unknown_loops: list[str] = []  # whose trip count is not written down: counted as one
        self.weights = self._weights()

    def _weights(self) -> dict[str, tuple[int, bool]]:
        """Computation -> how often it runs in a step, and whether its instructions are whole operations (not inside a fusion)."""
        weights: dict[str, tuple[int, bool]] = {}

        def visit(name: str, times: int, whole: bool):
            seen, _ = weights.get(name, (0, whole))
            weights[name] = (seen + times, whole)
            for instruction in self.computations[name].instructions.values():
                if instruction.opcode in ENTERS:
                    inner = times * (self.trips(instruction) if instruction.opcode == "while" else 1)
                    for called in instruction.called():
                        if called in self.computations:
                            visit(called, inner, whole and instruction.opcode not in ("fusion", "async-start"))

        visit(self.entry, 1, True)
        return weights

    def trips(self, loop: Instruction) -> int:
        """Trip count of a while: XLA's own, or the constant that its condition compares with."""
        if known := re.search(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)', loop.rest):
            return int(known[1])
        condition = self.computations[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]]
        if condition.root.opcode == "compare" and "direction=LT" in condition.root.rest:
            for operand in condition.root.operands:
                constant = condition.instructions.get(operand)
                if constant and constant.opcode == "constant" and (value := re.match(r"\(?(\d+)\)?", constant.rest)):
                    return int(value[1])
        if loop.name not in self.unknown_loops:
            self.unknown_loops.append(loop.name)
        return 1

    def collectives(self) -> Iterator[Collective]:
        for name, (times, _) in self.weights.items():
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                kind = instruction.opcode.removesuffix("-start")
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # what the TPU compiler makes of one: a fusion that keeps its part of the sum
                if kind == "recv" and "xla_megascale_runtime" in instruction.rest:  # from another TPU slice
                    yield Collective(
                        kind, instruction.name, times, instruction.shapes[0].bytes, 2, instruction.shapes[:1], spans=2
                    )
                if kind in COLLECTIVES:
                    groups = self.groups(instruction)
                    operands = _operand_shapes(computation, instruction)
                    yield Collective(
                        kind, instruction.name, times, sum(s.bytes for s in operands), len(groups[0]) if groups else 1, operands,
                        max((len({self.slice_of[device] for device in group}) for group in groups), default=1),
                    )  # fmt: skip

    def groups(self, instruction: Instruction) -> list[list[int]]:
        """The groups of devices (by their place in the mesh) that take part in a collective together."""
        if pairs := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", instruction.rest):
            return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", pairs[1])]
        written = re.search(GROUPS, instruction.rest)
        return _groups(written[1] if written else "{}", self.partitions)

    def traffic(self) -> int:
        """Bytes read from and written to the device's main memory in a step, as XLA's own cost model counts them.

        Every operation reads its operands and writes its result once; of an array from which a slice is taken, or into which one
        is written, only the slice counts. What a TPU keeps in VMEM, and whatever a custom kernel reads twice, does not.
        """
        return sum(
            times * self.moved(self.computations[name], instruction)
            for name, (times, whole) in self.weights.items()
            if whole
            for instruction in self.computations[name].instructions.values()
        )

    def moved(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes of main memory that one run of an instruction touches."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-done", "-update")):
            return 0
        operands = [computation.instructions[name].shapes for name in instruction.operands if name in computation.instructions]
        reads = [self._main(shapes) for shapes in operands]
        results = instruction.shapes
        if opcode.endswith("-start"):  # the result is a tuple of operands, results and contexts
            done, given = opcode.removesuffix("-start"), sum(map(len, operands))
            if done == "fusion" or done in COLLECTIVES:
                opcode, results = done, results[given if len(results) > given else 0 :]
            else:
                results = sorted(results, key=lambda s: self._main([s]))[-1:]
        writes = self._main(results)
        if opcode == "fusion" and (inner := self.computations.get(instruction.called()[0])):
            return sum(map(min, reads, _parameter_reads(inner, reads))) + min(writes, _root_writes(inner, writes))
        return _slice_aware(opcode, reads, writes)

    def _main(self, shapes) -> int:
        """Bytes in the device's main memory."""
        return sum(s.bytes for s in shapes if s.space in self.main_memory)


def _slice_aware(opcode: str, reads: list[int], writes: int) -> int:
    match opcode:
        case "dynamic-slice" | "slice" | "gather":
            return 2 * writes
        case "dynamic-update-slice":
            return 2 * reads[1]
        case "scatter":
            return 2 * sum(reads[2:]) + reads[1]
    return sum(reads) + writes


def _parameter_reads(inner: Computation, reads: list[int]) -> list[int]:
    """For each parameter of a fusion, the bytes of it that are needed."""
    needed = list(reads)
    users: dict[str, list[Instruction]] = {}
    for instruction in inner.instructions.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)

    def uses(name: str) -> Iterator[tuple[str, Instruction]]:
        for user in users.get(name, ()):
            if user.opcode in ("bitcast", "reshape", "copy", "transpose"):
                yield from uses(user.name)
            else:
                yield name, user

    for parameter in (i for i in inner.instructions.values() if i.opcode == "parameter"):
        number = int(re.match(r"\(?(\d+)", parameter.rest)[1])
        if number >= len(needed):
            continue
        total = 0
        for name, user in uses(parameter.name):
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += sum(s.bytes for s in user.shapes)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # written in place
            else:
                total = needed[number]
                break
        needed[number] = total
    return needed


def _root_writes(inner: Computation, writes: int) -> int:
    """Bytes that a fusion writes: of a dynamic-update-slice only the update."""
    root = inner.root
    ends = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for end in ends:
        while end.opcode in ("bitcast", "reshape", "copy") and end.operands:
            end = inner.instructions[end.operands[0]]
        if end.opcode == "dynamic-update-slice":
            total += sum(s.bytes for s in inner.instructions[end.operands[1]].shapes)
        else:
            total += sum(s.bytes for s in end.shapes)
    return total if ends else writes


def _operand_shapes(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    return tuple(s for name in instruction.operands if name in computation.instructions
                 for s in computation.instructions[name].shapes)  # fmt: skip


@functools.cache
def _groups(text: str, partitions: int) -> list[list[int]]:
    """The three ways in which XLA writes them: `{{0,1},{2,3}}`; `[4,2]<=[2,4]T(1,0)`, the numbers 0 ... in the second shape, transposed,
    in rows of the first; `mesh['x'=2,'y'=4] {'y'}`, the devices of a mesh that differ along y. `'y':(2)2` is a part of an axis: 2
    of its 4 places, each 4 / (2 * 2) apart."""
    if iota := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, axes = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        numbers = np.arange(math.prod(dims)).reshape(dims)
        return (numbers if axes is None else numbers.transpose(axes)).reshape(shape).tolist()
    if mesh := re.fullmatch(r"mesh\[(.*)\] \{(.*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        wanted = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[2])
        dims, along = [], []
        for name, size in sizes.items():
            cuts = {(int(before or 1), int(part or size)) for axis, before, part in wanted if axis == name}
            inner = 1
            for before, part in sorted(cuts):
                dims += [before // inner, part]
                along.append(len(dims) - 1)
                inner = before * part
            dims.append(size // inner)
        numbers = np.arange(math.prod(dims)).reshape(dims)
        rest = [i for i in range(len(dims)) if i not in along]
        return numbers.transpose(rest + along).reshape(-1, math.prod(dims[i] for i in along)).tolist()
    groups = [[int(n) for n in re.findall(r"\d+", group)] for group in re.findall(r"\{([\d, ]+)\}", text)]
    return groups or [list(range(partitions))]


# --- the text ----------------------------------------------------------------------------------------------------------------


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if current is None:
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line):
                if not line.startswith("HloModule"):
                    current = Computation(head[2])
                    computations[head[2]] = current
                    entry = head[2] if head[1] else entry
        # Only that: a custom kernel's settings have lines of their own, such as "}}, ...".
        elif re.fullmatch(r"\}( // .*)?", line.rstrip()):
            current = None
        elif (instruction := _instruction(line)) is not None:
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    if cut := [c.name for c in computations.values() if not any(i.root for i in c.instructions.values())]:
        raise ValueError(f"no ROOT in {', '.join(cut)}: XLA's text has changed, read its numbers with care")
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    left, equals, right = line.partition(" = ")
    if not equals:
        return None
    shape, right = _balanced(right) if right.startswith("(") else right.split(" ", 1)
    opcode, _, _ = right.lstrip().partition("(")
    inside, rest = _balanced(right.lstrip()[len(opcode) :])
    words = left.split()
    # A parameter's number and a constant's value stand where other instructions have operands.
    literal = opcode in ("parameter", "constant")
    operands = () if literal else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(words[-1].lstrip("%"), opcode, _shapes(shape), operands, inside if literal else rest, words[0] == "ROOT")


def _balanced(text: str) -> tuple[str, str]:
    """`(...)`, and what comes after it."""
    depth = 0
    for end in re.finditer(r"[()]", text):
        depth += 1 if end[0] == "(" else -1
        if depth == 0:
            return text[: end.end()], text[end.end() :]
    return text, ""


@functools.cache
def _shapes(text: str) -> tuple[Shape, ...]:
    found = []
    for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", text):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Shape(dtype, tuple(int(n.strip("<=")) for n in dims.split(",") if n), int(space[1]) if space else 0))
    return tuple(found)
