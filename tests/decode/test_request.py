"""`Request`: what it refuses and how, the command line made from it, and processors that may keep state."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from decode import Decoder
from decode.bench import bench
from decode.options import add_request_options, read_request
from decode.request import Request, make_request
from decode.stats import DecodeStats
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from tests.tiny import tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
WARM = {"temperature": 1.0}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = tiny_base("llama", tmp_path_factory.mktemp("request"))
    torch.manual_seed(0)
    return Decoder(base, new_heads(HeadsOptions(draft_length=3), base))


# ---- refusals ----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"verify": "foo"}, "--verify is 'foo'; use one of block, greedy, lossy-typical, match, token."),
    ({"verify": ""}, "--verify is ''; use one of block, greedy, lossy-typical, match, token."),
    ({**WARM, "verify": "greedy"}, "--verify is greedy, but --temperature is 1.0; use 0, or another rule."),
    ({**WARM, "reproducible": True}, "--reproducible needs a seed to reproduce; give --seed."),
    (
        {**WARM, "draft_temperature": -1.0},
        "--draft-temperature is -1.0; use 0 (the likeliest draft) or a positive number, 1e-30 to 1e+30.",
    ),
    (
        {**WARM, "draft_temperature": math.inf},
        "--draft-temperature is inf; use 0 (the likeliest draft) or a positive number, 1e-30 to 1e+30.",
    ),
    (
        {"draft_temperature": 0.7},
        "--draft-temperature is 0.7, but at --temperature 0 only the likeliest draft can be kept; leave it out, or set "
        "--temperature.",
    ),
    ({**WARM, "draft_min_confidence": 1.5}, "--draft-min-confidence is 1.5; use a number from 0 to 1."),
    ({**WARM, "draft_min_confidence": math.nan}, "--draft-min-confidence is nan; use a number from 0 to 1."),
    ({**WARM, "draft_min_prob": -0.1}, "--draft-min-prob is -0.1; use a number from 0 to 1."),
    ({"lookup": -1}, "--lookup is -1; use a number from 0 (off) to 16."),
    ({"lookup": 17}, "--lookup is 17; use a number from 0 (off) to 16."),
    (
        {"lookup": 5, "tree": "2,1"},
        "--lookup is 5, but --tree is 2,1, and what is looked up is a chain; leave one of them out.",
    ),
    ({**WARM, "draft_max_entropy": -1.0}, "--draft-max-entropy is -1.0; use a number from 0 to inf."),
    (
        {"tree": "2,1", "draft_length": 0},
        "--tree is 2,1, but --draft-length is 0, which drafts nothing; leave one out.",
    ),
    (
        {**WARM, "tree": "2", "verify": "lossy-typical"},
        "--verify lossy-typical judges chains only; leave out --tree, or use another rule.",
    ),
    *(
        ({**WARM, "reproducible": True, "seed": 1, "verify": rule}, f"--reproducible decides by match, but --verify is "
         f"{rule}; leave one of them out.")
        for rule in ("block", "token", "lossy-typical")
    ),
    *(
        ({**WARM, "tree": "2", name: value}, "--tree is 2, which has a size of its own; leave out "
         "--draft-min-confidence, --draft-max-entropy and --draft-min-prob.")
        for name, value in (("draft_min_confidence", 0.5), ("draft_min_prob", 0.5), ("draft_max_entropy", 1.0))
    ),
    *(
        ({"tree": tree}, f"--tree is {tree!r}; use children per level as in 3,2,1, or dynamic:16 for the 16 likeliest "
         "nodes, with 1 to 512 nodes in all.")
        for tree in (
            "", "0", "-1", "3,0", "3,,1", "3,", ",3", "1.5", "x", "dynamic", "dynamic:", "dynamic:0", "dynamic:-2",
            "dynamic:x", "dynamic:513", "Dynamic:3", "static:3", "99999", "9,9,9", "513",
            "2,2,2,2,2,2,2,2,2", "9" * 5_000,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictions_and_bad_values_are_refused_in_full(options: dict[str, Any], message: str) -> None:
    """Option, value, what is allowed, what to do. Values of the sampling settings: tests/mtp/test_sampling.py."""
    with pytest.raises(UserError) as error:
        Request(**options)
    assert str(error.value) == message
    with pytest.raises(UserError, match=re.escape(message)):
        make_request(options)


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "greedy"},
        {"reproducible": True},
        {**WARM, "reproducible": True, "seed": 0, "verify": "match"},
        {"reproducible": True, "verify": "match"},
        {**WARM, "draft_temperature": 0.0},
        {**WARM, "tree": "2,1", "draft_temperature": 2.0},
        {"tree": "512"},
        {"tree": "dynamic:512"},
        {"tree": "1,1,1"},
        {"lookup": 16},
        {"lookup": 0, "tree": "2,1"},
        {"lookup": 1, "draft_length": 0, "reproducible": True},
        {**WARM, "draft_min_confidence": 1.0, "draft_min_prob": 1.0, "draft_max_entropy": 0.0},
    ],
    ids=str,
)
def test_the_edge_of_what_is_allowed(options: dict[str, Any]) -> None:
    request = Request(**options)
    assert all(getattr(request, name) == value for name, value in options.items())


@pytest.mark.parametrize("name", ["stop_ids", "max_new_tokens", "draft_length", "lookup", "seed"])
def test_numbers_below_their_range_are_refused_before_decoding(decoder: Decoder, name: str) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} is -4[,;].* use "):
        decoder.stream("hi", **{name: -4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "2,1,1,1"}, "--tree is 2,1,1,1, 4 levels deep, but K is 3; use at most as many."),
        ({"tree": "2,1", "draft_length": 1}, "--tree is 2,1, 2 levels deep, but K is 1; use at most as many."),
    ],
)
def test_a_tree_deeper_than_the_heads_is_refused(decoder: Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        decoder.stream("hi", **options)


def test_a_tree_without_heads_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UserError, match="--tree is 2,1, but there are no heads to draft with; name --heads."):
        Decoder(decoder.base).stream("hi", tree="2,1")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean 'temperature'?"),
        ("max_tokens", "did you mean 'max_new_tokens'?"),
        ("draft_len", "did you mean 'draft_length'?"),
        ("stop_id", "did you mean 'stop_ids'?"),
        ("zzz", "use one of bad_words, bad_words_ids, chat, "),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(decoder: Decoder, name: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' is no option of decoding; {re.escape(hint)}"):
        decoder.generate("hi", **{name: 1})


def test_options_change_a_request_and_lists_become_tuples() -> None:
    request = make_request({"stop": ["a", "b"], "stop_ids": [3], "temperature": 0.5})
    assert request == Request(stop=("a", "b"), stop_ids=(3,), temperature=0.5)
    assert hash(request) == hash(Request(stop=("a", "b"), stop_ids=(3,), temperature=0.5))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_one_text_is_not_taken_as_its_characters(decoder: Decoder, name: str) -> None:
    """Either it means the whole text or it is refused; what it does now is to end at, or ban, each of its letters."""
    text = decoder.generate("hi", max_new_tokens=20).text[6:9]
    whole = decoder.generate("hi", max_new_tokens=20, **{name: [text]})
    try:
        result = decoder.generate("hi", max_new_tokens=20, **{name: text})
    except UserError:
        return
    assert result.token_ids == whole.token_ids


def test_bad_words_as_texts_and_as_lists_of_ids(decoder: Decoder) -> None:
    result = decoder.generate("hi", max_new_tokens=2, bad_words=["zq"], bad_words_ids=[[5, 6]])
    assert len(result.token_ids) > 0
    assert result.token_ids != [5, 6]


# ---- names of rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule", "in_a_tree"),
    [
        ({}, "greedy", "greedy"),
        ({"verify": "token"}, "greedy", "greedy"),
        ({"reproducible": True}, "greedy", "greedy"),
        (WARM, "block", "traversal"),
        ({**WARM, "verify": "block"}, "block", "traversal"),
        ({**WARM, "verify": "token"}, "token", "recursive"),
        ({**WARM, "verify": "match"}, "match", "match"),
        ({**WARM, "reproducible": True, "seed": 1}, "match", "match"),
        ({**WARM, "verify": "lossy-typical"}, "lossy-typical", None),
    ],
    ids=str,
)
def test_the_rule_that_judges(decoder: Decoder, options: dict[str, Any], rule: str, in_a_tree: str | None) -> None:
    request = Request(**options, max_new_tokens=4)
    assert (request.rule, request.reported_rule) == (rule, rule)
    stats = decoder.generate("hi", request).stats.to_json()
    assert (stats["verify"], stats["lossless"], stats["tree"]) == (rule, not rule.startswith("lossy"), None)
    if in_a_tree:
        stats = decoder.generate("hi", request, tree="2,1").stats.to_json()
        assert (stats["verify"], stats["lossless"], stats["tree"]) == (in_a_tree, True, "2,1")


# ---- the command line --------------------------------------------------------------------------------------------

SPELT: dict[str, tuple[str, Any]] = {
    "temperature": ("--temperature 0.5", 0.5),
    "top_k": ("--top-k 4", 4),
    "top_p": ("--top-p 0.9", 0.9),
    "min_p": ("--min-p 1e-2", 0.01),
    "typical_p": ("--typical-p 0.8", 0.8),
    "epsilon_cutoff": ("--epsilon-cutoff 0.001", 0.001),
    "eta_cutoff": ("--eta-cutoff 0.002", 0.002),
    "repetition_penalty": ("--repetition-penalty 2", 2.0),
    "presence_penalty": ("--presence-penalty -0.5", -0.5),
    "frequency_penalty": ("--frequency-penalty 0.25", 0.25),
    "no_repeat_ngram": ("--no-repeat-ngram 3", 3),
    "suppress_tokens": ("--suppress-tokens 3 4 --suppress-tokens 5", (3, 4, 5)),
    "min_new_tokens": ("--min-new-tokens 2", 2),
    "logit_bias": ("--logit-bias 13=-2.5 4=1 --logit-bias 5=-inf", {13: -2.5, 4: 1.0, 5: -math.inf}),
    "max_new_tokens": ("--max-new-tokens 7", 7),
    "seed": ("--seed 9223372036854775807", 2**63 - 1),
    "draft_length": ("--draft-length 0", 0),
    "verify": ("--verify token", "token"),
    "reproducible": ("--reproducible", True),
    "tree": ("--tree 3", "3"),
    "draft_temperature": ("--draft-temperature 2 --temperature 1", 2.0),
    "draft_min_confidence": ("--draft-min-confidence 0.3", 0.3),
    "draft_max_entropy": ("--draft-max-entropy 2", 2.0),
    "draft_min_prob": ("--draft-min-prob 0.1", 0.1),
    "lookup": ("--lookup 5", 5),
    "stop": ("--stop 12 null true [x] 3.0 --stop=--y", ("12", "null", "true", "[x]", "3.0", "--y")),
    "stop_ids": ("--stop-ids 3 --stop-ids 4", (3, 4)),
    "ignore_eos": ("--ignore-eos", True),
    "bad_words": ("--bad-words 7 b", ("7", "b")),
    "logprobs": ("--logprobs", True),
    "chat": ("--no-chat", False),
}


def parse(text: str) -> Request:
    parser = ArgumentParser(exit_on_error=False)
    add_request_options(parser)
    return read_request(parser.parse_args(text.split()))


def test_every_option_can_be_spelt() -> None:
    """But those that are marked as Python's own, and ids of bad words, for which the shell has texts."""
    expected = {item.name for item in fields(Request) if not item.metadata.get("python_only")} - {"bad_words_ids"}
    assert set(SPELT) == expected
    assert parse("") == Request()


@pytest.mark.parametrize("name", SPELT)
def test_an_option_arrives_with_its_value_and_type(name: str) -> None:
    text, value = SPELT[name]
    request = parse(text)
    arrived = getattr(request, name)
    assert arrived == value != getattr(Request(), name)
    assert type(arrived) is type(value)
    if isinstance(value, tuple | dict):
        assert [type(item) for item in arrived] == [type(item) for item in value]
    hint = get_type_hints(Request)[name]
    assert type(arrived).__name__ in str(hint)
    others = [item.name for item in fields(Request) if item.name not in {name, "temperature"}]
    assert all(getattr(request, other) == getattr(Request(), other) for other in others)


@pytest.mark.parametrize("name", ["seed", "draft_length", "draft_temperature"])
def test_no_value_can_be_spelt_too(name: str) -> None:
    assert getattr(parse(f"--{name.replace('_', '-')} null"), name) is None


@pytest.mark.parametrize("text", ["null", "# a", "~", "&a", "1", "[x]"])
def test_a_text_is_taken_as_it_stands(text: str) -> None:
    """And not as YAML, in which a Markdown heading is nothing."""
    parser = ArgumentParser(exit_on_error=False)
    add_request_options(parser)
    options = parser.parse_args([f"--stop={text}", f"--verify={text}"])
    assert (options.stop, options.verify) == ([text], text)


@pytest.mark.parametrize("text", ["13", "=1", "13=", "a=1", "13=x", "1.5=2", "13:1"])
def test_a_bias_that_is_none_is_named(text: str) -> None:
    with pytest.raises(UserError, match=f"--logit-bias has {text!r}; use ID=NUMBER, as in 13=-2.5."):
        parse(f"--logit-bias 4=1 {text}")


@pytest.mark.parametrize(("text", "message"), [("-3=1", "token id -3"), ("4=nan", "nan for token id 4")])
def test_a_bias_out_of_range_is_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"--logit-bias is .*{message}"):
        parse(f"--logit-bias={text}")


# ---- bench -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_bench_refuses_what_transformers_has_no_word_for(decoder: Decoder, name: str) -> None:
    request = Request(max_new_tokens=4, **{name: 0.5})  # type: ignore[arg-type]
    option = "--" + name.replace("_", "-")
    with pytest.raises(UserError, match=f"{option} is 0.5, which transformers is not given here; use --against"):
        bench(decoder, ["hi"], request, "heads")
    report = bench(decoder, ["hi"], request, "heads", against=("plain",))
    assert [side["name"] for side in report["results"]] == ["mtp", "plain"]
    assert report[name] == 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"stop_ids": (5,)},
        {"stop": ("a",)},
        {"stop_when": lambda ids: len(ids) == 2},
        {"ignore_eos": True},
        {"bad_words": ("a",)},
        {"bad_words_ids": ((5,),)},
        {"prefix_allowed_tokens_fn": lambda row, text: [5]},
        {"processors": (lambda text, logits: -logits,)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_bench_refuses_what_it_does_not_give_to_transformers(decoder: Decoder, options: dict[str, Any]) -> None:
    """The command line has no such options for bench; from Python, sides would be timed at different work."""
    with pytest.raises(UserError):
        bench(decoder, ["hi"], Request(max_new_tokens=2, **options), "heads", against=("transformers",))


# ---- processors that may keep state ------------------------------------------------------------------------------


class Diary:
    """Notes each text it is asked about, and forbids half of all tokens, which half by the last one."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        for row in text.tolist():
            self.seen.append(row)
        return logits.masked_fill((torch.arange(logits.shape[1]) + text[:, -1:]) % 2 == 0, -math.inf)


class Promised(Diary):
    stateless = True


@pytest.mark.parametrize(
    "options", [{}, {"tree": "2,1"}, {**WARM, "seed": 1}, {**WARM, "seed": 1, "reproducible": True}]
)
def test_a_processor_with_state_sees_each_text_once_in_order(decoder: Decoder, options: dict[str, Any]) -> None:
    """The committed prefixes and nothing else; so there are no drafts, and that is counted."""
    diary, prompt = Diary(), [5, 6, 7, 8]
    result = decoder.generate(prompt, max_new_tokens=20, ignore_eos=True, processors=[diary], **options)
    assert diary.seen == [[*prompt, *result.token_ids[:count]] for count in range(20)]
    stats = result.stats.to_json()
    assert (stats["undrafted_texts"], stats["draft_length"], stats["drafted"], stats["steps"]) == (1, 0, 0, 20)
    assert stats["verify"] == Request(**options).rule
    total = result.stats.empty()
    assert total.undrafted_texts == 0
    for _ in range(2):
        total.merge(result.stats)
    assert total.undrafted_texts == 2


@pytest.mark.parametrize("options", [{}, {"tree": "2,1"}, {**WARM, "seed": 1, "reproducible": True}])
def test_one_that_promises_to_keep_none_is_drafted_for(decoder: Decoder, options: dict[str, Any]) -> None:
    """The same text; and it is asked about drafts too."""
    settings = {"max_new_tokens": 20, "ignore_eos": True, **options}
    diary = Promised()
    result = decoder.generate("hi", processors=[diary], **settings)
    assert result.stats.undrafted_texts == 0
    assert result.stats.drafted > 0
    assert len(diary.seen) > 20
    assert result.token_ids == decoder.generate("hi", processors=[Diary()], **settings).token_ids
    assert result.token_ids != decoder.generate("hi", **settings).token_ids


def test_without_heads_or_drafts_nothing_is_missed(decoder: Decoder) -> None:
    """What was not asked for is not reported as given up."""
    for ours, options in ((Decoder(decoder.base), {}), (decoder, {"draft_length": 0})):
        stats: DecodeStats = ours.generate("hi", max_new_tokens=3, processors=[Diary()], **options).stats
        assert stats.undrafted_texts == 0


def test_stop_when_is_asked_about_generated_ids_only(decoder: Decoder) -> None:
    calls: list[Sequence[int]] = []
    result = decoder.generate([5, 6], max_new_tokens=5, ignore_eos=True, stop_when=lambda ids: calls.append(list(ids)))  # type: ignore[func-returns-value]
    assert calls == [result.token_ids[:count] for count in range(1, 6)]
