"""Peak rates of known devices, for the MFU where the job did not tell one."""

from __future__ import annotations

__all__ = ["PEAK_FLOPS", "peak_flops_of"]

PEAK_FLOPS: dict[str, float] = {
    "V100": 125e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "MI250X": 383e12,
    "MI300X": 1307e12,
}
"""Dense bf16 (V100: fp16) FLOP/s of one device, from the makers' data sheets; the longest name that fits wins."""


def peak_flops_of(device: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device by its name, such as ``"cuda:0 NVIDIA H100 80GB HBM3"``; None if it is not known."""
    words = device.replace("-", " ").lower()
    fits = [name for name in PEAK_FLOPS if all(part in words.split() for part in name.lower().split())]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None
