"""Features on disk: the same training as from the base, and whole files whatever happens to them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.losses import LossOptions
from mtp.objective import DraftSums
from tests.tiny import tiny_base
from tests.train.runs import train
from train import feature_store
from train.chat import Example
from train.feature_store import SHARD, FeatureOptions, FeatureStore
from train.loader import collate
from train.module import HeadsModule

LAYERS, VOCAB = (1, 2, 3), 64


def texts(count: int, seed: int = 0, longest: int = 40) -> list[Example]:
    """Random texts; what is supervised is random too, now and then nothing."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(4, longest, (1,), generator=generator))
        tokens = torch.randint(3, 60, (length,), generator=generator).int()
        marks = torch.rand(length, generator=generator) < (0.7 if number % 7 else 0.0)
        found.append(Example(tokens, marks, f"text {number}"))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return tiny_base("llama", tmp_path_factory.mktemp("base"))


class Counted(NamedTuple):
    store: FeatureStore
    forwards: list[int]
    """Rows of each forward of the base."""


def new_store(folder: Path, base: FrozenBase, examples: list[Example], top_k: int = VOCAB, **changes: Any) -> Counted:
    """A store whose base counts its forwards."""
    forwards: list[int] = []

    class Counting(FrozenBase):
        def forward(self, tokens: torch.Tensor, **given: Any) -> Any:
            forwards.append(len(tokens))
            return super().forward(tokens, **given)

    counting = Counting.from_model(base.model, base.tokenizer, base.name)
    options = FeatureOptions(keep=True, top_k=top_k, dir=str(folder))
    given: dict[str, Any] = {"layers": LAYERS, **changes}
    return Counted(FeatureStore(examples, counting, given["layers"], options), forwards)


class Interrupted(Exception):
    pass


def build_some(store: FeatureStore, shards: int) -> None:
    """As if killed after so many shards."""

    def stop(done: int, total: int) -> None:
        if done == shards:
            raise Interrupted

    with pytest.raises(Interrupted):
        store.build(on_progress=stop)


def sums_of(
    module: HeadsModule, rows: list[list[int]], examples: list[Example], packed: bool, wrong: bool = False
) -> DraftSums:
    """Those of a batch of these rows; `wrong` names examples 0 and 1 crosswise."""
    batch = collate([[examples[i] for i in row] for row in rows], pad_id=0, packed=packed)
    width = max(map(len, rows))
    names = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    batch["examples"] = torch.where((names == 0) | (names == 1), 1 - names, names) if wrong else names
    return module.draft_sums(batch)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("vocabulary", [None, 40])
@pytest.mark.parametrize("kind", ["recurrent", "medusa", "sequential"])
def test_training_from_the_store_is_training_from_the_base(
    kind: str, vocabulary: int | None, packed: bool, base: FrozenBase, tmp_path: Path
) -> None:
    """Loss, acceptance and gradient within the rounding of bfloat16 features and float16 p."""
    examples = texts(12)
    examples[0] = replace(examples[1], tokens=examples[1].tokens.flip(0), where="as long as text 1")
    torch.manual_seed(0)
    module = HeadsModule(
        heads=HeadsOptions(kind=kind, draft_length=2, draft_vocab_size=vocabulary),  # type: ignore[arg-type]
        loss=LossOptions(kl=1.0, tv=1.0, ce=0.3, chunk=8),
    )
    module.attach(base)
    ids = None if vocabulary is None else torch.arange(0, vocabulary)
    module._draft_vocab = lambda data: ids  # type: ignore[method-assign]
    module.build(None)  # type: ignore[arg-type]
    rows = [[0, 3, 5], [1, 2], [4, 6, 8, 9]] if packed else [[i] for i in range(9)]
    found = []
    for store in (None, new_store(tmp_path, base, examples, layers=module.trained.config.feature_layers).store):
        module.store = store
        if store is not None:
            store.build()
        module.zero_grad()
        sums = sums_of(module, rows, examples, packed)
        sums.total.backward()
        slope = torch.cat([p.grad.flatten() for p in module.trained.parameters() if p.grad is not None])
        found.append((sums.detached(), slope))
    (one, slope), (other, slope_kept) = found
    assert torch.equal(one.count, other.count)
    for name in ("total", "alpha", "loss"):  # not greedy, top_mass: near ties may fall otherwise
        assert torch.allclose(getattr(one, name), getattr(other, name), rtol=3e-4 if name == "total" else 3e-3), name
    assert (slope - slope_kept).norm() < 0.03 * slope.norm()
    turned = sums_of(module, [row[::-1] for row in rows[::-1]], examples, packed).detached()  # rows in any order
    assert torch.allclose(turned.total, other.total, rtol=1e-4)
    crossed = sums_of(module, rows, examples, packed, wrong=True).detached()  # negative control
    assert not torch.allclose(crossed.total, other.total, rtol=3e-4)


def test_few_tokens_of_p_count_the_rest_as_rejected(base: FrozenBase, tmp_path: Path) -> None:
    examples = texts(4)
    whole, few = (new_store(tmp_path, base, examples, top_k).store for top_k in (VOCAB, 5))
    whole.build()
    few.build()
    assert whole.folder != few.folder
    for index in range(4):
        one, other = whole.read(index), few.read(index)
        assert other.p.shape[1] == other.tokens.shape[1] == 5
        assert torch.equal(one.tokens[:, :5], other.tokens)
        assert torch.equal(one.features, other.features)
        assert (one.p.float().sum(-1) - 1).abs().max(dim=0).values < 0.01 if len(one.p) else True
        assert (other.p.float().sum(-1) < 1).all()


def test_an_interrupted_build_goes_on(base: FrozenBase, tmp_path: Path) -> None:
    examples = texts(3 * SHARD + 5, longest=12)
    store, forwards = new_store(tmp_path, base, examples)
    build_some(store, 2)
    assert len(store.missing()) == 2
    assert not list(tmp_path.rglob("*.part"))
    again, forwards = new_store(tmp_path, base, examples)
    told: list[tuple[int, int]] = []
    again.build(on_progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert sum(forwards) == SHARD + 5, "only what was missing is computed"
    forwards.clear()
    again.build()
    assert [len(again.read(i).features) for i in range(len(examples))] == [len(example) for example in examples]
    assert not forwards


def test_processes_build_a_share_each(base: FrozenBase, tmp_path: Path) -> None:
    """Disjoint, and together all; what one of them could not do is made by whoever finds it missing."""
    examples = texts(4 * SHARD + 5, longest=12)
    stores = [new_store(tmp_path, base, examples) for _ in range(2)]
    written = []
    for rank, (store, forwards) in enumerate(stores):
        before = set(store.missing())
        store.build(rank, 2)
        written.append(before - set(store.missing()))
        assert sum(forwards) == sum(len(store._members(shard)) for shard in written[-1])
    assert written == [{0, 2, 4}, {1, 3}]
    stores[0].store._path(3).unlink()
    stores[0].forwards.clear()
    stores[0].store.build(0, 1)
    assert sum(stores[0].forwards) == SHARD
    assert not stores[1].store.missing()


DAMAGE = {
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a byte of the header": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "a byte of the features": lambda data: data[:-9] + bytes([data[-9] ^ 64]) + data[-8:],
    "another name": lambda data: data.replace(b'"p/0"', b'"q/0"'),
    "deleted": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_made_anew(damage: str, base: FrozenBase, tmp_path: Path) -> None:
    examples = texts(SHARD + 3, longest=12)
    store, _ = new_store(tmp_path, base, examples)
    store.build()
    path, expected = store._path(0), store.read(2)
    change, data = DAMAGE[damage], path.read_bytes()
    path.unlink()
    if change is not None:
        assert change(data) != data
        path.write_bytes(change(data))
    again, forwards = new_store(tmp_path, base, examples)
    found = again.read(2)
    assert sum(forwards) == SHARD, "this shard and no other"
    for name in ("features", "p", "tokens"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert path.read_bytes() == data
    again.read(SHARD + 1)
    assert sum(forwards) == SHARD


def test_what_a_file_depends_on_is_in_its_name(base: FrozenBase, tmp_path: Path) -> None:
    examples = texts(SHARD + 3, longest=12)
    store, _ = new_store(tmp_path, base, examples)
    store.build()
    assert not new_store(tmp_path, base, examples).store.missing()
    other_base = tiny_base("llama", tmp_path / "base", seed=1)
    marks = replace(examples[0], supervised=~examples[0].supervised)
    for other in (
        new_store(tmp_path, base, examples, layers=(1, 2, 4)),
        new_store(tmp_path, base, examples, top_k=9),
        new_store(tmp_path, other_base, examples),
        new_store(tmp_path, base, texts(SHARD + 3, seed=1, longest=12)),
    ):
        assert len(other.store.missing()) == 2
    assert new_store(tmp_path, base, [marks, *examples[1:]]).store.missing() == [0]
    assert new_store(tmp_path, base, examples[:-1]).store.missing() == [1]
    swapped = [examples[1], examples[0], *examples[2:]]
    assert new_store(tmp_path, base, swapped).store.missing() == [0]


def test_an_autocast_has_files_of_its_own_and_leaves_p_exact(base: FrozenBase, tmp_path: Path) -> None:
    examples = texts(3)
    plain, _ = new_store(tmp_path, base, examples)
    plain.build()
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = new_store(tmp_path, base, examples)
        assert half.missing() == [0]
        half.build()
        logits = base.logits(torch.ones(2, base.hidden_size))
        p, _ = half._likeliest(torch.ones(2, base.hidden_size))
    assert logits.equal(logits.bfloat16().float()), "the autocast rounds logits"
    assert torch.allclose(p.sum(-1), torch.ones(2), atol=1e-5)
    exact = base.logits(torch.ones(2, base.hidden_size)).softmax(-1).sort(descending=True).values
    torch.testing.assert_close(p, exact)
    torch.testing.assert_close(half.read(0).p, plain.read(0).p, atol=0.1, rtol=0)


def test_training_in_half_precision_reads_the_store(tmp_path: Path) -> None:
    changes = {"model__features": {"keep": True, "dir": str(tmp_path / "features")}, "model__decode__prompts": None}
    train(tmp_path, trainer__precision="bf16-mixed", trainer__max_steps=2, trainer__val_check_interval=2, **changes)
    assert len(list((tmp_path / "features").glob("*/*.safetensors"))) == 1


def test_a_disk_that_is_too_small(base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = new_store(tmp_path, base, texts(20))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=store.size()))
    with pytest.raises(UserError, match="features.keep needs .* are free; name another features.dir"):
        store.check_space()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * store.size()))
    store.check_space()
    store.build()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    store.check_space()  # nothing is missing, so nothing is needed


def test_a_folder_that_cannot_be_made(base: FrozenBase, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="features.dir"):
        new_store(tmp_path / "file", base, texts(2)).store.check_space()


def test_little_is_computed_at_a_time(base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of few tokens and logits of few positions, or of one long example, give the same files' contents."""
    examples = texts(20)
    whole, _ = new_store(tmp_path / "whole", base, examples)
    whole.build()
    monkeypatch.setattr(feature_store, "TOKENS", 30)
    monkeypatch.setattr(feature_store, "POSITIONS", 3)
    parts, forwards = new_store(tmp_path / "parts", base, examples)
    parts.build()
    assert sum(forwards) == 20
    assert max(forwards) <= 30 // min(map(len, examples))
    for i in range(20):
        one, other = whole.read(i), parts.read(i)
        assert torch.allclose(one.features.float(), other.features.float(), atol=0.02)
        assert torch.allclose(one.p.float(), other.p.float(), atol=1e-3)


@pytest.mark.parametrize("top_k", [8, 64, 500])
def test_the_size_told_is_the_size_written(top_k: int, base: FrozenBase, tmp_path: Path) -> None:
    store, _ = new_store(tmp_path, base, texts(SHARD + 9, longest=200), top_k)
    store.build()
    written = sum(path.stat().st_size for path in store.folder.iterdir())
    assert 0.9 < store.size() / written < 1.1


def test_many_shards_leave_no_files_open(base: FrozenBase, tmp_path: Path) -> None:
    """A long run reads thousands of them, and processes may hold about a thousand open files."""
    proc = Path("/proc/self/fd")
    if not proc.exists():
        pytest.skip("needs /proc")
    examples = texts(6 * SHARD, longest=8)
    store, _ = new_store(tmp_path, base, examples)
    store.build()
    before = len(list(proc.iterdir()))
    for index in range(0, len(examples), SHARD):
        store.read(index)
    assert len(list(proc.iterdir())) <= before + 1


@pytest.fixture
def base_rows(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward of any base came from a training step."""
    seen: list[bool] = []
    forward, step = FrozenBase.forward, HeadsModule.training_step
    inside: list[int] = []

    def counted(self: FrozenBase, *args: Any, **given: Any) -> Any:
        seen.append(bool(inside))
        return forward(self, *args, **given)

    def marked(self: HeadsModule, *args: Any) -> torch.Tensor:
        inside.append(1)
        try:
            return step(self, *args)
        finally:
            inside.pop()

    monkeypatch.setattr(FrozenBase, "forward", counted)
    monkeypatch.setattr(HeadsModule, "training_step", marked)
    return seen


@pytest.mark.parametrize("keep", [True, False])
def test_two_epochs_run_the_base_in_no_step(keep: bool, tmp_path: Path, base_rows: list[bool]) -> None:
    """28 examples: two epochs of 7 batches. The negative control counts a forward in each step."""
    changes = {"model__features": {"keep": keep, "dir": str(tmp_path / "features")}, "model__decode__prompts": None}
    train(tmp_path, trainer__max_steps=14, trainer__val_check_interval=7, **changes)
    assert sum(base_rows) == (0 if keep else 14)
    assert len(base_rows) > sum(base_rows), "validation runs it"
