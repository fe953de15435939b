"""`mtp-decode export` and `mtp-decode import`: heads in the layout of other software, and back.

Knows: the options, and how to tell what was written. Refuses to know: any format (`mtp.formats`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from decode.decoder import Decoder
from decode.pair import AnotherBase
from decode.report import as_json
from decode.terminal import Terminal
from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.export import DTYPES, check_dtype, export, find_format
from mtp.formats.imports import IN_BASE, READERS, import_from_base, import_heads, is_saved
from mtp.formats.place import check_free
from mtp.heads import Heads
from mtp.hub import find_heads, read_config, save_heads
from mtp.other_base import OTHER_BASE


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `mtp-decode export`."""
    add = parser.add_argument
    add("--heads", type=str, help="folder of trained heads, or smollm2-135m")
    add("--format", type=str, help=", ".join(FORMATS))
    add("--output", type=Path | None, help="the folder to write")
    add("--overwrite", action="store_true", help="replace what stands there")
    add("--dtype", type=str, default="float32", help=f"of the numbers in the file: {', '.join(DTYPES)}")
    add("--base", type=str, help="the base, if not found by the name in the heads' config")
    add("--revision", type=str, help="revision of a base on the Hub")
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:N")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the base")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")


def run(options: Namespace) -> None:
    """`mtp-decode export`."""
    for name in ("heads", "format", "output"):
        if options[name] is None:
            raise UserError(f"--{name} is missing; use --heads FOLDER --format NAME --output FOLDER.")
    find_format(options.format)
    check_dtype(options.dtype)
    sources = [(f"--{name}", None if options[name] is None else Path(options[name])) for name in ("heads", "base")]
    check_free(options.output, options.overwrite, sources)
    terminal = Terminal.of(options)
    decoder = _decoder(options, terminal)
    assert decoder.heads is not None
    with terminal.waiting("writing and comparing"):
        done = export(
            decoder.heads,
            decoder.base,
            options.format,
            options.output,
            dtype=options.dtype,
            overwrite=options.overwrite,
        )
    terminal.say(f"written: {done.folder} ({done.size / 1e6:.1f} MB, {options.format}); {done.told()}")
    if options.json:
        document = {"format": options.format, **vars(done), "folder": str(done.folder)}
        print(as_json(document), flush=True)


def add_import_arguments(parser: ArgumentParser) -> None:
    """The options of `mtp-decode import`."""
    add = parser.add_argument
    add("--input", type=Path | None, help="the folder to read")
    add("--format", type=str, help=", ".join((*READERS, f"{IN_BASE} (modules that the base's checkpoint ships)")))
    add("--base", type=str, help="the base that the heads were trained for")
    add("--output", type=Path | None, help="the folder to write, for --heads of the other commands")
    add("--overwrite", action="store_true", help="replace what stands there")
    add(
        "--draft-length",
        type=int | None,
        help="K of EAGLE-3 heads (default: the folder's, or 4); how many modules in the base (1)",
    )
    told = f"take a base that the folder was not exported for: {OTHER_BASE}"
    add("--allow-other-base", action="store_true", help=told)
    add("--feature-layers", type=int, nargs="+", default=[], help="of EAGLE-3 heads, where the folder leaves it open")
    add("--revision", type=str, help="revision of a base on the Hub")
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:N")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the base")


def run_import(options: Namespace) -> None:
    """`mtp-decode import`."""
    if options.format == IN_BASE and (options.input is not None or options.feature_layers):
        raise UserError(f"--format is {IN_BASE}, which reads the base itself; leave out --input and --feature-layers.")
    for name in ("format", "base", "output") if options.format == IN_BASE else ("input", "format", "base", "output"):
        if options[name] is None:
            raise UserError(
                f"--{name} is missing; use --input FOLDER --format NAME --base BASE --output FOLDER (formats: "
                f"{', '.join((*READERS, IN_BASE))}; the last has no --input)."
            )
    sources = [("--input", options.input), ("--base", Path(options.base))]
    check_free(options.output, options.overwrite, sources, ours=is_saved, writer="import")
    terminal = Terminal.of(options)
    with terminal.waiting("loading the base"):
        base = FrozenBase.from_pretrained(
            options.base,
            revision=options.revision,
            device=options.device,
            dtype="float32",
            trust_remote_code=options.trust_remote_code,
            home=default_home(os.environ),
            on_progress=terminal.say,
        )
    with terminal.waiting("reading and comparing"):
        heads = _read(options, base, terminal)
        save_heads(heads, options.output)
    told = "" if heads.config.own_output == "none" else ", with output rows of their own"
    terminal.say(f"written: {options.output} ({heads.config.kind} heads, K = {heads.config.draft_length}{told})")


def _read(options: Namespace, base: FrozenBase, terminal: Terminal) -> Heads:
    if options.format == IN_BASE:
        return import_from_base(base, options.draft_length)
    with _foreign(options):
        return import_heads(
            options.input,
            options.format,
            base,
            draft_length=options.draft_length,
            feature_layers=tuple(options.feature_layers) or None,
            allow_other_base=options.allow_other_base,
            on_note=terminal.say,
        )


@contextmanager
def _foreign(options: Namespace) -> Iterator[None]:
    """A folder that others wrote may hold anything: what its reader stumbles over is told, not shown as a traceback."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise UserError(
            f"--input {options.input} cannot be read as {options.format} ({type(error).__name__}: {error}); "
            "its config.json or tensors are not what that format holds: correct them, or name another --format."
        ) from error


def _decoder(options: Namespace, terminal: Terminal) -> Decoder:
    """Heads and base in float32, as the comparison needs them."""
    name = None if options.base is not None else read_config(find_heads(options.heads)).base.name
    try:
        with terminal.waiting("loading"):
            return _load(options, terminal)
    except AnotherBase as error:
        raise UserError(f"{error.fault} An export is for the base that the heads were trained on.") from error
    except UserError as error:
        if name is None or f"base {name!r}" not in str(error):
            raise
        told = f"{error} The export needs the base that --heads {options.heads} name; name a copy of it with --base."
        raise UserError(told) from error


def _load(options: Namespace, terminal: Terminal) -> Decoder:
    return Decoder.from_pretrained(
        options.heads,
        options.base,
        revision=options.revision,
        device=options.device,
        dtype="float32",
        trust_remote_code=options.trust_remote_code,
        compile="off",
        on_progress=terminal.say,
    )
