"""The HTML report in a real browser: quiet console, no network, figures seen, tables sorted.

The browser is Chromium, headless, where one is installed. The page is opened with a script added that looks
at every figure, clicks every heading, and writes what it saw into the page, which the browser then prints.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from fp4repro.report.html import html_report
from fp4repro.report.html_text import html_text, inline, table

ROOT = Path(__file__).parents[1]
REAL = ROOT / "results" / "published" / "2026-12-01-75a402c"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt install chromium"
)
PROBE = """
const seen = { figures: [], wide: document.documentElement.scrollWidth, inside: innerWidth, sorts: [] };
for (const image of document.images)
  seen.figures.push([image.naturalWidth, image.getBoundingClientRect().width]);
for (const table of document.querySelectorAll("table"))
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const columns = [];
    for (let click = 0; click < 2; click++) {
      heading.querySelector("button").click();
      columns.push([heading.getAttribute("aria-sort"),
        Array.from(table.tBodies[0].rows, (row) => row.cells[column].textContent)]);
    }
    seen.sorts.push(columns);
  });
const out = document.createElement("pre");
out.id = "probe";
out.textContent = JSON.stringify(seen);
document.body.append(out);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of a published folder, with a manifest as it is written today."""
    folder = shutil.copytree(REAL, tmp_path_factory.mktemp("report") / "published")
    about = json.loads((folder / "manifest.json").read_text()) | {"missing": ["kernels"]}
    (folder / "manifest.json").write_text(json.dumps(about))
    (folder / "report.html").write_text(html_report(folder, "A first <result>."), encoding="utf-8")
    return folder / "report.html"


def browse(page: Path, work: Path, *options: str) -> tuple[str, str, list[str]]:
    """The page's DOM, what was written to its console, and every address that it asked for."""
    log = work / "net.json"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={work / 'profile'}", "--enable-logging=stderr", "--disable-extensions"]
    command += ["--disable-component-update", "--disable-background-networking", f"--log-net-log={log}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--dump-dom"]
    # Files, since a pipe would be held open by what the browser leaves behind.
    with open(work / "dom", "wb") as out, open(work / "log", "wb") as err:
        subprocess.run([*command, *options, page.as_uri()], stdout=out, stderr=err, timeout=60, check=True)
    console = [line for line in (work / "log").read_text(errors="replace").splitlines() if "CONSOLE" in line]
    # What the browser asks for by itself, such as its updates, has no origin.
    pattern = r'"initiator":"(?!not an origin)[^"]*".*?"url":"((?:https?|wss?|ftp)://[^"]+)"'
    asked = re.findall(pattern, log.read_text(encoding="utf-8"))
    return (work / "dom").read_text(encoding="utf-8"), "\n".join(console), asked


def with_script(page: Path, script: str) -> Path:
    path = page.with_name("probed.html")
    path.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"))
    return path


@needs_chromium
@pytest.mark.parametrize("width", [1280, 500])  # a desktop's, and the narrowest window that Chromium opens
def test_the_page_in_chromium(page, tmp_path, width):
    dom, console, asked = browse(with_script(page, PROBE), tmp_path, f"--window-size={width},900")
    seen = json.loads(unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert console == ""
    assert asked == []
    assert len(seen["figures"]) == len(list(REAL.glob("figures/*.svg"))) > 2
    assert all(natural > 0 and shown > 200 for natural, shown in seen["figures"])
    assert seen["wide"] <= seen["inside"]  # wide tables scroll in their own boxes
    assert len(seen["sorts"]) > 20
    for (first, up), (second, down) in seen["sorts"]:
        assert (first, second) == ("ascending", "descending")
        filled = [text for text in up if text]
        assert up[len(filled) :] == [""] * (len(up) - len(filled)) and sorted(up) == sorted(down)
        if all(re.match(r"[-+]?\.?\d", text) for text in filled):
            numbers = [
                float(re.match(r"[-+]?[\d,]*\.?\d*(e[-+]\d+)?", text)[0].replace(",", "")) for text in filled
            ]
            assert numbers == sorted(numbers)
            assert [text for text in down if text] != filled or len(set(numbers)) < 2


@needs_chromium
def test_the_browser_tells_of_errors_and_requests(page, tmp_path):
    """What the test above finds quiet can be loud."""
    loud = "console.error('loud'); new Image().src = 'https://example.org/a.png'; nothing();"
    _, console, _ = browse(with_script(page, loud), tmp_path)
    assert "loud" in console and "nothing is not defined" in console
    assert "Content Security Policy" in console  # the page itself forbids the request
    bare = page.with_name("bare.html")
    bare.write_text("<img src='http://example.org/a.png'>")
    _, _, asked = browse(bare, tmp_path)
    assert asked == ["http://example.org/a.png"]


def test_the_first_page_answers_and_nothing_is_outside(page):
    text = page.read_text(encoding="utf-8")
    first = text[: text.index("<nav")]
    assert "Which claims hold" in first and "CPU AMD EPYC" in first and "laptop" in first
    assert "A first &lt;result&gt;." in first and "<code>kernels</code>" in first
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", text)
    assert html_report(page.parent, "A first <result>.") == text


def test_markdown_of_tables_becomes_html():
    text = "# A `b`\n\nwords **bold** & [link](https://a.b/c)\ngo on\n\n"
    text += "| a | b |\n| - | - |\n| 1 | <x> |\n\n- one\n- two"
    assert html_text(text, 2).splitlines() == [
        "<h2>A <code>b</code></h2>",
        '<p>words <strong>bold</strong> &amp; <a href="https://a.b/c">link</a> go on</p>',
        '<div class="scroll"><table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>',
        "<tbody><tr><td>1</td><td>&lt;x&gt;</td></tr></tbody></table></div>",
        "<ul><li>one</li><li>two</li></ul>",
    ]
    assert inline("[x](javascript:1)") == "[x](javascript:1)"
    assert 'data-verdict="undecided"' in table(["a", "verdict"], [["1", "undecided"]], 1)
