"""The native recorder without a device, and how it is built.

The claims in `native/claims.cpp` are about all that needs no PyTorch, and run under sanitizers;
those in `native/kernel_claims.cpp` are about the dispatcher kernels, in the library that workers
load. Each runs in a process of its own. CUDA's driver is a stand-in with the same symbols
(`native/stand_in_driver.cpp`), NCCL is its calls of the profiler plugin. Nothing here has run on a
GPU. g++ and clang++ must each compile all sources without a warning; the package `ziglang` has a
clang++ for machines that have none.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from keepstep.monitor.telemetry import native
from keepstep.monitor.telemetry.native import (
    PLUGIN_VARIABLE,
    SOURCES,
    library_path,
    name_as_nccl_plugin,
)
from tests.adaptive_timeouts import patient

TESTS = Path(__file__).with_name("native")
WITHOUT_DRIVER = "process_without_the_driver_observes_nothing_and_loads_nothing"
WITHOUT_TORCH = sorted(path for path in SOURCES.glob("*.cpp") if path.name != "kernels.cpp")
COMPILER = shutil.which("g++") or shutil.which("clang++")
COMPILERS = [
    pytest.param(("g++",), id="g++"),
    pytest.param(
        ("clang++",) if shutil.which("clang++") else (sys.executable, "-m", "ziglang", "c++"),
        id="clang++",
        marks=pytest.mark.campaign,
    ),
]
STRICT = ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}")
SANITIZERS = {
    "thread": ("-fsanitize=thread", "-O1", "-g"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"),
}
TORCH = Path(torch.__file__).parent
WITH_TORCH = (
    "-isystem", str(TORCH / "include"), "-isystem", str(TORCH / "include/torch/csrc/api/include")
)  # fmt: skip


def claims_of(source: str) -> list[str]:
    return re.findall(r"^(?:RANK_)?CLAIM\((\w+)\)", (TESTS / source).read_text(), re.MULTILINE)


CHECKS = [
    *((sanitizer, claim) for sanitizer in SANITIZERS for claim in claims_of("claims.cpp")),
    *(("kernels", claim) for claim in claims_of("kernel_claims.cpp")),
]


@cache
def fixed_layout() -> tuple[str, ...]:
    """The prefix of a command that gives it a layout of memory that ThreadSanitizer knows.

    Newer kernels draw others; some containers refuse that.
    """
    prefix = ("setarch", platform.machine(), "-R")
    is_allowed = shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], check=False)
    return prefix if is_allowed and is_allowed.returncode == 0 else ()


def compile_with(*arguments: str | Path) -> None:
    done = subprocess.run(
        list(map(str, arguments)), capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Program:
    claims: Path
    driver: Path
    recorder: Path | None = None

    @classmethod
    def build(cls, place: Path, kind: str) -> Program:
        (place / kind).mkdir()
        program = cls(
            place / kind / "claims",
            place / kind / "libcuda.so.1",
            native.build() if kind == "kernels" else None,
        )
        assert COMPILER is not None
        flags = (COMPILER, *STRICT, *SANITIZERS.get(kind, ("-O0",)))
        compile_with(
            *flags, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1",
            "-o", program.driver, TESTS / "stand_in_driver.cpp",
        )  # fmt: skip
        if kind == "kernels":
            compile_with(
                *flags, *WITH_TORCH, "-o", program.claims, TESTS / "kernel_claims.cpp",
                f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ldl",
            )  # fmt: skip
        else:
            compile_with(*flags, "-o", program.claims, TESTS / "claims.cpp", *WITHOUT_TORCH, "-ldl")
        return program

    def check(self, claim: str) -> str:
        """Return what is wrong with a claim."""
        libraries = [path for path in (self.driver, self.recorder) if path is not None]
        if claim == WITHOUT_DRIVER:
            libraries = []
        done = subprocess.run(
            [*fixed_layout(), self.claims, claim, *libraries],
            # What is not freed is kept on purpose, and looking for leaks needs ptrace.
            env={
                **os.environ,
                "ASAN_OPTIONS": "detect_leaks=0",
                "LD_LIBRARY_PATH": str(self.driver.parent),
            },
            capture_output=True, text=True, timeout=patient(120), check=False,
        )  # fmt: skip
        return "" if done.returncode == 0 else f"{done.returncode} {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], str]:
    """The findings about each claim. All at once: most of their time is waiting."""
    place = tmp_path_factory.mktemp("native")
    kinds = ("kernels", *SANITIZERS)
    with ThreadPoolExecutor(4) as pool:
        built = pool.map(lambda kind: Program.build(place, kind), kinds)
        programs = dict(zip(kinds, built, strict=True))
        found = pool.map(lambda check: programs[check[0]].check(check[1]), CHECKS)
        return dict(zip(CHECKS, found, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler here")
@pytest.mark.parametrize(("kind", "claim"), CHECKS)
def test_claim_holds(faults: Mapping[tuple[str, str], str], kind: str, claim: str) -> None:
    assert faults[kind, claim] == ""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_sources_compile_without_a_warning(
    compiler: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "zig"))
    # What needs no PyTorch is compiled as strictly for the claims, by g++ where it is there.
    is_checked = shutil.which(compiler[0]) == COMPILER
    sources = [SOURCES / "kernels.cpp"] if is_checked else SOURCES.glob("*.cpp")
    for source in sorted(sources):
        compile_with(*compiler, *STRICT, *WITH_TORCH, "-c", source, "-o", tmp_path / source.stem)


def test_library_is_built_again_when_any_of_its_sources_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SOURCES, tmp_path / "native")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "native")
    paths = {library_path()}
    sources = sorted((tmp_path / "native").iterdir())
    for source in sources:
        source.write_bytes(source.read_bytes() + b"\n")
        paths.add(library_path())
    assert len(paths) == len(sources) + 1


def test_nccl_knows_the_library_unless_the_user_named_another(tmp_path: Path) -> None:
    ours, theirs = str(library_path()), str(tmp_path / "libnccl-profiler.so")
    outdated = str(library_path().with_name("operations-of-another-version.so"))
    for named, expected in ((None, ours), (theirs, theirs), ("none", "none"), (outdated, ours)):
        environment = {} if named is None else {PLUGIN_VARIABLE: named}
        assert name_as_nccl_plugin(environment) == (expected == ours)
        assert environment == {PLUGIN_VARIABLE: expected}


def test_path_that_nccl_would_cut_off_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE_DIR", str(tmp_path / ("a" * 250)))
    environment: dict[str, str] = {}
    assert not name_as_nccl_plugin(environment)
    assert environment == {}
