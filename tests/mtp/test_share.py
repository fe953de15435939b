"""Heads over a Hub that speaks HTTP: what was sent comes back bit by bit, and each way to fail has its sentence."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from decode.cli import main
from decode.decoder import Decoder
from mtp.base import FrozenBase
from mtp.config import BaseRef, HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, MedusaHeads, build_heads
from mtp.hub import load_heads, save_heads
from mtp.hub_access import HubAccess
from mtp.initialise import new_heads
from tests.fake_hub import READS, WRITES, FakeHub, as_the_hub, serving
from tests.mtp.heads_toys import KINDS, toy_config, toy_heads
from tests.tiny import save_tiny

VOCABULARY = torch.arange(0, 40, 2)
SHARED = BaseRef(name="org/base", revision="a" * 40, fingerprint="f", tokenizer_fingerprint="t")
PROMPT = [5, 9, 13]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """The client's own lines on retries are not looked at here."""
    logger = logging.getLogger("huggingface_hub")
    level, logger.level = logger.level, logging.CRITICAL
    yield
    logger.level = level


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with serving() as found, as_the_hub(found, tmp_path / "cache"):
        yield found


def shared(kind: str = "recurrent", seed: int = 0) -> Heads:
    return toy_heads(kind, VOCABULARY, seed=seed, base=SHARED).float()


def same(one: Heads, other: Heads) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def fetched(hub: FakeHub) -> list[str]:
    return [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_comes_back(kind: str, hub: FakeHub) -> None:
    heads = shared(kind)
    done = heads.push_to_hub("you/heads", license="mit")
    assert hub.repos["you/heads"].refs["main"] == done.oid
    assert hub.repos["you/heads"].commits[done.oid].keys() == {"config.json", "model.safetensors", "README.md"}
    back = Heads.from_pretrained("you/heads")
    assert same(heads, back)
    assert (back.config, type(back), back.training) == (heads.config, type(heads), False)


def test_a_revision_is_kept_to(hub: FakeHub) -> None:
    first, second, third = (shared(seed=seed) for seed in range(3))
    commit = first.push_to_hub("you/heads").oid
    second.push_to_hub("you/heads", commit_message="better")
    third.push_to_hub("you/heads", revision="v3")
    assert same(first, Heads.from_pretrained("you/heads", revision=commit))
    assert same(first, Heads.from_pretrained(f"you/heads@{commit}"))
    assert same(second, Heads.from_pretrained("you/heads"))
    assert same(third, Heads.from_pretrained("you/heads@v3"))
    with pytest.raises(UserError, match="names the revision v3, and revision is main; give one"):
        Heads.from_pretrained("you/heads@v3", revision="main")
    with pytest.raises(UserError, match=r"you/heads@v9 .* has no such revision of it \(404\)"):
        Heads.from_pretrained("you/heads@v9")


def test_save_pretrained_can_send_too(hub: FakeHub, tmp_path: Path) -> None:
    heads = shared()
    assert heads.save_pretrained(tmp_path / "one") is None
    assert same(heads, Heads.from_pretrained(tmp_path / "one"))
    heads.save_pretrained(tmp_path / "two", push_to_hub=True, repo_id="you/heads", private=True)
    assert hub.repos["you/heads"].private
    assert same(heads, Heads.from_pretrained("you/heads"))


def test_a_pull_request_leaves_the_branch_alone(hub: FakeHub) -> None:
    commit = shared().push_to_hub("you/heads").oid
    done = shared(seed=1).push_to_hub("you/heads", create_pr=True)
    assert done.pr_url.endswith("/you/heads/discussions/1")
    assert hub.repos["you/heads"].refs["main"] == commit


def test_the_card_stays_with_heads_that_are_the_same(hub: FakeHub, tmp_path: Path) -> None:
    folder = save_heads(shared(), tmp_path / "heads", card="# Mine\n\nτ is 3.\n")
    heads = Heads.from_pretrained(folder)
    done = heads.push_to_hub("you/heads", license="mit")
    card = hub.repos["you/heads"].commits[done.oid]["README.md"].decode()
    assert "τ is 3." in card
    assert "license: mit" in card
    with torch.no_grad():
        next(heads.parameters()).add_(1)
    done = heads.push_to_hub("you/heads")
    assert "τ is 3." not in hub.repos["you/heads"].commits[done.oid]["README.md"].decode()


def test_heads_of_another_kind_than_asked_for(tmp_path: Path) -> None:
    shared().save_pretrained(tmp_path / "heads")
    with pytest.raises(UserError, match="holds recurrent heads, which are no MedusaHeads; use Heads.from_pretrained"):
        MedusaHeads.from_pretrained(tmp_path / "heads")


# ---- the base that they are for --------------------------------------------------------------------------------------


def test_the_base_is_the_one_of_the_commit_and_no_other(hub: FakeHub, tmp_path: Path) -> None:
    """Main has moved on since the heads were trained; they still get their own base, and refuse the new one."""
    first = hub.add("org/base", save_tiny("llama", tmp_path / "first"))
    given = {"device": "cpu", "cache_dir": tmp_path / "bases"}
    base = FrozenBase.from_pretrained("org/base", revision="main", **given)
    assert base.revision == first
    heads = new_heads(HeadsOptions(draft_length=2), base)
    assert heads.config.base.revision == first
    heads.push_to_hub("you/heads")
    second = hub.add("org/base", save_tiny("llama", tmp_path / "second", seed=1))
    found = Decoder.from_pretrained("you/heads", compile="off", **given)
    assert found.base.revision == first != second
    plain = Decoder(base).generate(PROMPT, max_new_tokens=12).token_ids
    assert found.generate(PROMPT, max_new_tokens=12).token_ids == plain

    told: list[str] = []
    with pytest.raises(UserError, match=f"other weights than --base org/base; use .*{first}.*--allow-other-base"):
        Decoder.from_pretrained("you/heads", revision="main", compile="off", **given)
    other = Decoder.from_pretrained(
        "you/heads", revision="main", compile="off", allow_other_base=True, on_progress=told.append, **given
    )
    assert "follows exactly the base that is given, and fewer drafts are accepted" in told[-1]
    plain_other = Decoder(FrozenBase.from_pretrained("org/base", **given)).generate(PROMPT, max_new_tokens=12)
    assert other.generate(PROMPT, max_new_tokens=12).token_ids == plain_other.token_ids != plain


def test_other_sizes_are_never_taken(tmp_path: Path) -> None:
    base = FrozenBase.from_pretrained(str(save_tiny("llama", tmp_path / "base")), device="cpu")
    heads = build_heads(toy_config("recurrent", vocab_size=32))
    with pytest.raises(UserError, match="vocabulary size 32 instead of 64") as told:
        Decoder(base, heads, allow_other_base=True)
    assert "--allow-other-base" not in str(told.value)
    deep = build_heads(toy_config("recurrent", feature_layers=(1, 2, 9)))
    with pytest.raises(UserError, match="they read layer 9, and it has 4"):
        Decoder(base, deep, allow_other_base=True)


def test_a_base_is_not_fetched_as_heads(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/base", save_tiny("llama", tmp_path / "base"))
    with pytest.raises(UserError, match=r"org/base is on the Hub, but its config.json is not that of heads"):
        Heads.from_pretrained("org/base")
    assert [path.rpartition("/")[2] for path in fetched(hub)] == ["config.json"]


def test_nothing_but_safetensors_is_read(hub: FakeHub, tmp_path: Path) -> None:
    folder = save_heads(shared(), tmp_path / "heads")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    hub.add("you/heads", folder)
    with pytest.raises(UserError, match="has no model.safetensors, and no other file of weights is read"):
        Heads.from_pretrained("you/heads")
    assert not any(path.endswith(".bin") for path in fetched(hub))


# ---- answers ---------------------------------------------------------------------------------------------------------

ANSWERS = {
    401: r"does not take the token \(401\); log in with `hf auth login` or set HF_TOKEN anew",
    403: r"the account may not do that \(403: as the test wants\); use a token with the right to",
    404: r"does not have it, or not for this account \(404\); look at the spelling",
    418: r"the Hub refuses \(418\)",
    500: r"the Hub has trouble of its own \(500\); repeat the command later",
    503: r"the Hub has trouble of its own \(503\)",
}


WAYS: dict[str, tuple[Callable[..., object], str]] = {
    "fetch": (Heads.from_pretrained, "you/heads"),
    "push": (lambda name, token: shared().push_to_hub(name, token=token), "you/heads"),
    "base": (FrozenBase.from_pretrained, "org/base"),
}


@pytest.mark.parametrize("status", ANSWERS)
@pytest.mark.parametrize("way", WAYS)
def test_each_answer_has_its_sentence(status: int, way: str, hub: FakeHub) -> None:
    hub.trouble = lambda method, path: status
    message = ANSWERS[status]
    if status == 401 and way != "push":
        message = (
            "does not take the token|does not have it, or not for this account"  # the client cannot tell them apart
        )
    ask, name = WAYS[way]
    with pytest.raises(UserError, match=message) as told:
        ask(name, token="hf_mine0123456789")
    assert "hf_" not in str(told.value)
    assert name in str(told.value)
    # Without a token asks only a thread that transformers starts behind the scenes, in a test before this one.
    assert {token for *_, token in hub.asked} - {""} == {"hf_mine0123456789"}


def test_what_is_not_there(hub: FakeHub) -> None:
    with pytest.raises(UserError, match=r"--heads you/nothing is no folder on this machine.*does not have it"):
        Heads.from_pretrained("you/nothing")
    with pytest.raises(UserError, match=r"--repo is 'a/b/c'.*write it as owner/name"):
        shared().push_to_hub("a/b/c")


def test_a_private_repository(hub: FakeHub) -> None:
    shared().push_to_hub("you/heads", private=True)
    assert same(shared(), Heads.from_pretrained("you/heads", token=READS))
    with pytest.raises(UserError, match=r"not for this account \(401\)"):
        Heads.from_pretrained("you/other", token=False)
    with pytest.raises(UserError, match="403: this token cannot write"):
        shared().push_to_hub("you/heads", token=READS)


def test_private_heads_are_not_sent_to_where_all_can_read(hub: FakeHub) -> None:
    shared().push_to_hub("you/heads")
    before = dict(hub.repos["you/heads"].refs)
    with pytest.raises(UserError, match="can be read by everybody, but private was asked for; nothing was sent"):
        shared(seed=1).push_to_hub("you/heads", private=True)
    assert hub.repos["you/heads"].refs == before


@pytest.mark.parametrize("token", ["hf_secretsecret\nsecret", "geheim\r\nx", WRITES])
def test_a_token_is_never_told(
    token: str, hub: FakeHub, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even where the HTTP library would show the header that it cannot send."""
    hub.trouble = lambda method, path: 403
    for way in (shared().push_to_hub, Heads.from_pretrained):
        with pytest.raises(UserError) as told:
            way("you/heads", token=token)
        assert told.value.__suppress_context__
        assert not any(part in str(told.value) for part in token.split())
    out, err = capfd.readouterr()
    for text in (out, err, caplog.text, repr(HubAccess(token=token))):
        assert not any(part in text for part in token.split() if len(part) > 1)


# ---- a network that comes and goes -----------------------------------------------------------------------------------


def test_an_interrupted_download_goes_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shared()
    heads.push_to_hub("you/heads")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.cuts = 2
    assert same(heads, Heads.from_pretrained("you/heads"))
    assert sum(path.endswith(".safetensors") for path in fetched(hub)) == 3
    assert hub.cuts == 0


def test_a_download_that_does_not_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shared()
    heads.push_to_hub("you/heads")

    def fails(method: str, path: str) -> int | None:
        return 500 if method == "GET" and path.endswith(".safetensors") else None

    hub.trouble = fails
    with pytest.raises(UserError, match="the Hub has trouble of its own"):
        Heads.from_pretrained("you/heads")
    hub.trouble = lambda method, path: None
    assert same(heads, Heads.from_pretrained("you/heads"))


def test_without_a_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shared()
    commit = heads.push_to_hub("you/heads").oid
    for name in ("local_files_only", "HF_HUB_OFFLINE"):
        if name == "HF_HUB_OFFLINE":
            monkeypatch.setattr(constants, name, True)
            huggingface_hub.close_session()
        only = {"local_files_only": name == "local_files_only"}
        with pytest.raises(
            UserError, match=f"not in the Hub's local cache, and {name} forbids the network; load it once"
        ):
            Heads.from_pretrained("you/other", **only)
    monkeypatch.undo()
    Heads.from_pretrained("you/heads")
    asked = len(hub.asked)
    assert same(heads, Heads.from_pretrained("you/heads", local_files_only=True))
    assert same(heads, Heads.from_pretrained(f"you/heads@{commit}", local_files_only=True))
    assert len(hub.asked) == asked
    with pytest.raises(UserError, match="HF_HUB_OFFLINE|local_files_only forbids the network"):
        FrozenBase.from_pretrained("org/base", local_files_only=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert same(heads, Heads.from_pretrained("you/heads"))
    with pytest.raises(UserError, match="the Hub cannot be reached, and its local cache does not have it"):
        Heads.from_pretrained("you/other")


@pytest.mark.parametrize("offline", [False, True])
def test_sending_without_a_network(offline: bool, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What helps is told for sending: no cache, and no other folder."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    huggingface_hub.close_session()
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as told:
        shared().push_to_hub("you/heads")
    why = {
        False: "the Hub cannot be reached; look at the network (and at HF_ENDPOINT, if that is set), and repeat",
        True: "HF_HUB_OFFLINE forbids the network; repeat",
    }
    assert str(told.value).startswith(f"--repo you/heads: {why[offline]} the command")
    assert not any(word in str(told.value) for word in ("cache", "folder", "load", "download"))


# ---- the command -----------------------------------------------------------------------------------------------------


def push(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["push", *(str(arg) for arg in args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_shows_sends_and_others_can_use_it(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = FrozenBase.from_pretrained(str(save_tiny("llama", tmp_path / "secret-folder")), device="cpu")
    folder = save_heads(new_heads(HeadsOptions(draft_length=2), base), tmp_path / "heads")
    (folder / "notes.txt").write_text("not for everybody")
    args = ["--heads", folder, "--repo", "you/heads", "--json"]
    code, _, err = push(capsys, *args, "--license", "mit")
    assert (code, "--base-model OWNER/NAME" in err) == (2, True), err
    args += ["--base-model", "org/base"]
    code, _, err = push(capsys, *args)
    assert (code, "--license is missing" in err) == (2, True), err
    code, _, err = push(capsys, *args, "--license", "My Licence")
    assert (code, "--license is 'My Licence'; use one of the Hub's" in err) == (2, True), err
    args += ["--license", "apache-2.0"]
    code, out, err = push(capsys, *args, "--dry-run", "--private")
    report = json.loads(out.splitlines()[-1])
    assert (code, report["commit"], report["private"], "would be sent" in err) == (0, None, True, True)
    assert report["card"]["base_model"] == "org/base"
    assert hub.asked == []

    code, out, err = push(capsys, *args)
    assert code == 0, err
    sent = hub.repos["you/heads"].commits[hub.repos["you/heads"].refs["main"]]
    assert json.loads(out.splitlines()[-1])["commit"].startswith(f"{hub.url}/you/heads/commit/")
    assert sent.keys() == {"config.json", "model.safetensors", "README.md"}
    assert not any(b"secret-folder" in data for data in sent.values())
    assert (tmp_path / "secret-folder").is_dir()
    assert load_heads(folder).config.base.name == base.name  # the user's own folder stays as it was

    hub.add("org/base", tmp_path / "secret-folder")
    given = ["--device", "cpu", "--compile", "off", "--prompt", "the user", "--max-new-tokens", "4"]
    assert main(["generate", "--heads", "you/heads", *given]) == 0
    theirs = capsys.readouterr().out
    assert main(["generate", "--heads", str(folder), *given]) == 0
    assert capsys.readouterr().out == theirs


REFUSED: dict[str, tuple[list[str], str]] = {
    "both targets": (["--create-pr", "--revision", "foo"], "--revision is foo, but a pull request goes to the main"),
    "licence": (["--license", "nonsense"], "--license is 'nonsense'; use one of the Hub's identifiers"),
    "near licence": (["--license", "apache"], "did you mean 'apache-2.0'?"),
    "name": (["--repo", "a/b/c"], "--repo is 'a/b/c'"),
    "base": (["--base-model", "base"], "--base-model is 'base'; name a base on the Hub"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_would_be_sent_is_checked_as_what_is_sent(
    case: str, dry: list[str], hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_heads(shared(), tmp_path / "heads")
    more, message = REFUSED[case]
    code, out, err = push(capsys, "--heads", folder, "--repo", "you/heads", "--license", "mit", *more, *dry)
    assert (code, out, message in err, hub.asked) == (2, "", True, []), err


def test_the_command_sends_nothing_that_is_not_whole(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_heads(shared(), tmp_path / "heads")
    args = ["--heads", folder, "--repo", "you/heads", "--license", "mit"]
    (folder / "README.md").write_text("---\ntags: [a\n---\n# Card\n")
    code, _, err = push(capsys, *args)
    assert (code, "has metadata that cannot be read" in err) == (2, True), err
    (folder / "model.safetensors").write_bytes(b"x")
    code, _, err = push(capsys, *args)
    assert (code, "cannot be read" in err) == (2, True), err
    for missing, message in ((args[2:], "--heads is missing"), (args[:2], "--repo is missing")):
        code, _, err = push(capsys, *missing)
        assert (code, message in err) == (2, True), err
    assert hub.asked == []


def test_the_hub_may_refuse_the_card(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(UserError, match='"license" must be one of'):
        shared().push_to_hub("you/heads", card="---\nlicense: no-such-thing\n---\n# Mine\n")
    assert list(hub.repos["you/heads"].commits.values()) == [{}]
