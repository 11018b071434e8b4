"""Peak bf16 matmul rates, for model FLOPs utilisation (MFU)."""

# Dense bf16 FLOP/s of one JAX device, by what its `device_kind` contains; the first match counts.
PEAK_FLOPS = (
    # Google Cloud documentation, "TPU versions". A v4 or v5p chip is one device; a TPU7x chip is two.
    ("TPU7x", 2307e12 / 2),
    ("TPU v6", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
    # NVIDIA data sheets, figures without sparsity: A100, H100 (SXM, NVL, PCIe), H200, HGX B200.
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device; None for kinds not in the table (CPUs among them), whose MFU is then not reported."""
    return next((peak for name, peak in PEAK_FLOPS if name in device_kind), None)
