"""What a run was made on: device, driver, libraries and settings."""

import os
import platform
import subprocess
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

# Modules beside torch and numpy: the name of their package, and whether every stage needs it.
PACKAGES: dict[str, tuple[str, bool]] = {
    "scipy": ("scipy", True),
    "xarray": ("xarray", True),
    "h5py": ("h5py", True),
    "PIL": ("pillow", True),
    "pyhessian": ("pyhessian", False),
    "curvlinops": ("curvlinops-for-pytorch", False),
}
STATE = (
    "name", "driver_version", "memory.total", "pstate", "temperature.gpu", "power.draw", "power.limit",
    "clocks.current.sm", "clocks.current.memory", "clocks.max.sm", "persistence_mode", "compute_mode",
)  # fmt: skip


def missing() -> tuple[list[str], list[str]]:
    """Names of missing packages: those without which nothing runs, and those whose rows will say so."""
    absent = {name: needed for module, (name, needed) in PACKAGES.items() if find_spec(module) is None}
    return [name for name, needed in absent.items() if needed], [name for name, needed in absent.items() if not needed]


def origin(device: torch.device, *, small: bool) -> str:
    """To what rows belong, so that those of two machines never stand in one table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    return f"{name}, PyTorch {torch.__version__}{', tiny sizes' if small else ''}"


def facts(device: torch.device) -> dict[str, str]:
    """Machine, versions and settings, by name."""
    found = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability " + ".".join(
            map(str, torch.cuda.get_device_capability(device))
        )
        found |= {f"nvidia-smi {name}": value for name, value in _nvidia_smi(device).items()}
        found["CUDA"], found["cuDNN"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
    found["CPU"] = f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    found["Python"], found["PyTorch"] = platform.python_version(), str(torch.__version__)
    for name in ("numpy", "triton", *(name for name, _ in PACKAGES.values())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    found["float32 products"] = f"matrices {torch.get_float32_matmul_precision()}, cuDNN TF32 {_cudnn_tf32()}"
    return found


def _cudnn_tf32() -> str:
    try:
        return "on" if torch.backends.cudnn.allow_tf32 else "off"
    except RuntimeError as error:  # set by the newer names
        return str(error).partition(".")[0]


def _nvidia_smi(device: torch.device) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"state": f"not readable ({type(error).__name__})"}
    return dict(zip(STATE, (value.strip() for value in answer.split(",")), strict=False))


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
