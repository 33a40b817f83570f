"""The page at `/` with texts that a model may give by accident or by malice, in a stream that no server made."""

import json

import pytest

from tests.server.browser import Page, needs_browser, opened
from tests.server.hosting import Host

pytestmark = needs_browser

STREAM = """
    window.ran = [];
    window.real = fetch;
    window.fetch = async (path, options) => {
      if (!path.includes("completions")) return real(path, options);
      const encoder = new TextEncoder(), left = [...pieces];
      const send = (to, data) => to.enqueue(encoder.encode(`data: ${data}\\n\\n`));
      const pull = (to) => {
        const tokens = left.shift();
        if (tokens) {
          const text = tokens.map((token) => token.text).join("");
          send(to, JSON.stringify({ choices: [{ text, delta: { content: text }, tokens }] }));
          return new Promise((go) => setTimeout(go));
        }
        send(to, JSON.stringify({ choices: [{ tokens: [], finish_reason: "stop" }] }));
        send(to, "[DONE]");
        to.close();
      };
      return new Response(new ReadableStream({ pull }));
    }"""
"""Requests are answered with `pieces`, each a list of tokens. Scripts of an answer write into `ran`."""

TEXTS = {
    "elements": "<img src=x onerror=ran.push(1)><svg onload=ran.push(1)><a href=javascript:ran.push(1)>a</a>"
    "<iframe srcdoc='<script>parent.ran.push(1)</script>'></iframe><style>*{display:none}</style><base href=//x>",
    "scripts": "</pre></article></script><script>ran.push(1)</script><!--<script>ran.push(1)//--></textarea>",
    "templates": "{{constructor.constructor('ran.push(1)')()}} ${ran.push(1)} <%= ran.push(1) %> {% raw %}",
    "markdown": "# a\n[b](javascript:ran.push(1)) ![c](http://127.0.0.1:9/c.png)\n```html\n<b>\n```\n|-|-|",
    "an event": 'data: [DONE]\n\ndata: {"error": {"message": "none"}}\n\nevent: error\r\n\r\n: x',
    "control characters": "\x1b[31mred\x1b[0m\x1b]8;;http://x\x07a\x1b]8;;\x07\0\b\x7f\r\f\v\x85\u2028\u2029\ufeffend",
    "half characters": "a\ud800b\udc00c\ufffd\ufffe\uffffd",
    "directions": "user \u202egnp.exe\u202d \u2066\u2067\u2068 open \u200f\u200e\u061c next\nline",
    "a long word": "w" * 100_000,
    "joined characters": "\U0001f469\u200d" * 300,
    "joiners": "\u200d\u2060" * 2000 + "x",
    "stacked marks": ("Z" + "\u0301\u0302\u0315\u0489" * 40) * 10,
    "blanks": " " * 2000 + "x" + "\t" * 1000 + "\u00a0" * 1000 + "\u3000" * 1000 + "\n" * 1000,
    "wide characters": "\ufdfd" * 200 + "\U0001242b" * 100 + "\u2e3b" * 100,
}  # fmt: skip


def answered(page: Page, text: str, mode: str = "chat") -> None:
    """Ask for a text, and get it in up to 40 pieces, every other token drafted."""
    n = max(3, len(text) // 200)
    tokens = [{"text": text[i : i + n], "drafter": "model" if i // n % 2 else None} for i in range(0, len(text), n)]
    page.do(f"{STREAM}; window.pieces = {json.dumps([tokens[i : i + 5] for i in range(0, len(tokens), 5)])}; 0")
    page.ask("?" + text[:500], mode)
    page.do("new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown)))")


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_answer_is_shown_as_text_and_nothing_of_it_runs_or_loads(page: Page, host: Host, name: str) -> None:
    for mode in ("chat", "completion"):
        answered(page, TEXTS[name], mode)
        assert page.text("#error") == ""
        given = "pieces.flat().map((token) => token.text).join('')"  # compared there: half characters do not travel
        assert page.do(f"document.querySelector('.answer').textContent.endsWith({given})")
        assert page.do("[...document.querySelectorAll('.answer *')].every((x) => x.matches('span.t, span.asked'))")
    assert page.do("[document.title, ran.length]") == ["Slipstream", 0]
    asked = [each["request"]["url"] for each in page.events("Network.requestWillBeSent")]
    assert all(url.startswith(host.url) for url in asked)
    assert page.events("Runtime.exceptionThrown") == page.events("Log.entryAdded") == []


@pytest.mark.parametrize("width", [390, 1280])
def test_no_answer_is_wider_than_the_screen_or_covers_what_follows_it(chromium, host, width):
    with opened(chromium, host, width) as page:
        for name, text in TEXTS.items():
            answered(page, text)
            assert page.do("document.documentElement.scrollWidth") <= width, name
            log = "document.getElementById('log')"
            assert page.do(f"{log}.scrollWidth <= {log}.clientWidth"), name
            heights = "[...document.querySelectorAll('.answer')].map((each) => each.scrollHeight - each.clientHeight)"
            assert not any(page.do(heights)), f"{name}: all of it is seen without scrolling within the answer"
            assert page.do("document.querySelector('article:last-child .facts').getBoundingClientRect().height") < 80
            page.do("document.getElementById('clear').click()")


def test_more_tokens_at_once_than_a_function_takes_arguments_are_shown(page: Page) -> None:
    """As after a while in a hidden tab, which draws nothing."""
    page.do(f"{STREAM}; window.pieces = [Array(150_000).fill({{ text: 'a', drafter: null }})]; 0")
    page.ask("?")
    assert page.text("#error") == ""
    assert page.do("document.querySelector('.answer').textContent.length") == 150_000
