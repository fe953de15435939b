"""`mtp-decode check`: it passes where decoding is exact, and names the finding for every fault that is built in.

Chance of a false alarm: three chi-square tests in every run that must pass, each of which rejects an exact decoder for
less than two of 10,000 seeds; the seeds are fixed, so that nothing here is flaky. The walks are exact.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import decode.chain
import decode.check_laws
import decode.decoder
import decode.engine
import decode.laws
from decode.check import NUM_FINDINGS, check
from decode.cli import main
from decode.decoder import Decoder
from decode.evidence import CheckSettings
from decode.target import BaseTarget
from mtp import verify
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, RecurrentHeads
from mtp.hub import save_heads
from mtp.initialise import new_heads
from mtp.keyed import KeyedSource
from mtp.least_squares import Moments, start_from_states
from mtp.sampling import RandomSource, SamplingConfig, to_probs
from mtp.verify import Verdict, at_row, draft_ratios, last_passing, leading
from tests.decode.toys import BaseDrafter
from tests.tiny import CONTEXT, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY, GREEDY_CONTROL = "greedy under teacher forcing", "greedy, negative control"
BLOCK, TOKEN, MATCH = (f"law of the first 3 tokens, {rule}" for rule in ("block", "token", "match"))
LAW_CONTROL = "law of the first 3 tokens, negative control: resample from p"
WALK_BLOCK, WALK_TOKEN, WALK_MATCH = (f"every outcome, {rule}" for rule in ("block", "token", "match"))
WALK_CONTROL = "every outcome, negative control: resample from p"
ROWS = "the base with a cache and without"
SAME, OTHER = "reproducible: one text for every K", "reproducible, negative control: another seed"
DRAFTS = "drafts were made, kept and rejected"
WALKS = [WALK_BLOCK, WALK_TOKEN, WALK_MATCH, WALK_CONTROL]
NAMES = [GREEDY, GREEDY_CONTROL, ROWS, *WALKS, BLOCK, TOKEN, MATCH, LAW_CONTROL, SAME, OTHER, DRAFTS]
K = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny bases with medusa heads, which start as the base's own prediction, and with recurrent ones."""
    folder = tmp_path_factory.mktemp("check")
    for family in ("llama", "qwen2"):
        base = tiny_base(family, folder)
        for kind in ("medusa", "recurrent"):
            torch.manual_seed(0)
            options = HeadsOptions(kind=kind, draft_length=K)  # type: ignore[arg-type]
            save_heads(new_heads(options, base), folder / f"{family}-{kind}")
    (folder / "prompts.jsonl").write_text('{"prompt": "the user"}\n{"prompt": "what is it?"}\n')
    return folder


@pytest.fixture
def good_drafts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """In place of the heads: the base itself, its logits a little mixed up. About half of the drafts are kept."""
    base = tiny_base("llama", folder)

    def drafter(heads: Heads) -> BaseDrafter:
        return BaseDrafter(base, heads.config.draft_length, lambda logits: logits + 0.3 * logits.roll(7, dims=-1))

    monkeypatch.setattr(decode.check_laws, "HeadsDrafter", drafter)
    monkeypatch.setattr(decode.decoder, "HeadsDrafter", drafter)


def certify(capsys: pytest.CaptureFixture[str], folder: Path, samples: int = 500, *args: object) -> dict[str, Any]:
    """The JSON document of `check` on one prompt, with the exit code that belongs to it."""
    command = ["check", "--heads", folder / "llama-medusa", "--prompts", folder / "prompts.jsonl", "--limit", 1]
    more = ["--max-new-tokens", 16, "--samples", samples, "--json", *args]
    code = main([str(arg) for arg in (*command, *more)])
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if document["passed"] else 1)
    assert document["passed"] == (not failed(document))
    return document


def failed(document: dict[str, Any]) -> set[str]:
    return {finding["name"] for finding in document["checks"] if not finding["passed"]}


# ---- it passes -------------------------------------------------------------------------------------------------------


def test_table(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained heads of a base with tied matrices are right often enough; both prompts are used."""
    monkeypatch.setenv("COLUMNS", "200")
    code = main(
        ["check", "--heads", str(folder / "qwen2-medusa"), "--prompts", str(folder / "prompts.jsonl")]
        + ["--samples", "600", "--max-new-tokens", "16", "--seed", "3"]
    )
    captured = capsys.readouterr()
    assert code == 0
    assert all(name in captured.out for name in NAMES)
    assert captured.out.count("passed") == NUM_FINDINGS
    assert "FAILED" not in captured.out
    assert "lossless as far as these checks see" in captured.out
    assert "less than two of 10,000" in captured.out
    assert "4 of 4 texts equal that of K = 0" in captured.out


@pytest.mark.usefixtures("good_drafts")
def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = certify(capsys, folder, 500, "--seed", 1)
    assert document["passed"]
    assert (document["seed"], document["heads"]) == (1, str(folder / "llama-medusa"))
    assert {"base", "dtype", "hardware", "threads", "versions"} <= set(document)
    assert [finding["name"] for finding in document["checks"]] == NAMES
    for finding in document["checks"]:
        assert set(finding) == {"name", "passed", "text", "numbers"}
        assert finding["text"]
        assert finding["numbers"]
    numbers = {finding["name"]: finding["numbers"] for finding in document["checks"]}
    assert numbers[GREEDY]["tokens"] == 16
    assert numbers[GREEDY]["worst_gap"] <= numbers[GREEDY]["margin"] < numbers[GREEDY_CONTROL]["gap"]
    for name, rule in ((BLOCK, "block"), (TOKEN, "token"), (MATCH, "match"), (LAW_CONTROL, "resample from p")):
        law = numbers[name]
        assert (law["rule"], law["samples"], law["p_limit"]) == (rule, 500, 1e-4)
        assert (law["p_value"] > 1e-4) == (name != LAW_CONTROL)
        assert law["degrees"] > 10
    assert numbers[SAME]["equal"] + numbers[SAME]["ties"] == numbers[SAME]["texts"] == K
    drafts = numbers[DRAFTS]
    assert drafts["accepted"] + drafts["rejected"] == drafts["drafted"]
    assert min(drafts.values()) > 1_000


def test_every_finding_is_a_step(folder: Path) -> None:
    steps: list[int] = []
    base = tiny_base("llama", folder)
    decoder = Decoder(base, new_heads(HeadsOptions(kind="medusa", draft_length=1), base))
    settings = CheckSettings(prompts=["a"], samples=300, max_new_tokens=4)
    assert len(check(decoder, settings, lambda: steps.append(1))) == len(steps) == NUM_FINDINGS


# ---- it fails, and says where ----------------------------------------------------------------------------------------


def keep_all(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    return Verdict(lengths, random.categorical(at_row(p, lengths)), torch.zeros_like(lengths, dtype=torch.bool))


def last_ratio(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """The block rule with the token rule's ratios: the longest prefix stays whose last draft passes."""
    ratios = draft_ratios(draft_tokens, q, p, lengths).clamp(max=1.0)
    num_accepted = last_passing(random.bernoulli(ratios), lengths)
    residual, empty = verify.token_residual(q, p, num_accepted, lengths)
    return Verdict(num_accepted, random.categorical(residual), empty)


def redraw(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """The match rule that draws again after a mismatch."""
    num_accepted = leading(draft_tokens == random.categorical(p)[:, :-1], lengths)
    next_token = random.categorical(at_row(p, num_accepted))
    return Verdict(num_accepted, next_token, torch.zeros_like(num_accepted, dtype=torch.bool))


def token_residual(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """The block rule with the token rule's residual: too small a fault for some hundred texts, but not for the walk."""
    _, thresholds = verify.block_thresholds(draft_tokens, q, p, lengths)
    num_accepted = last_passing(random.bernoulli(thresholds), lengths)
    residual, empty = verify.token_residual(q, p, num_accepted, lengths)
    return Verdict(num_accepted, random.categorical(residual), empty)


@pytest.mark.usefixtures("good_drafts")
@pytest.mark.parametrize(
    ("rule", "wrong", "found", "allowed"),
    [
        ("token", decode.check_laws.resample_from_p, {WALK_TOKEN, TOKEN}, set()),
        ("block", last_ratio, {WALK_BLOCK, BLOCK}, set()),
        ("block", token_residual, {WALK_BLOCK}, {BLOCK}),
        # Its bias may be too small for 500 texts; that its draws depend on K is seen in the first text.
        pytest.param("match", redraw, {WALK_MATCH, SAME}, {MATCH}, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_rule(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    wrong: verify.Rule,
    found: set[str],
    allowed: set[str],
) -> None:
    monkeypatch.setitem(verify.RULES, rule, wrong)
    names = failed(certify(capsys, folder))
    assert found <= names <= found | allowed


@pytest.mark.usefixtures("good_drafts")
def test_nothing_rejected(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in ("token", "block", "match", "greedy"):
        monkeypatch.setitem(verify.RULES, rule, keep_all)
    document = certify(capsys, folder, 300)
    assert {GREEDY, WALK_BLOCK, WALK_TOKEN, BLOCK, TOKEN, MATCH, SAME, DRAFTS} <= failed(document)
    assert document["checks"][-1]["numbers"]["rejected"] == 0
    assert document["checks"][-1]["numbers"]["accepted"] > 0


def test_nothing_drafted(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every text is exact, and none of it is a proof: the control has no fault to show either."""
    monkeypatch.setattr(decode.engine.Decoding, "_room_for_drafts", lambda *_: 0)
    document = certify(capsys, folder, 300)
    assert failed(document) == {WALK_CONTROL, LAW_CONTROL, DRAFTS}
    assert document["checks"][-1]["numbers"] == {"drafted": 0, "accepted": 0, "rejected": 0}


def test_a_control_that_shows_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random recurrent heads are almost never right, and where no draft can be kept, every rule is exact."""
    document = certify(capsys, folder, 300, "--heads", folder / "llama-recurrent")
    assert failed(document) == {WALK_CONTROL, LAW_CONTROL}


@pytest.mark.usefixtures("good_drafts")
def test_drafts_from_another_law_than_q(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest draft in place of a drawn one. Match does not look at q and stays exact."""
    monkeypatch.setattr(decode.chain, "propose", lambda q, request, random: q.argmax(dim=-1))
    names = failed(certify(capsys, folder))
    assert {WALK_BLOCK, WALK_TOKEN, BLOCK, TOKEN} <= names <= {WALK_BLOCK, WALK_TOKEN, BLOCK, TOKEN, LAW_CONTROL}


def second_best(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Greedy rows on the second-best token where the best has an id divisible by 3."""
    if not sampling.greedy:
        return to_probs(logits, sampling)
    best = logits.topk(2, dim=-1).indices
    chosen = torch.where(best[..., :1] % 3 == 0, best[..., 1:], best[..., :1])
    return torch.zeros_like(logits).scatter_(-1, chosen, 1.0)


def forgetful(self: BaseTarget, length: int) -> None:
    """A rollback that leaves one rejected draft in the cache."""
    assert self._cache is not None
    self._cache.rollback(min(self._cache.length, length + 1))


def seedless(seed: int, device: torch.device) -> KeyedSource:
    return KeyedSource(0, device=device)


@pytest.mark.usefixtures("good_drafts")
@pytest.mark.parametrize(
    ("place", "name", "wrong", "found", "allowed"),
    [
        pytest.param(decode.laws, "to_probs", second_best, {GREEDY}, {LAW_CONTROL}, marks=pytest.mark.slow),
        (verify, "RULES", {**verify.RULES, "greedy": keep_all}, {GREEDY}, {LAW_CONTROL}),
        (BaseTarget, "rollback", forgetful, {GREEDY}, {*NAMES} - {GREEDY_CONTROL, OTHER, DRAFTS}),
        pytest.param(KeyedSource, "seek", lambda *_: None, {SAME}, {LAW_CONTROL}, marks=pytest.mark.slow),
        (decode.decoder, "KeyedSource", seedless, {OTHER}, {LAW_CONTROL}),
    ],
    ids=["second-best", "greedy rule", "rollback", "seek", "seedless"],
)
def test_other_faults(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    wrong: object,
    found: set[str],
    allowed: set[str],
) -> None:
    monkeypatch.setattr(place, name, wrong)
    names = failed(certify(capsys, folder, 300))
    assert found <= names <= found | allowed


# ---- bad input, and faults that were found ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--heads is missing"),
        (["--heads", "{}/llama-medusa", "--samples", "5"], "--samples is 5; use at least 300"),
        (["--heads", "{}/llama-medusa", "--samples", "x"], "samples"),
        (["--heads", "{}/llama-medusa", "--prompts", "{}/none.jsonl"], "none.jsonl is not a file"),
        (["--heads", "{}/llama-medusa", "--limit", "1"], "--limit is 1, but it only applies to --prompts"),
        (["--heads", "{}/llama-medusa", "--prompts", "{}/prompts.jsonl", "--limit", "0"], "--limit is 0"),
        (["--heads", "{}/llama-medusa", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--heads", "{}/llama-medusa", "--seed", "-1"], "--seed is -1"),
        (["--heads", "{}/missing"], "missing"),
        (["--heads", "{}/llama-medusa", "--base", "{}/qwen2-0"], "other weights"),
        (["--heads", "{}/llama-medusa", "--temperature", "1"], "--temperature"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code = main(["check", *[arg.replace("{}", str(folder)) for arg in args]])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.usefixtures("good_drafts")
def test_an_impossible_token_leaves_the_document_json(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    monkeypatch.setitem(verify.RULES, "token", keep_all)
    main(
        ["check", "--heads", str(folder / "llama-medusa"), "--prompts", str(folder / "prompts.jsonl")]
        + ["--limit", "1", "--samples", "300", "--max-new-tokens", "4", "--json"]
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=refuse)
    assert "inf" in [finding["numbers"].get("statistic") for finding in document["checks"]]


def test_a_prompt_without_room_for_the_tokens_is_refused(folder: Path) -> None:
    """Texts that end early would look like impossible ones."""
    base = tiny_base("llama", folder)
    decoder = Decoder(base, new_heads(HeadsOptions(kind="medusa", draft_length=K), base))
    settings = CheckSettings(prompts=[[5] * (CONTEXT - 2)], samples=300, max_new_tokens=4)
    with pytest.raises(UserError, match="leaves room for 3 more"):
        check(decoder, settings)


def test_a_control_that_failed_does_not_say_that_the_fault_was_seen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = certify(capsys, folder, 300, "--heads", folder / "llama-recurrent")
    for control in (finding for finding in document["checks"] if finding["name"] in {WALK_CONTROL, LAW_CONTROL}):
        assert not control["passed"]
        assert "the fault is not seen" in control["text"]


# ---- the embedded base -----------------------------------------------------------------------------------------------


def started_heads(base: FrozenBase, texts: int = 4) -> Heads:
    """Heads with the closed-form start, fitted on a few hundred positions of the base's own answers."""
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(draft_length=2), base, torch.arange(8_192))
    assert isinstance(heads, RecurrentHeads)
    moments = Moments(heads)
    for line in (Path(__file__).parents[2] / "configs/data/demo_answers.jsonl").read_text().splitlines()[:texts]:
        text = base.tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        ids = torch.tensor(base.tokenizer(text, add_special_tokens=False)["input_ids"])
        output = base.forward(ids[None], feature_layers=heads.config.feature_layers)
        features, states = output.features[0], output.hidden[0]
        moments.add(features[:-1], states[:-1], ids[1:], states[1:])
    start_from_states(heads, moments)
    return heads


@pytest.mark.slow  # the README's own check runs on it
def test_the_embedded_base(smollm2: FrozenBase) -> None:
    """All but the control of the law, for which 300 texts may be too few; what is drafted is sometimes right."""
    settings = CheckSettings(prompts=["Why is the sky blue?"], samples=300, max_new_tokens=5)
    findings = {f.name: f for f in check(Decoder(smollm2, started_heads(smollm2)), settings)}
    assert {name for name, finding in findings.items() if not finding.passed} <= {LAW_CONTROL}
    assert findings[DRAFTS].numbers["accepted"] > 10
