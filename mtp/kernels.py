"""Products of a few rows in C: compiled once per machine, measured, and used where they are faster.

Knows: how `kernels.c` becomes functions, for which numbers of rows this CPU profits, and what they take: float32 with
matrices in float32 or bfloat16, dense, on a CPU, without gradient. Refuses to know: which modules use them, and blocks
(`mtp.one_call`); and to be needed: without a compiler there are none, and everything is computed by torch.

Shapes: n rows, D inputs, V outputs.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOURCE = Path(__file__).with_name("kernels.c")
MOST_ROWS = 32
_TRIED = (*range(1, 9), 12, 16, 24, MOST_ROWS)  # what lies between behaves as the next larger one
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
_TIMEOUT = 120  # seconds
_TRIAL_MATRICES, _TRIAL_SHAPE, _TRIAL_ROUNDS = 24, (1536, 576), 5
_TIE = 1.1  # in favour of the kernels, which can also run blocks in one call
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class NoKernels(Exception):
    """Why there are none on this machine."""


class Matrix(ctypes.Structure):
    """As in the source. It keeps no tensor alive."""

    _fields_ = (("weights", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG), ("half", _INT))

    @classmethod
    def of(cls, weights: Tensor, bias: Tensor | None = None) -> "Matrix":
        """Weights [V, D] in float32 or bfloat16, and a bias [V] in float32."""
        place = None if bias is None else bias.data_ptr()
        return cls(weights.data_ptr(), place, weights.shape[1], weights.shape[0], weights.dtype == torch.bfloat16)


class Kernels:
    """The functions of a compiled `kernels.c`.

    Args:
        library: path of the shared object.
        rows: for which numbers of rows `product` is to be used; None measures it.
    """

    def __init__(self, library: Path, rows: frozenset[int] | None = None) -> None:
        try:
            self.library = ctypes.CDLL(str(library))
            self._product, self._rms_norm = self.library.product, self.library.rms_norm
        except (OSError, AttributeError) as error:
            raise NoKernels(f"{library} cannot be loaded ({error})") from None
        self._product.argtypes = [ctypes.POINTER(Matrix), _INT, _POINTER, _POINTER, _INT]
        self._rms_norm.argtypes = [_INT, _LONG, _POINTER, _POINTER, ctypes.c_float, _POINTER]
        self._product.restype = self._rms_norm.restype = None
        self._check()
        self.rows = faster_rows(self) if rows is None else rows

    def __deepcopy__(self, _: object) -> "Kernels":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # heads that are written somewhere else have none there

    def take(self, hidden: Tensor, matrix: Tensor) -> bool:
        """Whether `product` is to compute this one."""
        rows = hidden.numel() // hidden.shape[-1]
        return (
            rows in self.rows
            and hidden.dtype == torch.float32
            and matrix.dtype in (torch.float32, torch.bfloat16)
            and matrix.device.type == "cpu"
            and plain(matrix)
            and not _recorded(hidden, matrix)
        )

    def product(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """hidden [..., D], n <= 32 rows in all, times matrix [V, D] transposed: [..., V]. A row's numbers do not depend
        on the other rows."""
        hidden = hidden.contiguous()
        found = hidden.new_empty(*hidden.shape[:-1], matrix.shape[0])
        rows = hidden.numel() // hidden.shape[-1]
        self._product(Matrix.of(matrix), rows, hidden.data_ptr(), found.data_ptr(), torch.get_num_threads())
        return found

    def take_norm(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether `rms_norm` can compute this one."""
        few = hidden.numel() // hidden.shape[-1] <= MOST_ROWS and hidden.device.type == "cpu"
        return few and hidden.dtype == weight.dtype == torch.float32 and not _recorded(hidden, weight)

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """hidden [..., D] divided by the root of its mean square, times weight [D]."""
        hidden = hidden.contiguous()
        found, size = torch.empty_like(hidden), hidden.shape[-1]
        self._rms_norm(hidden.numel() // size, size, hidden.data_ptr(), weight.data_ptr(), eps, found.data_ptr())
        return found

    def _check(self) -> None:
        """NoKernels unless products are right, whatever the compiler made of the source."""
        matrix = torch.linspace(-1, 1, 13 * 37).view(13, 37)
        for rows in range(1, MOST_ROWS + 1):
            hidden = torch.linspace(1, -2, rows * 37).view(rows, 37)
            for weights in (matrix, matrix.bfloat16()):
                if not torch.allclose(self.product(hidden, weights), F.linear(hidden, weights.float()), atol=1e-4):
                    raise NoKernels(f"a product of {rows} rows comes out wrong")


def plain(weights: Tensor) -> bool:
    """Whether the numbers lie in memory one after another: not those of a quantised matrix, which is of a type of its
    own, nor of a transposed one."""
    return type(weights) in (Tensor, nn.Parameter) and weights.is_contiguous()


Mark = tuple[int, int]


def mark(weights: Tensor) -> Mark:
    """Changes when the numbers are moved or written to."""
    return weights.data_ptr(), weights._version


def compact(weights: Tensor) -> Tensor | None:
    """The same numbers in bfloat16, to be read in half the time; None where that is not exact."""
    if weights.device.type != "cpu" or weights.dtype != torch.float32 or not plain(weights):
        return None
    half = weights.detach().bfloat16()
    return half if bool((half == weights).all()) else None


def _none() -> None:
    return None


def _recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def faster_rows(kernels: Kernels) -> frozenset[int]:
    """The numbers of rows, 1 to 32, that the kernel multiplies faster than torch on this CPU. Takes about a second.

    One that seems to lose between others that win was measured while something else was running: it wins, too.
    """
    matrices = torch.zeros(_TRIAL_MATRICES, *_TRIAL_SHAPE)
    faster: set[int] = set()
    for fewer, rows in pairwise((0, *_TRIED)):
        hidden = torch.zeros(rows, _TRIAL_SHAPE[1])
        if _fastest(kernels.product, hidden, matrices) < _TIE * _fastest(F.linear, hidden, matrices):
            faster.update(range(fewer + 1, rows + 1))
    return frozenset(range(min(faster), max(faster) + 1)) if faster else frozenset()


def _fastest(product: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, matrices: Tensor) -> float:
    """Seconds for all matrices, the best of several rounds."""
    spent = []
    for _ in range(_TRIAL_ROUNDS):
        started = time.perf_counter()
        for matrix in matrices:
            product(hidden, matrix)
        spent.append(time.perf_counter() - started)
    return min(spent)


def load(folder: Path) -> Kernels:
    """The kernels kept in `folder`, compiled if they are not there; a damaged file is compiled anew. NoKernels where
    that fails. For which rows they are faster is measured once for this number of threads, and kept beside them."""
    library = build(folder)
    try:
        kernels = Kernels(library, frozenset())
    except NoKernels:
        library.unlink(missing_ok=True)
        kernels = Kernels(build(folder), frozenset())
    kept = _rows_file(library)
    rows = _read_rows(kept)
    if rows is None:
        rows = faster_rows(kernels)
        _write_rows(kept, rows)
    kernels.rows = rows
    return kernels


def _rows_file(library: Path) -> Path:
    return library.with_name(f"{library.stem}-{MOST_ROWS}-rows-{torch.get_num_threads()}-threads.json")


def _read_rows(path: Path) -> frozenset[int] | None:
    """None where there is nothing that `_write_rows` could have written."""
    try:
        rows = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(rows, list) and all(row in range(1, MOST_ROWS + 1) for row in rows)
    return frozenset(rows) if sound else None


def _write_rows(path: Path, rows: frozenset[int]) -> None:
    """Whole or not at all; without it, the next start measures again."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        part = Path(scratch) / path.name
        part.write_text(json.dumps(sorted(rows)), "utf-8")
        os.replace(part, path)  # noqa: PTH105


def build(folder: Path) -> Path:
    """The shared object in `folder`, compiled if it is not there for this source, compiler and CPU. NoKernels where
    that fails."""
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoKernels(f"no C compiler was found (tried {', '.join(_COMPILERS)})")
    key = hashlib.sha256("\0".join([SOURCE.read_text("utf-8"), compiler, *_FLAGS, _processor()]).encode())
    library = folder / f"kernels-{key.hexdigest()[:16]}.so"
    if not _is_whole(library):
        _compile(compiler, library)
    return library


def _is_whole(library: Path) -> bool:
    """Whether it has the length that was noted when it was written: half a library is fatal to load."""
    try:
        return _length_file(library).read_text("utf-8") == str(library.stat().st_size)
    except (OSError, ValueError):
        return False


def _length_file(library: Path) -> Path:
    return library.with_suffix(".length")


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            part = Path(scratch) / library.name
            command = [compiler, *_FLAGS, str(SOURCE), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
            if done.returncode:
                raise NoKernels(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
            length = Path(scratch) / "length"
            length.write_text(str(part.stat().st_size), "utf-8")
            os.replace(part, library)  # noqa: PTH105
            os.replace(length, _length_file(library))  # noqa: PTH105
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"{compiler} could not write {library} ({error})") from None


def _processor() -> str:
    """What `-march=native` depends on, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
