"""Pages read back: what stands in them, and what a browser makes of them."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
VOID = {"meta", "br", "input", "link", "img", "hr"}


@dataclass
class Seen(HTMLParser):
    """What a page holds. Refuses tags that are not closed in order."""

    document: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    numbers: dict[str, list[list[str | float]]] = field(default_factory=dict)
    """Of every table, by its label, the rows: texts, and numbers in full."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    """What stands directly in the elements of a tag."""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._table: list[list[str | float]] = []
        self._exact: float | None = None
        self.feed(self.document)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "div" and given.get("class") == "scroll":
            self._table = self.numbers.setdefault(str(given["aria-label"]).removesuffix(": table"), [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._table[-1].append("")
        elif tag == "data":
            self._table[-1][-1] = float(str(given["value"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open[-1] == tag, (self._open, tag)
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)
        if "td" in self._open or "th" in self._open:
            cell = self._table[-1][-1]
            if isinstance(cell, str):
                self._table[-1][-1] = cell + data

    @property
    def ids(self) -> list[str]:
        return [str(given["id"]) for _, given in self.tags if "id" in given]

    @property
    def loads(self) -> list[str]:
        """Whatever a browser would fetch or follow, but places in the page itself."""
        found = [
            str(given[name]) for _, given in self.tags for name in ("src", "href", "srcset", "data", "action")
            if name in given and not str(given[name]).startswith("#")
        ]  # fmt: skip
        outside = [at for at in re.findall(r"url\(([^)]*)\)", self.document) if not at.startswith("#")]
        forbidden = [
            tag for tag, _ in self.tags if tag in ("script", "link", "iframe", "img", "object", "embed", "base")
        ]
        return [*found, *outside, *forbidden, *re.findall(r"@import|https?://[^\s<\"]*", self.document)]


def look(path: Path) -> Seen:
    return Seen(path.read_text(encoding="utf-8"))


def browse(page: Path, folder: Path, width: int, script: str, dark: bool = False) -> str:
    """Open a copy of the page in a frame of that many pixels; what `script`, a JavaScript expression that may use
    `page` for the frame's document, comes to as text, or what went wrong."""
    document = page.read_text(encoding="utf-8")
    document = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", document)
    (folder / "copy.html").write_text(document, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0"><iframe id="f" src="copy.html" width="{width}" '
        f'height="800" style="border:0"></iframe><script>const f = document.getElementById("f");'
        f"f.onload = () => {{ const page = f.contentDocument; let told; try {{ told = String({script}); }} "
        f'catch (error) {{ told = "error: " + error; }} f.remove(); document.body.textContent = "told:" + told; }};'
        f"</script>",
        encoding="utf-8",
    )
    found = run_browser(
        folder, ["--dump-dom", f"--blink-settings=preferredColorScheme={0 if dark else 1}", frame.as_uri()]
    )
    told = re.search(r"told:([^<]*)", found.stdout)
    assert told is not None, found.stdout[-2000:] + found.stderr[-2000:]
    return told.group(1)


def run_browser(folder: Path, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    assert CHROMIUM is not None
    fixed = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"),
        "--hide-scrollbars",
        *("--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"),
    ]
    return subprocess.run([CHROMIUM, *fixed, *arguments], capture_output=True, text=True, timeout=120, check=False)
