"""What works on this machine, and what to do where it does not: versions, native core, GPU, notebook front end."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Finding", "doctor"]

UNTESTED_ON_GPU = (
    "capture.clock.CudaClock and capture.device_spans (device times; tested on a simulated device), "
    "capture.steps (pinned copies of losses, allocator peaks), "
    "capture.collectives on NCCL, capture.telemetry through NVML"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: ``ok``, ``note`` or ``bad``, what was looked at, what was found, and the cure."""

    level: str
    topic: str
    found: str
    cure: str = ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def doctor(run_dir: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Return what was found on this machine.

    Parameters
    ----------
    run_dir : path, optional
        Also look whether this folder can be written, and how fast.
    """
    out = [Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}"), _core()]
    out += _packages()
    out += [_gpu(), _notebook(), _chromium()]
    if run_dir is not None:
        out.append(_folder(Path(run_dir)))
    return out


def _core() -> Finding:
    if os.environ.get("MAPPNB_PURE_PYTHON"):
        return Finding(
            "note", "native core", "switched off by MAPPNB_PURE_PYTHON", "unset it: recording costs ten times as much"
        )
    try:
        from mappnb import _core

        return Finding("ok", "native core", str(getattr(_core, "__file__", "loaded")))
    except ImportError as err:
        return Finding(
            "bad",
            "native core",
            f"not loaded ({err})",
            "pip install --force-reinstall mappnb; in a checkout: pip install -e .",
        )


def _packages() -> list[Finding]:
    rows = []
    for package, extra in (
        ("torch", "megatron"),
        ("megatron-core", "megatron"),
        ("nvidia-ml-py", "megatron"),
        ("psutil", ""),
    ):
        version = _version(package)
        cure = f"pip install 'mappnb[{extra}]'" if extra else f"pip install {package}"
        rows.append(
            Finding("ok", package, version)
            if version
            else Finding("note", package, "not installed", f"{cure}, to record training")
        )
    rows += [Finding("ok", p, v) for p in ("numpy", "pandas", "xarray", "zarr", "pyarrow") if (v := _version(p))]
    return rows


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("note", "gpu", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Finding("note", "gpu", "no CUDA device here; recording uses the CPU clock")
    return Finding("note", "gpu", f"{torch.cuda.device_count()} device(s); untested on GPU: {UNTESTED_ON_GPU}")


def _notebook() -> Finding:
    versions = {
        p: _version(p)
        for p in ("jupyterlab", "jupyterlab_widgets", "ipywidgets", "anywidget", "bokeh", "jupyter_bokeh")
    }
    text = ", ".join(f"{p} {v}" for p, v in versions.items() if v)
    missing = [p for p, v in versions.items() if v is None]
    if missing:
        return Finding(
            "note", "notebook", f"{text or 'nothing'}; missing: {', '.join(missing)}", "pip install 'mappnb[notebook]'"
        )
    return Finding("ok", "notebook", f"{text} (kernel {sys.prefix})")


def _chromium() -> Finding:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    return Finding(
        "ok" if found else "note", "chromium", found or "not found", "" if found else "only the browser tests need it"
    )


def _folder(path: Path) -> Finding:
    from mappnb.segment_writer import write_file

    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".mappnb-doctor-{os.getpid()}"
        write_file(probe, lambda sink: sink.write(b"x" * 65536))
        os.link(probe, probe.with_suffix(".link"))
        probe.with_suffix(".link").unlink()
        probe.unlink()
    except OSError as err:
        return Finding(
            "bad",
            "run directory",
            f"{path}: {err}",
            "choose a folder that every rank can write and that allows hard links",
        )
    free = shutil.disk_usage(path).free
    return Finding("ok" if free > 10**9 else "note", "run directory", f"{path}: writable, {free / 1e9:.1f} GB free")
