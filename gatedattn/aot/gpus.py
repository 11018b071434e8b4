"""GPUs that are not here: XLA's CUDA compiler needs a description of a GPU, not the GPU.

Sources: NVIDIA's H100 and H200 data sheets (clock, memory); CUDA C++ Programming Guide, technical specifications of compute capability
9.0 (threads, registers, shared memory); NVIDIA H100 architecture white paper (132 multiprocessors, 50 MB of L2 on the SXM module).
"""

from __future__ import annotations

import os

from gatedattn.aot.topologies import Topology
from gatedattn.config import ConfigError

# Fields of XLA's `GpuDeviceInfoProto` (xla/stream_executor/device_description.proto). Memory is the chip's own.
HOPPER = {
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 50 * 2**20,
    "shared_memory_per_core": 228 * 2**10,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "threads_per_core_limit": 2048,
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}
# A GPU's own compilation times several ways to do each matrix product, which takes the GPU.
OPTIONS = {"xla_gpu_autotune_level": 0}
NOTE = ("matrix products as XLA's own kernels with default tiles (xla_gpu_autotune_level=0): a GPU times these and cuBLAS and takes "
        "the faster, with some megabytes of scratch")  # fmt: skip
DEFAULT_FRACTION = 0.75  # of a GPU's memory that JAX takes


def target_config(topology: Topology) -> str:
    """XLA's `GpuTargetConfigProto` in text form."""
    chip = topology.chip
    info = HOPPER | {"memory_bandwidth": round(chip.hbm_bandwidth), "device_memory_size": chip.hbm_bytes}
    return f"""gpu_device_info {{
  {" ".join(f"{name}: {value}" for name, value in info.items())}
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.device_kind}"
"""


def notes(peak_bytes: int, topology: Topology) -> list[str]:
    """What to know about a report."""
    found = [NOTE]
    if peak_bytes > DEFAULT_FRACTION * topology.hbm_bytes:
        found.append(f"JAX takes {DEFAULT_FRACTION:.0%} of a GPU's memory: this step needs XLA_PYTHON_CLIENT_MEM_FRACTION="
                     f"{min(0.97, 0.03 + peak_bytes / topology.hbm_bytes):.2f} or so")  # fmt: skip
    return found


def devices(topology: Topology) -> list:
    """One process a host. Raises `ConfigError` if the compiler is not installed."""
    import jax
    from jax.experimental import topologies

    # Libraries that only a run needs (cuFFT, NCCL ...) may be missing.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = f"{topology.slices}x1x{topology.chips}"
    try:
        return topologies.get_topology_desc("", "cuda", target_config=target_config(topology), topology=shape).devices
    except (RuntimeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"no CUDA compiler for {topology.name} ({first}): pip install 'jax[cuda13]', no GPU needed") from None
