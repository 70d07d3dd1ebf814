"""Compiles the C kernels of this folder. It uses the standard library only, because it also runs
without this package.

    python build.py [FOLDER]

Compiles every kernel that FOLDER (default: this folder) does not have yet. ``CC`` names the
compiler. If a kernel cannot be compiled, it prints a one-line warning and exits with code 0,
because the fallback in torch or numpy gives the same results, only slower.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

_FLAGS = ("-std=c11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared")
_FAST_MATH = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
# Flag sets per kernel, best first. The second is for compilers without OpenMP: one thread. No flag
# depends on this machine's processor, so an image or a wheel can carry the libraries to others.
_KERNELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "layers": ((*_FAST_MATH, "-fopenmp"), (*_FAST_MATH, "-fopenmp-simd", "-Wno-unknown-pragmas")),
    "segments": ((),),
}


def library(name: str, folder: Path = HERE) -> Path:
    """The path of a kernel's library in ``folder``, whether it exists or not."""
    digest = hashlib.sha256((HERE / f"{name}.c").read_bytes()).hexdigest()
    return folder / f"_{name}-{digest[:16]}.so"


def compile_kernels(folder: Path = HERE) -> tuple[list[Path], str]:
    """Compile the kernels that ``folder`` lacks. Returns all libraries there and, if some are
    missing, a warning of one line."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    wanted = {name: library(name, folder) for name in _KERNELS}
    missing = [name for name, path in wanted.items() if not path.exists()]
    if missing and not (compiler and shutil.which(compiler[0])):
        reason = f"the C compiler {' '.join(compiler)!r} was not found"
    else:
        missing = [name for name in missing if not _compile(compiler, name, wanted[name])]
        reason = f"{' '.join(compiler)!r} failed"
    fix = "install a C compiler (Debian: gcc) or set CC, then run scripts/kernel"
    warning = f"CPU kernels not compiled ({', '.join(missing)}): {reason}; torch and numpy are used, which is slower. Fix: {fix}"
    return [path for path in wanted.values() if path.exists()], warning if missing else ""


def _compile(compiler: list[str], name: str, target: Path) -> bool:
    """Compile one kernel with the first flags that work; returns whether one did."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        for flags in _KERNELS[name]:
            command = [*compiler, *_FLAGS, *flags, "-o", str(made), str(HERE / f"{name}.c"), "-lm"]
            if subprocess.run(command, check=False).returncode == 0:
                for old in target.parent.glob(f"_{name}-*.so"):
                    old.unlink(missing_ok=True)
                made.replace(target)
                return True
    except OSError as error:  # the compiler cannot be executed
        print(error, file=sys.stderr)
    finally:
        made.unlink(missing_ok=True)
    return False


if __name__ == "__main__":
    _, problem = compile_kernels(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE)
    if problem:
        print(problem, file=sys.stderr)
