"""`--mode=aot`: the training step compiled for a TPU pod or a GPU cluster on a computer that has none.

XLA's TPU and CUDA compilers run on any Linux CPU. They tell whether a run fits, how it is sharded, and what it must move; with a
chip's published rates that bounds the time of a step.
"""

from __future__ import annotations

import json
from pathlib import Path

from gatedattn.config import ConfigError, RunConfig


def main(config: RunConfig, topology_name: str, report: str | None = None, fit: bool = False) -> int:
    """Print a table, write the report as JSON, and return the exit code: 2 if the step does not fit.

    Raises `ConfigError` if the run cannot be compiled at all.
    """
    from gatedattn.aot import fit as search
    from gatedattn.aot.compile import TooLarge, step
    from gatedattn.aot.topologies import parse

    topology = parse(topology_name)

    def say(text: str) -> None:
        print(text, flush=True)

    say(f"compiling {config.name} for {topology.name}: {topology.devices} devices ({topology.chip.device_kind})")
    try:
        compiled = search.best(config, topology, say) if fit else step(config, topology)
    except TooLarge as error:
        say(f"too large: {config.model.remat} recomputation and {config.train.microbatches} microbatches: {error}")
        fitting = None if fit else search.nearest(config, topology, error, say)
        if fitting:
            say(f"would fit: {search.describe(fitting.report)}\n  {options(fitting.report)}")
        else:
            say("nothing smaller fits: take more chips, or a mesh that cuts the parameters further (mesh.fsdp, mesh.expert)")
        return 2
    if fit:
        say(f"best: {options(compiled.report)}")
    say(table(compiled.report))
    if report:
        try:
            Path(report).write_text(json.dumps(compiled.report, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--report={report}: {error.strerror}") from None
    return 0


def options(report: dict) -> str:
    """The command line's options for what a search found."""
    return f"--config.model.remat={report['remat']} --config.train.microbatches={report['microbatches']}"


def table(report: dict) -> str:
    """The report for people."""
    gb, roofline = 1e9, report["roofline"]
    ways = ", ".join(f"{name} {size}" for name, size in report["mesh"].items()) or "one device"
    level = "" if report["optimization_level"] == "UNKNOWN" else f" at level {report['optimization_level']}"
    sequences = report["batch_size"] / report["microbatches"]
    kernel = report["kernel"] + f" ({'; '.join(report['kernels_passed_over'])})" * bool(report["kernels_passed_over"])
    experts = f"experts {report['expert_kernel']}, " if report["expert_kernel"] else ""
    lines = [
        f"{report['name']}: {report['params'] / 1e9:.2f} B parameters on {report['topology']} ({ways})",
        f"  batch          {report['batch_size']} x {report['seq_len']} in {report['microbatches']} microbatches of {sequences:g}; "
        f"attention {kernel}, {experts}recomputation {report['remat']}",
        f"  memory         {report['peak_bytes'] / gb:.2f} of {report['hbm_bytes'] / gb:.2f} GB a device: "
        f"arguments {report['argument_bytes'] / gb:.2f}, temporaries {report['temp_bytes'] / gb:.2f}",
        f"  compile        {report['trace_seconds']:.1f} s tracing, {report['compile_seconds']:.1f} s XLA{level}",
        f"  model FLOPs    {report['model_flops_per_step']:.4g} a step; {report['executed_flops_per_step']:.4g} with what is computed twice",
        "  collectives    per device and step",
    ]
    for kind, entry in report["collectives"].items():
        lines.append(
            f"    {kind:20s} {entry['count']:6d}  {entry['bytes'] / gb:9.3f} GB, largest {entry['largest_bytes'] / gb:.3f} GB"
        )
    busy = ", ".join(f"{name} {roofline[name + '_seconds']:.3f} s" for name in ("compute", "hbm", "interconnect", "network"))
    lines += [
        f"  roofline       {busy}",
        f"                 at best {roofline['step_seconds']:.3f} s a step, MFU <= {roofline['mfu_bound']:.1%} ({roofline['bound_by']})",
    ]
    if report["loops_of_unknown_length"]:
        lines.append(f"  note           {report['loops_of_unknown_length']} loops of unknown length counted once (attention in chunks): "
                     "memory and interconnect times are too low")  # fmt: skip
    lines += [f"  note           {note}" for note in report["notes"]]
    return "\n".join(lines)
