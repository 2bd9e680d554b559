"""Build the stand-in's libraries and load them, before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_LIBRARIES = {
    "cuda": (("runtime.c", "nccl.c"), ()),
    "driver": (("driver.c",), ("-Wl,-soname,libcuda.so.1",)),
    "nvml": (("nvml.c",), ("-Wl,-soname,libnvidia-ml.so.1",)),
}
"""Sources of each library, and the name under which others that need it find it loaded."""


class Missing(Exception):
    """Why there can be no stand-in on this machine."""


def _headers() -> list[Path]:
    """Folders of the headers that came with torch's own libraries.

    Raises:
        Missing: no compiler, no Linux, or torch without CUDA.
    """
    if sys.platform != "linux":
        raise Missing("the stand-in is built for Linux")
    if shutil.which("cc") is None:
        raise Missing("the stand-in needs a C compiler")
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = [
        f.parent for root in roots for name in ("cuda_runtime_api.h", "nccl.h") for f in root.glob(f"*/include/{name}")
    ]
    if not any((f / "cuda_runtime_api.h").exists() for f in found) or not any((f / "nccl.h").exists() for f in found):
        raise Missing("the stand-in needs a torch with CUDA, and the headers that come with it")
    return found


def built() -> dict[str, Path]:
    """The libraries, compiled against the installed headers unless they were already.

    Raises:
        Missing: this machine cannot build them.
        AssertionError: they do not compile: a function here is not what the installed header says.
    """
    headers = _headers()
    sources = sorted(p for p in _HERE.rglob("*") if p.suffix in (".c", ".h"))
    known = hashlib.sha256(b"".join(p.read_bytes() for p in sources) + repr(headers).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"standin-{os.getuid()}-{known}"
    folder.mkdir(exist_ok=True, mode=0o700)
    include = [f"-I{p}" for p in (_HERE / "include", *headers)]
    libraries = {}
    for name, (files, flags) in _LIBRARIES.items():
        libraries[name] = folder / f"lib{name}.so"
        if libraries[name].exists():
            continue
        made = folder / f"{name}.{os.getpid()}"
        command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", *include, *flags, "-o", str(made)]
        done = subprocess.run([*command, *(str(_HERE / f) for f in files), "-lpthread"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.rename(libraries[name])
    return libraries


def load(*, kernels: bool = True) -> None:
    """Have this process and its children see the stand-in's GPUs. Call before torch is imported."""
    assert "torch" not in sys.modules, "torch has already bound to the installed runtime"
    for path in built().values():
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    if kernels:
        from planner_tests.standin.kernels import register

        register()
