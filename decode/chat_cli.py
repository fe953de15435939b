"""`mtp-decode chat`: lines in, answers out, in a terminal or a pipe.

Knows: commands, Ctrl-C, and what to say when something ends. Refuses to know how a conversation becomes tokens
(`decode.conversation`).
"""

import contextlib
import sys
from collections.abc import Iterator

from jsonargparse import ArgumentParser, Namespace

from decode.cli import BAD_INPUT, INTERRUPTED
from decode.command import add_models, load_decoder
from decode.conversation import ContextFull, Conversation
from decode.options import add_request_options, read_request
from decode.play import add_colour, colours, play, wants_colour
from decode.report import show_stats
from decode.stats import DecodeStats
from decode.stopping import ToText
from decode.stream import Stream
from decode.terminal import Terminal, exact_output
from mtp.errors import UserError
from mtp.suggest import did_you_mean

COMMANDS = {
    "/help": "these commands",
    "/reset": "begin a new conversation",
    "/stats": "what decoding came to so far",
    "/exit": "leave; so does Ctrl-D",
}
_PROMPT = "> "
_FULL = "/reset begins a new conversation."


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `chat`."""
    add_models(parser, "folder of trained heads, or smollm2-135m; without, --base decodes plainly")
    parser.add_argument("--system", type=str, metavar="TEXT", help="what the base is told before the conversation")
    add_colour(parser)
    add_request_options(parser, without=("chat", "logprobs"))
    parser.set_defaults(max_new_tokens=512)


def run(options: Namespace) -> int:
    """`mtp-decode chat`."""
    exact_output()
    terminal, request, coloured = Terminal.of(options), read_request(options), wants_colour(options)
    decoder = load_decoder(options, terminal)
    talk = _Talk(Conversation(decoder, request, options.system), terminal, request.max_new_tokens)
    if sys.stdin.isatty():
        terminal.say("/help tells the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    talk.to_text = colours(decoder, coloured, terminal)
    try:
        for line in lines():
            if not talk.take(line):
                break
    except KeyboardInterrupt:
        terminal.say("")
        return INTERRUPTED
    return BAD_INPUT if talk.refused and not sys.stdin.isatty() else 0


def lines() -> Iterator[str]:
    """What is typed, or comes from a pipe, without the ends of lines; over at the end of input."""
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield as_text(line.rstrip("\r\n"))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    while True:
        try:
            yield as_text(_typed())
        except EOFError:
            print(file=sys.stderr)
            return


def _typed() -> str:
    """A typed line. The prompt is stdout's only if that is the terminal too."""
    if sys.stdout.isatty():
        return input(_PROMPT)
    print(_PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def as_text(line: str) -> str:
    """UTF-8 that was read in a narrower encoding, such as that of LC_ALL=C."""
    try:
        line.encode()
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeError, AttributeError):
            return line.encode(sys.stdin.encoding or "ascii", "surrogateescape").decode()
    return line


class _Talk:
    """Takes lines, one at a time."""

    def __init__(self, conversation: Conversation, terminal: Terminal, limit: int) -> None:
        self._conversation, self._terminal, self._limit = conversation, terminal, limit
        self.to_text: ToText | None = None
        self._total: DecodeStats | None = None
        self._stopped = False
        self.refused = False

    def take(self, line: str) -> bool:
        """Answer a line, or do what it says; False to leave."""
        line = line.strip()
        if line.startswith("/") and not line.startswith("//"):
            return self._command(line)
        if line:
            self._answer(line[1:] if line.startswith("//") else line)
        return True

    def _command(self, line: str) -> bool:
        name = line.split()[0]
        if name == "/reset":
            self._conversation.reset()
            self._terminal.say("a new conversation")
        elif name == "/stats":
            self._stats()
        elif name == "/help":
            self._terminal.say("\n".join(f"{command:8}{told}" for command, told in COMMANDS.items()))
        elif name != "/exit":
            hint = did_you_mean(name, COMMANDS)
            self._terminal.say(f"{name} is no command; {hint} A line that begins with // is sent, with one of them.")
        return name != "/exit"

    def _stats(self) -> None:
        if self._total is None or not self._total.steps:
            self._terminal.say("nothing was decoded yet")
            return
        if not self._terminal.quiet:
            show_stats(self._total)
        self._terminal.say(f"{self._conversation.turns} answers, {self._conversation.tokens} tokens to read so far")

    def _answer(self, text: str) -> None:
        stream: Stream | None = None
        try:
            stream = self._conversation.ask(text)
            play(stream, self.to_text)
        except KeyboardInterrupt:
            self._stop()
        except ContextFull as error:
            self._refuse(f"{error} {_FULL}")
        except UserError as error:
            self._refuse(str(error))
        if stream is not None:
            self._keep(text, stream)

    def _stop(self) -> None:
        """The first Ctrl-C of an answer; in a pipe, where nobody types in between, a second one leaves."""
        if self._stopped and not sys.stdin.isatty():
            raise KeyboardInterrupt
        self._stopped = True
        self._terminal.say("stopped; what was said stays. Ctrl-C again or Ctrl-D leaves.")

    def _refuse(self, told: str) -> None:
        self.refused = True
        print(f"error: {' '.join(told.split())}", file=sys.stderr)

    def _keep(self, text: str, stream: Stream) -> None:
        if self._total is None:
            self._total = stream.stats.empty()
        self._total.merge(stream.stats)
        if not stream.text:
            return
        self._conversation.keep(text, stream.text)
        if stream.finish_reason == "length":
            self._terminal.say(f"(cut at --max-new-tokens {self._limit})")
        elif stream.finish_reason == "context":
            self._terminal.say(f"(the context is full; {_FULL})")
