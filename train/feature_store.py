"""What the base says about training examples, kept on disk for several epochs: features, and its likeliest tokens.

Knows: the files (safetensors shards named by everything they depend on), how large they become, and that a shard is
whole or made anew. An interrupted build goes on where it stopped.
Refuses to know: batches, heads and losses; where the folder is.

What is kept is rounded: features to bfloat16, p to its `top_k` likeliest tokens in float16. What p has beyond them is
missing from the teacher, as tokens outside the draft vocabulary are: it counts as rejected.

Sizes: T tokens of an example, N its supervised teacher positions, F features, k tokens of p that are kept.
"""

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.targets import first_drafts
from train.chat import Example
from train.cost import product_dtype

SHARD = 64  # examples in a file
TOKENS, POSITIONS = 4096, 256  # that the base runs on at once, and that have logits in memory
FORMAT = 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Keeping the base's features on disk, so that epochs after the first need no forward of the base.

    Args:
        keep: whether to. It pays from the second epoch on; the size is told before anything is written.
        top_k: how many of the base's likeliest tokens are kept per supervised position.
        dir: folder for the files; any of them may be deleted at any time.
    """

    keep: bool = False
    top_k: int = 64
    dir: str | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise UserError(f"features.top_k is {self.top_k}; it must be at least 1.")


@dataclass
class Stored:
    """Of one example: features [T,F], and p [N,k] of base tokens [N,k] at its teacher positions, likeliest first."""

    features: Tensor
    p: Tensor
    tokens: Tensor


def teacher_positions(example: Example) -> Tensor:
    """Positions [N] whose next token is supervised and can be a draft."""
    return first_drafts(example.supervised.unsqueeze(0))[0].nonzero().squeeze(1) - 1


class FeatureStore:
    """The features of a list of examples. Call `build` before `read`, all within the same autocast, if any.

    Args:
        examples: those of training, in their order.
        base: gives the features, and its fingerprint names the files.
        layers: feature layers.
        options: see there; `dir` must be set.
    """

    def __init__(
        self, examples: Sequence[Example], base: FrozenBase, layers: tuple[int, ...], options: FeatureOptions
    ) -> None:
        assert options.dir is not None
        self.examples, self.base, self.layers, self.options = examples, base, layers, options
        self.folder = Path(options.dir).expanduser() / self._key()
        self._open: dict[int, Any] = {}

    def _key(self) -> str:
        facts = [FORMAT, self.base.fingerprint(), self._precision(), self.layers, self.options.top_k]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _precision(self) -> str:
        """That of the base's weights, how they were rounded, and what products run in where that is another one."""
        own, products = self.base.dtype, product_dtype(self.base)
        weights = str(own) if self.base.quantised is None else f"{own} as {self.base.quantised}"
        return weights if own == products else f"{weights} in {products}"

    def size(self) -> int:
        """Bytes that all files take together, near enough."""
        tokens = sum(map(len, self.examples))
        positions = sum(len(teacher_positions(example)) for example in self.examples)
        kept = min(self.options.top_k, self.base.vocab_size)
        return tokens * 2 * self.base.hidden_size * len(self.layers) + positions * 6 * kept

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"features.dir {self.options.dir}: {error.strerror}"
            raise UserError(f"{told}; name a folder that can be written.") from None

    def missing(self) -> list[int]:
        """Shards that are not on disk yet."""
        return [shard for shard in range(self._count()) if not self._path(shard).exists()]

    def check_space(self) -> None:
        """UserError unless the disk has room for what is missing."""
        self._make_folder()
        needed = self.size() * len(self.missing()) // max(1, self._count())
        free = shutil.disk_usage(self.folder).free
        if needed > 0.9 * free:
            raise UserError(
                f"features.keep needs {needed / 1e9:.1f} GB in {self.folder} and {free / 1e9:.1f} GB are free; name "
                "another features.dir, lower features.top_k, or set features.keep to false."
            )

    @torch.no_grad()
    def build(self, rank: int = 0, count: int = 1, on_progress: Progress = lambda done, total: None) -> None:
        """Write what is missing of one in `count` shards, from number `rank` on, each of them whole or not at all."""
        missing = [shard for shard in self.missing() if shard % count == rank]
        for done, shard in enumerate(missing):
            on_progress(done, len(missing))
            self._write(shard, self._compute(shard))
        on_progress(len(missing), len(missing))

    def read(self, index: int) -> Stored:
        """What is kept of example `index`. A damaged shard is made anew first."""
        shard, number = divmod(index, SHARD)
        file = self._open.get(shard)
        if file is None:
            file = self._open[shard] = self._checked(shard)
        return Stored(*(file.get_tensor(f"{name}/{number}") for name in ("features", "p", "tokens")))

    def _checked(self, shard: int) -> Any:
        try:
            return self._validated(shard)
        except (OSError, SafetensorError, KeyError, ValueError):
            self._write(shard, self._compute(shard))
            return self._validated(shard)

    def _validated(self, shard: int) -> Any:
        """The open file; ValueError and the like unless it holds what was written."""
        file = safe_open(self._path(shard), framework="pt")
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["checksum"] != _checksum(tensors):
            raise ValueError("the content does not match its checksum")
        members, width = self._members(shard), self.base.hidden_size * len(self.layers)
        if set(tensors) != {f"{name}/{i}" for name in ("features", "p", "tokens") for i in range(len(members))}:
            raise ValueError("tensors have other names than those of the examples")
        for number, example in enumerate(members):
            if tuple(tensors[f"features/{number}"].shape) != (len(example), width):
                raise ValueError(f"features of example {number} have another shape")
        return file

    def _members(self, shard: int) -> Sequence[Example]:
        return self.examples[shard * SHARD : (shard + 1) * SHARD]

    def _count(self) -> int:
        return -(-len(self.examples) // SHARD)

    def _path(self, shard: int) -> Path:
        """Named by the tokens and marks of its examples: another order or other data are other files."""
        digest = hashlib.sha256()
        for example in self._members(shard):
            digest.update(len(example).to_bytes(8, "little"))
            digest.update(example.tokens.numpy().tobytes() + example.supervised.numpy().tobytes())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    def _write(self, shard: int, tensors: dict[str, Tensor]) -> None:
        self._make_folder()  # anybody may have deleted it
        path = self._path(shard)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            save_file(tensors, part, metadata={"checksum": _checksum(tensors)})
            os.replace(part, path)  # noqa: PTH105
        except (OSError, SafetensorError) as error:
            remedy = "make room or name another features.dir; what was written is kept"
            raise UserError(f"features.dir {self.folder} cannot be written ({error}); {remedy}.") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _compute(self, shard: int) -> dict[str, Tensor]:
        """Tensors of a shard; examples of about one length together, to save padding."""
        members = self._members(shard)
        tensors: dict[str, Tensor] = {}
        for group in _groups([len(example) for example in members]):
            tokens = torch.zeros(len(group), max(len(members[i]) for i in group), dtype=torch.long)
            for row, i in enumerate(group):
                tokens[row, : len(members[i])] = members[i].tokens
            output = self.base.forward(tokens.to(self.base.device), feature_layers=self.layers)
            for row, i in enumerate(group):
                states = output.hidden[row, teacher_positions(members[i]).to(output.hidden.device)]
                p, ids = self._likeliest(states)
                tensors[f"features/{i}"] = output.features[row, : len(members[i])].bfloat16().cpu().contiguous()
                tensors[f"p/{i}"], tensors[f"tokens/{i}"] = p.half().cpu(), ids.int().cpu()
        return tensors

    def _likeliest(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """p [N,k] and base tokens [N,k] of states [N,D]; a few logits at a time. Logits keep the base's precision: an
        autocast to bfloat16 would round them by several per cent of p."""
        count = min(self.options.top_k, self.base.vocab_size)
        with torch.autocast(states.device.type, enabled=False):
            found = [self.base.logits(some).float().softmax(-1).topk(count) for some in states.split(POSITIONS)]
        return torch.cat([p for p, _ in found]), torch.cat([ids for _, ids in found])


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of the examples, short ones first, in groups of at most `TOKENS` tokens with padding, or of one."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 over all tensors: against damage, not against malice."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy(), value)
    return f"{value:08x}"
