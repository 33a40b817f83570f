"""The page at `/`, in a browser: offline, on phones, and honest about what it measures and what fails."""

import json
import re

import pytest

from slipstream import LLM
from slipstream.server.app import FILES
from tests.server.browser import IDLE, Browser, Page, colour, lowest_contrast, needs_browser, opened
from tests.server.hosting import Host, break_engine, eventually, hosted

REPEATED = "x = [1, 2, 3]\nx = [1, 2, 3]\nx ="


CUT_AFTER_THREE = """
    window.real = fetch;
    window.fetch = async (...given) => {
      const found = await real(...given), reader = found.body.getReader();
      let left = 3;
      const pull = async (to) => {
        const { value, done } = await reader.read();
        if (done || !left--) { reader.cancel(); to.close(); } else to.enqueue(value);
      };
      return new Response(new ReadableStream({ pull }), { status: found.status, headers: found.headers });
    }"""
"""A connection that ends after three pieces of an answer."""


# --- without a browser ------------------------------------------------------------------------------------------------


def test_every_file_is_served_with_its_type_and_a_policy_that_allows_nothing_from_elsewhere(host: Host) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for path in FILES.iterdir():
        answered = host.http.get("/" if path.name == "index.html" else f"/page/{path.name}")
        assert answered.content == path.read_bytes()
        assert answered.headers["content-type"].startswith(kinds[path.suffix])
        assert answered.headers["x-content-type-options"] == "nosniff"
        policy = answered.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?:", policy)
    for name in ("nothing.js", "../app.py", "..%2fapp.py"):
        assert host.http.get(f"/page/{name}").status_code == 404


def test_no_file_names_another_host_or_writes_html() -> None:
    for path in FILES.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b| style=| on\w+=", text)


def test_the_page_needs_no_key_and_the_api_does(pair: LLM) -> None:
    with hosted(pair, keys=("right",)) as host:
        host.http.headers.pop("Authorization")
        assert host.http.get("/").status_code == host.http.get("/page/main.js").status_code == 200
        for path in ("/v1/models", "/page", "/docs"):
            assert host.http.get(path).status_code == 401


# --- in a browser -----------------------------------------------------------------------------------------------------


@needs_browser
class TestInABrowser:
    def test_it_loads_from_its_server_alone_and_without_a_complaint(self, page: Page, host: Host) -> None:
        page.ready()
        page.ask(REPEATED)
        asked = [each["request"]["url"] for each in page.events("Network.requestWillBeSent")]
        assert len(asked) > 8
        assert all(url.startswith(host.url) for url in asked)
        assert page.events("Log.entryAdded") == []
        assert page.events("Runtime.exceptionThrown") == []
        assert "embedded" in page.text("#model")

    def test_a_chat_shows_the_servers_text_with_its_drafted_tokens_marked(self, page: Page, host: Host) -> None:
        body = {"messages": [{"role": "user", "content": REPEATED}], "temperature": 0, "max_tokens": 200}
        whole = host.post("/v1/chat/completions", **body, statistics=True).json()["choices"][0]
        page.ask(REPEATED)
        assert page.answer() == whole["message"]["content"]
        stats = whole["statistics"]
        shown = [name for name in stats["drafted_by"] if name is not None]
        assert 0 < len(page.marks()) <= len(shown)  # tokens without text are not shown
        assert set(page.marks()) == {"drafted by model"}
        facts = page.text(".facts")
        assert facts.startswith(f"{stats['tokens']} tokens · {len(shown)} of them drafted")
        assert f"acceptance rate {round(stats['acceptance_rate'] * 100)} %" in facts
        rows = page.do("[...document.querySelectorAll('#positions tbody .value')].map((each) => each.textContent)")
        assert rows == [f"{round(rate * 100)} %" for rate in stats["position_rates"]]
        assert page.text("#legend").split("\n") == ["the model's own", "drafted by model"]
        assert page.do("getComputedStyle(document.querySelector('.t')).borderBottomStyle") == "solid"

    def test_an_answer_streams(self, page: Page) -> None:
        page.ready()
        page.do(
            "window.lengths = new Set();"
            "new MutationObserver(() => lengths.add(document.querySelector('.answer')?.textContent.length))"
            ".observe(document.getElementById('log'), {subtree: true, childList: true})"
        )
        page.put("#tokens", 600)
        page.put("#temperature", 1)
        page.ask("def f(", "completion")
        assert page.do("lengths.size") > 3

    def test_a_conversation_is_sent_with_its_earlier_messages(self, page: Page) -> None:
        page.ask("def a(): pass")
        first = page.answer()
        page.ask("def b(): pass")
        sent = json.loads(page.events("Network.requestWillBeSent")[-1]["request"]["postData"])
        assert [each["role"] for each in sent["messages"]] == ["user", "assistant", "user"]
        assert sent["messages"][1]["content"] == first
        page.do("document.getElementById('clear').click()")
        assert page.do("document.querySelectorAll('article').length") == 0

    def test_the_same_request_is_decoded_plainly_and_both_rates_are_shown(self, page: Page) -> None:
        page.ask(REPEATED, "completion")
        assert page.text("#ratio") == ""
        page.do("document.getElementById('compare').click()")
        page.until(IDLE)
        sent = [json.loads(each["request"]["postData"]) for each in page.events("Network.requestWillBeSent")
                if "postData" in each["request"]]  # fmt: skip
        assert sent[-1] == sent[-2] | {"speculation": {"enabled": False}}
        numbers = ".map((each) => Number(each.textContent.replace(',', '')))"
        rates = page.do("[...document.querySelectorAll('#rates .value')]" + numbers)
        assert min(rates) > 0
        ratio = float(re.search(r"[\d.]+", page.text("#ratio"))[0])  # type: ignore[index]
        assert ratio == pytest.approx(rates[0] / rates[1], abs=0.05)
        note = page.text("#rates-note")
        assert "The texts are the same." in note
        assert "No other request ran" in note
        page.do("document.getElementById('compare').click()")
        page.until(IDLE)
        note = page.text("#rates-note")
        assert re.search(r"2 of [\d,]+ to [\d,]+ tokens/s with speculation, 2 of [\d,]+ to [\d,]+ without", note)

    def test_rates_measured_beside_other_requests_are_said_to_be_so(self, page: Page, host: Host) -> None:
        page.ready()
        page.do("document.getElementById('both').click()")
        host.service.admitted += 1  # as a request of another client does
        try:
            page.ask(REPEATED, "completion")
        finally:
            host.service.admitted -= 1
        assert "Other requests ran at the same time" in page.text("#rates-note")

    def test_drafter_and_draft_length_take_effect(self, page: Page) -> None:
        page.ready()
        names = page.do("[...document.getElementById('drafter').options].map((each) => each.value)")
        assert names == ["model", ""]
        assert page.text("#length-shown") == "4"
        page.put("#length", "2")
        page.ask(REPEATED, "completion")
        assert set(page.marks()) == {"drafted by model"}
        assert page.do("document.querySelectorAll('#positions tbody tr').length") == 2
        text = page.answer()
        page.put("#drafter", "")
        assert page.do("document.getElementById('length').disabled")
        page.ask(REPEATED, "completion")
        assert page.marks() == []
        assert page.answer() == text

    def test_structured_output_and_prediction_are_sent(self, page: Page) -> None:
        page.ready()
        page.put("#form", "choice")
        page.put("#form-text", "yes\nno\n")
        page.ask("Is it?")
        assert page.answer() in ("yes", "no")
        page.put("#form", "json")
        page.put("#form-text", "{")
        page.ask("Is it?")
        assert page.text("#error").startswith("The schema is not JSON")
        page.put("#form", "")
        page.put("#prediction", "x = 5")
        page.ask("Is it?")
        sent = json.loads(page.events("Network.requestWillBeSent")[-1]["request"]["postData"])
        assert sent["prediction"] == {"type": "content", "content": "x = 5"}
        assert "structured_outputs" not in sent

    def test_each_example_runs(self, page: Page) -> None:
        page.ready()
        page.put("#tokens", 80)
        for i in range(page.do("document.querySelectorAll('#examples button').length")):
            page.do(f"document.querySelectorAll('#examples button')[{i}].click()")
            page.do("document.getElementById('composer').requestSubmit()")
            page.until(IDLE)
            assert page.text("#error") == ""
            assert page.answer().strip()

    def test_stopping_ends_the_request_at_the_server(self, page: Page, host: Host) -> None:
        page.ready()
        page.put("#tokens", 950)
        page.put("#temperature", 1.5)
        page.do("document.querySelector('input[value=completion]').click()")
        page.put("#prompt", "def f(")
        page.do("document.getElementById('composer').requestSubmit()")
        page.until("document.querySelector('.answer')?.textContent.length > 20")
        page.press("Escape")
        page.until(IDLE)
        assert page.text("#status") == "Stopped."
        assert "incomplete" in page.text(".facts")
        eventually(lambda: host.service.admitted == 0 and host.load()[0] == 0)

    @pytest.mark.parametrize("dark", [False, True])
    @pytest.mark.parametrize("width", [320, 390, 1280])
    def test_nothing_is_wider_than_the_screen_and_contrast_is_sufficient(self, chromium, host, width, dark):
        with opened(chromium, host, width, dark) as page:
            page.ready()
            page.put("#form", "regex")
            page.put("#form-text", "[a-z]{300}")
            page.ask("y" * 200 + "\n" + REPEATED)
            page.put("#form", "")
            page.ask(REPEATED, "completion")
            assert page.do("document.documentElement.scrollWidth") <= width
            assert lowest_contrast(page) >= 4.5
            background = page.do("getComputedStyle(document.body).backgroundColor")
            assert (sum(colour(background)) < 200) == dark

    def test_every_field_has_a_name(self, page: Page) -> None:
        page.ready()
        page.call("Accessibility.enable")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        fields = [node for node in nodes if node.get("role", {}).get("value") in
                  ("textbox", "combobox", "slider", "spinbutton", "checkbox", "radio", "button", "log")]  # fmt: skip
        assert len(fields) > 15
        assert all(node["name"]["value"] for node in fields)

    def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(self, chromium: Browser, pair: LLM) -> None:
        with hosted(pair, keys=("right",)) as host, opened(chromium, host) as page:
            page.until("!document.getElementById('unlock').hidden")
            assert page.do("document.activeElement.id") == "key"
            page.write("wrong")
            page.press("Enter")
            page.until("document.getElementById('unlock-why').textContent.includes('does not know')")
            page.write("right")
            page.press("Enter")
            page.until("document.getElementById('unlock').hidden")
            page.ask(REPEATED, "completion")
            assert page.answer().startswith(REPEATED)
            assert page.do("[localStorage.length, document.cookie]") == [0, ""]
            page.call("Page.reload")
            page.until("document.readyState === 'complete' && !document.getElementById('forget').hidden")
            page.do("document.getElementById('forget').click()")
            assert page.do("sessionStorage.length") == 0
            assert not page.do("document.getElementById('unlock').hidden")


@needs_browser
class TestErrors:
    def test_a_full_queue_is_said_with_the_time_to_wait(self, chromium: Browser, pair: LLM) -> None:
        with hosted(pair) as host, opened(chromium, host) as page:
            page.ready()
            host.service.admitted = 10**6
            page.ask("def f(")
            assert re.match(r"The server is busy. Try again in 1 seconds. \(the queue is full", page.text("#error"))
            assert page.do("document.querySelectorAll('article').length") == 0
            assert page.do("document.getElementById('prompt').value") == "def f(", "what was written is not lost"

    def test_a_refused_field_is_said_as_the_server_says_it(self, page: Page) -> None:
        page.ready()
        page.put("#tokens", 5000)
        page.ask("def f(")
        assert "the context has room for" in page.text("#error")

    def test_a_dead_engine_and_a_stream_that_fails_are_said(self, chromium, pair, monkeypatch):
        with hosted(pair) as host, opened(chromium, host) as page:
            page.ready()
            break_engine(monkeypatch, host.llm, steps=3)
            page.put("#tokens", 800)
            page.put("#temperature", 2)
            page.ask("def f(", "completion")
            assert page.text("#error").startswith("The answer ended with an error: the engine has stopped")
            assert "incomplete" in page.text(".facts")
            page.ask("def f(", "completion")
            assert "the engine has stopped" in page.text("#error")

    def test_a_stream_that_is_cut_is_said(self, page: Page) -> None:
        page.ready()
        page.do(CUT_AFTER_THREE)
        page.put("#tokens", 900)
        page.put("#temperature", 2)
        page.ask("def f(", "completion")
        assert page.text("#error") == "The stream was cut: the server ended it early."
        assert "incomplete" in page.text(".facts")
        page.do("window.fetch = async () => { throw new TypeError('network error'); }")
        page.ask("def f(", "completion")
        assert page.text("#error") == "The server cannot be reached."
