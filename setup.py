"""Builds the CPU kernels; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError

SOURCES = Path("autoprec", "ops", "csrc")
# -ffp-contract=off: the compiler may not fuse operations, else results would depend on it
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi", "-g0"]


class BuildKernels(build_ext):
    """Adds OpenMP where the compiler has it; without it the kernels run on one thread."""

    def build_extensions(self) -> None:
        """Sets the flags of a compiler that takes gcc's, then builds."""
        if self.compiler.compiler_type == "unix":
            openmp = ["-fopenmp"] if self._has_openmp() else []
            for extension in self.extensions:
                extension.extra_compile_args = FLAGS + openmp
                extension.extra_link_args = openmp
        super().build_extensions()

    def _has_openmp(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <omp.h>\nint probe(void) { return omp_get_max_threads(); }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=["-fopenmp"])
                self.compiler.link_shared_object(objects, str(Path(folder, "probe.so")), extra_postargs=["-fopenmp"])
            except (CCompilerError, ExecError):
                return False
        return True


setup(
    ext_modules=[
        Extension(
            "autoprec.ops._C",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            libraries=["m"],
            optional=True,  # without a compiler the reference runs
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
