"""Claims about finding the CUDA runtime, in a process without one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_missing_runtime_is_named() -> None:
    code = "from ops.gpu.cuda_runtime import runtime; runtime()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert "PyTorch has loaded no libcudart" in done.stderr


def test_loaded_runtime_is_found_whatever_its_version(tmp_path: Path) -> None:
    library = tmp_path / "libcudart.so.99"
    source = "int cudaEventQuery(void *event) { return event == (void *)7 ? 600 : 0; }"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input=source,
        text=True,
        check=True,
    )
    code = (
        "import ctypes, sys; from ops.gpu.cuda_runtime import query_event, runtime; "
        "kept = ctypes.CDLL(sys.argv[1]); "
        "print(query_event(runtime(), 7), query_event(runtime(), 8))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.split() == ["600", "0"]
