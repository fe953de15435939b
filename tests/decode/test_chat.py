"""`mtp-decode chat`: turns, commands, and what ends an answer and the conversation; by a pipe, without a keyboard."""

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decode import Decoder
from decode.chat_cli import as_text
from decode.cli import main
from decode.conversation import ContextFull, Conversation
from decode.request import Request
from decode.stream import Stream
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.tiny import CONTEXT, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    base = tiny_base("llama", folder)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=3), base), folder / "heads")
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder / "heads", compile="off", device="cpu")


@pytest.fixture
def chat(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    def run(typed: str, *args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        fixed = ("--heads", folder / "heads", "--max-new-tokens", 6, "--compile", "off")
        code = main(["chat", *map(str, (*fixed, *args))])
        return code, *capsys.readouterr()

    return run


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_every_turn_has_those_before(chat: Chat, decoder: Decoder) -> None:
    code, out, err = chat("the user\n\nwhat\n")
    first = decoder.generate([turn("user", "the user")], max_new_tokens=6).text
    messages = [turn("user", "the user"), turn("assistant", first), turn("user", "what")]
    second = decoder.generate(messages, max_new_tokens=6).text
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert "error" not in err


def test_reset_and_system(chat: Chat, decoder: Decoder) -> None:
    asked = [turn("system", "be"), turn("user", "the user")]
    once = decoder.generate(asked, max_new_tokens=6).text
    code, out, err = chat("the user\n/reset\nthe user\n/exit\nnever read\n", "--system", "be")
    assert (code, out) == (0, f"{once}\n{once}\n")
    assert "a new conversation" in err


def test_commands(chat: Chat) -> None:
    code, out, err = chat("/stats\n/help\n/rest\n//slash\n/stats\n")
    assert code == 0
    assert "nothing was decoded yet" in err
    assert "/reset  begin a new conversation" in err
    assert "/rest is no command; use one of /help, /reset, /stats, /exit; did you mean '/reset'?" in err
    assert "acceptance length" in err
    assert "1 answers, " in err
    assert out.count("\n") >= 1


def test_a_line_with_two_slashes_is_sent_with_one(chat: Chat, decoder: Decoder) -> None:
    assert chat("//stats\n")[1] == decoder.generate([turn("user", "/stats")], max_new_tokens=6).text + "\n"


def test_a_full_context_is_told_and_reset_goes_on(chat: Chat) -> None:
    many = "hi " * CONTEXT
    code, out, err = chat(f"{many}\nthe user\n")
    assert code == 2  # a pipe has one answer less than lines
    assert f"and this base reads at most {CONTEXT}. /reset begins a new conversation." in err
    assert out.count("\n") >= 1


def test_an_answer_that_ends_at_a_limit_says_so(chat: Chat, decoder: Decoder) -> None:
    long = "hi " * 75
    _, _, err = chat(f"{long}\n", "--logit-bias", "2=-inf", "--max-new-tokens", 6)
    assert "(cut at --max-new-tokens 6)" in err
    _, _, err = chat(f"{long}\n", "--logit-bias", "2=-inf", "--max-new-tokens", 999)
    assert "(the context is full; /reset begins a new conversation.)" in err


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    steps, add = [], Stream.add

    def noted(self: Stream, step: object) -> object:
        piece = add(self, step)  # type: ignore[arg-type]
        steps.append(piece)
        if len(steps) <= times:
            signal.raise_signal(signal.SIGINT)
        return piece

    monkeypatch.setattr(Stream, "add", noted)
    code, out, err = chat("the user\nwhat\nthen\n", "--logit-bias", "2=-inf", "--draft-length", 0)
    assert "stopped; what was said stays. Ctrl-C again or Ctrl-D leaves." in err
    assert code == (0 if times == 1 else 130)
    assert len(steps) == (13 if times == 1 else 2)  # one of the first answer, then six each
    assert out.startswith("\n")


def test_a_base_without_a_template_is_refused(folder: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.base.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="has no chat template, so it was not made to talk; use mtp-decode generate"):
        Conversation(decoder, Request())


def test_a_template_that_refuses_the_system_message_is_told_at_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    monkeypatch.setattr(decoder.base.tokenizer, "chat_template", strict)
    with pytest.raises(UserError, match="no system"):
        Conversation(decoder, Request(), "be brief")
    Conversation(decoder, Request())


def test_what_does_not_fit_is_not_kept(decoder: Decoder) -> None:
    talk = Conversation(decoder, Request(max_new_tokens=2))
    with pytest.raises(ContextFull):
        talk.ask("hi " * CONTEXT)
    assert talk.messages == []
    talk.keep("a", "b")
    assert (talk.turns, talk.tokens > 0) == (1, True)
    talk.reset()
    assert (talk.turns, talk.tokens) == (0, 0)


def test_utf8_in_a_narrow_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdin", Ascii())
    assert as_text("é👩".encode().decode("ascii", "surrogateescape")) == "é👩"
    assert as_text("plain é") == "plain é"
    assert as_text("\udcff") == "\udcff"  # no UTF-8 either: refused where it is encoded


def test_options_that_mean_nothing_here(chat: Chat) -> None:
    for option in ("--no-chat", "--logprobs"):
        code, _, err = chat("", option)
        assert code == 2
        assert f"unrecognized arguments: {option}" in err
