"""`mtp-decode check`: the certificate as a table or a JSON document.

Knows: its options, and how to stop. Refuses to know what is checked (`decode.check`).
"""

import time
from dataclasses import replace

from jsonargparse import ArgumentParser, Namespace

from decode.bench import describe
from decode.check import NUM_FINDINGS, findings
from decode.cli import CHECK_FAILED, INTERRUPTED
from decode.command import add_json, add_models, add_prompts, load_decoder, print_json
from decode.evidence import CheckSettings, Finding
from decode.prompts import read_prompts
from decode.report import show_findings
from decode.terminal import Terminal
from mtp.errors import UserError


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `check`."""
    add_models(parser)
    add_prompts(parser)
    add = parser.add_argument
    add("--samples", type=int, default=CheckSettings.samples, metavar="N", help="texts per chi-square test")
    add("--max-new-tokens", type=int, default=CheckSettings.max_new_tokens, metavar="N", help="tokens per text")
    add("--seed", type=int, default=CheckSettings.seed, metavar="S", help="of all draws")
    add_json(parser)


def run(options: Namespace) -> int:
    """`mtp-decode check`; 1 when a check failed."""
    if options.heads is None:
        raise UserError("--heads is missing; name the folder of heads to check.")
    settings = CheckSettings(samples=options.samples, max_new_tokens=options.max_new_tokens, seed=options.seed)
    if options.prompts is not None:
        settings = replace(settings, prompts=read_prompts(options.prompts, options.limit))
    elif options.limit is not None:
        raise UserError(f"--limit is {options.limit}, but it only applies to --prompts FILE; leave it out.")
    terminal = Terminal.of(options)
    decoder = load_decoder(options, terminal)
    started, found, interrupted = time.perf_counter(), list[Finding](), False
    try:
        with terminal.tracked(NUM_FINDINGS, "checks") as advance:
            for finding in findings(decoder, settings):
                found.append(finding)
                terminal.detail(f"{finding.name}: {'passed' if finding.passed else 'FAILED'}")
                advance()
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True
    passed, seconds = all(finding.passed for finding in found), time.perf_counter() - started
    where = describe(decoder.base, options.heads)
    title = f"{where['base']} with {where['heads']}, {where['device']}, {where['dtype']}"
    if not (options.json and terminal.quiet):
        show_findings(found, title, seconds, to_stderr=options.json, missing=NUM_FINDINGS - len(found))
    if options.json:
        checks = [vars(finding) for finding in found]
        cut = {"interrupted": True} if interrupted else {}
        print_json({**where, "passed": passed and not interrupted, "seed": options.seed, "checks": checks, **cut})
    if interrupted:
        terminal.say("interrupted: nothing is certified; the same command starts again.")
        return INTERRUPTED
    return 0 if passed else CHECK_FAILED
