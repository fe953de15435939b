"""Kernels compute what torch computes, each row alike in any company; what goes wrong with compiling is told."""

import shutil
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mtp import kernels as module
from mtp.kernels import MOST_ROWS, SOURCE, Kernels, NoKernels, build, compact, faster_rows, load
from mtp.layers import Linear, RMSNorm, use_kernels
from mtp.output import project

ALL = frozenset(range(1, MOST_ROWS + 1))


def rough(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, MOST_ROWS),
    inputs=st.integers(1, 70) | st.just(1100),  # more than stays in the nearest cache
    outputs=st.integers(1, 40) | st.just(300),
    threads=st.integers(1, 3),
    half=st.booleans(),
)
def test_a_product_is_torchs_and_a_row_is_the_same_in_any_company(
    any_kernels: Kernels, rows: int, inputs: int, outputs: int, threads: int, half: bool
) -> None:
    x, w, before = rough(rows, inputs), rough(outputs, inputs), torch.get_num_threads()
    w = w.bfloat16() if half else w
    torch.set_num_threads(threads)
    try:
        found = any_kernels.product(x, w)
        alone = torch.cat([any_kernels.product(row[None], w) for row in x])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, F.linear(x, w.float()), atol=1e-4, rtol=1e-5)
    assert found.equal(alone)


@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
def test_norm(kernels: Kernels, size: int) -> None:
    x, weight = rough(2, 3, size), rough(size)
    found = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, F.rms_norm(x, (size,), weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_what_is_not_contiguous_is_still_right(kernels: Kernels) -> None:
    x, w = rough(6, 3).T, rough(5, 6)
    torch.testing.assert_close(kernels.product(x, w), F.linear(x, w))
    assert not kernels.take(rough(2, 5), rough(5, 6).T)  # a transposed matrix would have to be copied in every step


@pytest.mark.parametrize(
    ("hidden", "matrix", "taken"),
    [
        (torch.ones(1, 8, 3), torch.ones(4, 3), True),
        (torch.ones(3, 11, 3), torch.ones(4, 3), False),
        (torch.ones(2, 3).double(), torch.ones(4, 3).double(), False),
        (torch.ones(2, 3).bfloat16(), torch.ones(4, 3).bfloat16(), False),
        (torch.ones(2, 3), torch.ones(4, 3).bfloat16(), True),
        (torch.ones(2, 3, device="meta"), torch.ones(4, 3, device="meta"), False),
    ],
)
def test_what_is_taken(kernels: Kernels, hidden: Tensor, matrix: Tensor, taken: bool) -> None:
    assert kernels.take(hidden, matrix) == taken
    fewer = Kernels.__new__(Kernels)
    fewer.rows = frozenset({1})
    assert not fewer.take(hidden, matrix)


def test_compact_is_exact_or_nothing() -> None:
    exact = rough(4, 3).bfloat16().float()
    half = compact(exact)
    assert half is not None
    assert half.dtype == torch.bfloat16
    assert half.float().equal(exact)
    for other in (exact + 1e-3, exact.double(), exact.bfloat16()):
        assert compact(other) is None


def test_a_compacted_map_is_the_same_map(kernels: Kernels) -> None:
    part, x = Linear(5, 4), rough(2, 5)
    part.weight = nn.Parameter(part.weight.bfloat16().float(), requires_grad=False)
    use_kernels(part, kernels)
    with torch.no_grad():
        plain = part(x)
        use_kernels(part, kernels, compacted=True)
        assert part.compacted is not None
        assert part.compacted.dtype == torch.bfloat16
        assert part(x).equal(plain)
        torch.testing.assert_close(part(rough(20, 5)), F.linear(rough(20, 5), part.weight, part.bias))  # many rows
    use_kernels(part, None)
    assert part.compacted is None


def test_gradients_are_torchs(kernels: Kernels) -> None:
    part = nn.Sequential(Linear(5, 4), RMSNorm(4, eps=1e-5))
    use_kernels(part, kernels)
    x = rough(2, 5).requires_grad_()
    part(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in part.parameters())
    with torch.no_grad():
        computed = part(x)
    use_kernels(part, None)
    torch.testing.assert_close(computed, part(x))


def test_project_asks_the_kernels_first(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = rough(2, 5), rough(3, 5), rough(3)
    monkeypatch.setattr(F, "linear", lambda *_: pytest.fail("torch was asked"))
    torch.testing.assert_close(project(x, w, bias, kernels), x @ w.T + bias)


def test_only_rows_that_profit(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that charges the kernel for one row and for more than 16, and once while something else was running."""
    now, product, linear = [0.0], Kernels.product, F.linear

    def ours(self: Kernels, hidden: Tensor, matrix: Tensor) -> Tensor:
        now[0] += len(hidden) in (1, 5) or len(hidden) > 16
        return product(self, hidden, matrix)

    def torchs(hidden: Tensor, matrix: Tensor) -> Tensor:
        now[0] += 0.5
        return linear(hidden, matrix)

    monkeypatch.setattr(module, "_TRIAL_SHAPE", (3, 4))
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Kernels, "product", ours)
    monkeypatch.setattr(F, "linear", torchs)
    assert faster_rows(kernels) == set(range(2, 17))


@pytest.fixture
def hastily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without care for speed, which takes a tenth of the time."""
    monkeypatch.setattr(module, "_FLAGS", ("-O0", "-fopenmp", "-fPIC", "-shared"))


# ---- compiling -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hastily")
def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {library.stem}
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build(tmp_path) == library


@pytest.mark.usefixtures("hastily")
def test_a_damaged_library_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "faster_rows", lambda _: ALL)
    name = build(tmp_path / "other").name
    (tmp_path / name).write_bytes(b"half a fi")
    assert load(tmp_path).rows == ALL
    assert len((tmp_path / name).read_bytes()) > 1000


@pytest.mark.parametrize("left", [0, 100, 4096, 8192, -8192, -100])
def test_half_a_library_is_never_loaded(left: int, compiled_home: Path, tmp_path: Path) -> None:
    """Some lengths pass for a library and are fatal once they are used."""
    whole = build(compiled_home / "kernels")
    for path in (whole, module._length_file(whole)):
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[:left])
    assert not module._is_whole(tmp_path / whole.name)
    assert module._is_whole(whole)


@pytest.mark.usefixtures("hastily")
@pytest.mark.parametrize("kept", [None, "", "[1, 99]", '{"a": 1}', "[true, [2]]"])
def test_what_pays_is_measured_once(kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of threads; what is kept and makes no sense is measured anew."""
    library, measured = build(tmp_path), []

    def measure(_: Kernels) -> frozenset[int]:
        measured.append(torch.get_num_threads())
        return frozenset({1, 5})

    monkeypatch.setattr(module, "faster_rows", measure)
    if kept is not None:
        module._rows_file(library).write_text(kept)
    for _ in range(3):
        assert load(tmp_path).rows == {1, 5}
    assert len(measured) == 1
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 77)
    load(tmp_path)
    assert len(measured) == 2


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernels, match="no C compiler was found"):
        load(tmp_path / "kernels")


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cannot do that' >&2\nexit 3\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    folder = tmp_path / "kernels"
    with pytest.raises(NoKernels, match="ended with 3: cannot do that"):
        load(folder)
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoKernels, match="could not write"):
        load(tmp_path / "file" / "kernels")


@pytest.mark.usefixtures("hastily")
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("fused(row[v], one, sum", "fused(row[v], row[v], sum"),
        ("void product(", "void other("),
        ("x + r * d + k", "x + k"),
    ],
)
def test_a_library_that_computes_something_else_is_refused(
    good: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernels.c"
    assert good in SOURCE.read_text("utf-8")
    source.write_text(SOURCE.read_text("utf-8").replace(good, bad), "utf-8")
    monkeypatch.setattr(module, "SOURCE", source)
    with pytest.raises(NoKernels, match="comes out wrong|cannot be loaded"):
        load(tmp_path / "built")
