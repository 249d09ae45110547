"""The live page in Chromium: it shows the stats of Redis and faults of the stack, and escapes text from outside."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.keys import PLACER, PLACER_KEYS
from shared.placement import Placement
from tests.browser.conftest import AHEAD_MS, Visit
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.written_stack import WrittenStack

OpenPage = Callable[..., Visit]
EVIL = '<img src=/evil.png onerror="window.stolen=1"><script>window.stolen=1</script>&amp;'


def full(written: WrittenStack) -> None:
    """A stack at work."""
    written.lead()
    written.worker()
    for number in range(20):
        written.iterations.add(500_000, 9_500_000, 12, 100 if number % 5 == 0 else 0, 0)
    written.replica()
    written.tell()


def test_page_shows_the_stats_and_follows_them(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    visit = open_page()
    visit.says("#state", "live")
    shown = {
        "#model": "tiny", "#policy": "policy sarathi", "#tok-s": "1,235", "#tok-total": "98,765 in all",
        "#ttft": "87.5 ms", "#ttft-p99": "p99 1.53 s",
        "#ttft-predicted": "5.00 ms", "#ttft-error": "error 82.5 ms, 94 %",
        "#tbt": "12.3 ms", "#tbt-p99": "p99 48.0 ms",
        "#running": "17", "#running-sub": "step 11.5 ms, 2 in flight", "#waiting": "10",
        "#waiting-sub": "3 swapped, 1 parked", "#kv": "60 %", "#kv-sub": "600 of 1,000 blocks",
        "#device-tier": "600 in use, 200 cached, 50 draining, 150 free of 1,000",
        "#host-tier": "100 in use, 300 free of 400",
        "#chart-throughput": "1,235", "#chart-sequences": "swapped",
    }  # fmt: skip
    for selector, words in shown.items():
        assert words in visit.text(selector), selector
    rows = visit.texts("#classes tr")
    said = ["5.00", "ms", "264", "ms", "259", "ms"]
    assert [row.split() for row in rows] == [
        ["realtime", "1", "1.00", "s", *said, "0"], ["high", "2", "2.00", "s", *said, "1"],
        ["normal", "3", "3.00", "s", *said, "2"], ["low", "4", "4.00", "s", *said, "3"],
    ]  # fmt: skip
    assert "worker of shard-0: cpu, reference kernels, float32, step 899" in visit.text("#processes")
    summary = visit.text("#iterations-sub")
    assert "The last 20 iterations took 200 ms; the device was idle for 5 % of it." in summary
    assert "12 sequences decoded and 20 prompt tokens" in summary
    assert visit.page.locator("#iterations").get_attribute("aria-label") in summary
    widths = visit.page.locator("#device-bar i").evaluate_all("parts => parts.map(part => part.style.width)")
    assert widths == ["60%", "20%", "5%"]

    cells = visit.texts("#replicas th, #replicas td")
    assert [cell.replace("\u00a0", " ").strip() for cell in cells] == [
        "worker-0\nserving · epoch 5", "16 of 64, 2 wait for KV", "60 % of 1,000", "25 % of 400", "1,235", "11.5 ms",
        "4 %", "2", "2,048",
    ]  # fmt: skip
    bars = visit.page.locator("#replicas .bar").evaluate_all(
        "bars => bars.map(bar => [...bar.children].map(part => part.style.width))"
    )
    assert bars == [["25%"], ["60%", "20%", "5%"], ["25%", "25%", "0%"]]

    written.tell(tok_s=88, running=0, waiting=0)
    written.event("policy_changed", "orcinus is in force")
    visit.says("#tok-s", "88")
    visit.says("#state", "idle")
    visit.says("#events", "orcinus is in force")
    assert visit.complaints == []


def test_chart_begins_with_the_history(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    for number in range(5):
        written.tell(tok_s=500 + number)
    visit = open_page()
    visit.says("#chart-throughput .u-legend", "504")
    drawn = visit.page.locator("#chart-throughput canvas").evaluate(
        """canvas => {
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(pixels).size;
        }"""
    )
    assert drawn > 4, "more than one colour"


def test_predicted_ttft_stands_beside_the_measured_with_its_error(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    written.tell(ttft_predicted_ms_p50=5.0, ttft_ms_p50=264.0, ttft_error_ms_p50=259.0)
    visit = open_page()
    visit.says("#ttft-check", "Predicted 5.00 ms, measured 264 ms, error 259 ms")
    assert "bad" in (visit.page.locator("#ttft-error").get_attribute("class") or "")
    assert "predicted" in visit.text("#chart-ttft")
    written.tell(ttft_predicted_ms_p50=250.0, ttft_ms_p50=264.0, ttft_error_ms_p50=14.0)
    visit.says("#ttft-error", "error 14.0 ms, 5 %")
    assert "bad" not in (visit.page.locator("#ttft-error").get_attribute("class") or "")
    written.tell(ttft_predicted_ms_p50=18.0, ttft_ms_p50=23.0, ttft_error_ms_p50=26.0)
    visit.says("#ttft-error", "error 26.0 ms, 113 %")
    assert "bad" not in (visit.page.locator("#ttft-error").get_attribute("class") or "")
    written.tell(ttft_predicted_ms_p50=0, ttft_ms_p50=0, ttft_error_ms_p50=0)
    visit.says("#ttft-check", "cannot be compared")


def test_requests_and_failures_are_shown_by_the_second(open_page: OpenPage, written: WrittenStack) -> None:
    # The gateway may still follow the page of the test before; these times are later than those.
    now = written.now_ms() + 2 * AHEAD_MS
    written.lead()
    written.worker()
    written.tell(time_ms=now - 4000, finished=100, cancelled=0, failed=0)
    visit = open_page()
    visit.says("#state", "live")
    written.tell(time_ms=now, finished=120, cancelled=4, failed=8)
    visit.says("#rps", "8")
    visit.says("#errors", "2 failed, 1 cancelled a second")
    assert "failed" in visit.text("#chart-requests")


def test_totals_say_what_drafts_brought(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    written.tell(tokens_total=300, drafted_tokens=200, accepted_tokens=150)
    visit = open_page()
    visit.says("#totals", "guesses refused")
    pairs = dict(zip(visit.texts("#totals dt"), visit.texts("#totals dd"), strict=True))
    names = ("tokens guessed", "guesses right", "guesses refused", "tokens a sequence and step")
    assert [pairs[name] for name in names] == ["200", "150", "25 %", "2.00"]


def test_cpu_and_memory_of_each_process_are_shown(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    visit = open_page()
    for name, figures in (("worker-0", r"88 %\s+512 MiB"), ("gateway,", r" %\s+\S+ MiB"), ("redis", r" %\s+\S+ MiB")):
        visit.says_in_row("#processes tr", name, figures)
    assert "13 %" in visit.text("#chart-cpu")


def test_range_of_time_can_be_chosen(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    visit = open_page()
    visit.says("#state", "live")
    old = written.now_ms() - 1_800_000
    written.history(old, tok_s=777)
    with visit.page.expect_response("**/dashboard/history?seconds=3600") as response:
        visit.page.get_by_label("Range").select_option("3600")
    assert 777 in response.value.json()["shard-0"]["tok_s"]
    with visit.page.expect_response("**/dashboard/history?seconds=60") as response:
        visit.page.get_by_label("Range").select_option("60")
    assert 777 not in response.value.json()["shard-0"]["tok_s"]
    assert visit.complaints == []


def test_text_from_outside_is_not_run_or_loaded(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    written.tell(policy=EVIL)
    written.worker("worker-evil", device=EVIL, backend=EVIL)
    written.replica(EVIL, role=EVIL)
    written.event(EVIL, EVIL)
    visit = open_page()
    visit.says("#events", "onerror")
    for selector in ("#events", "#processes", "#policy", "#replicas"):
        assert EVIL in visit.page.locator(selector).text_content().replace("\u00a0", " "), selector  # type: ignore[union-attr]
        assert visit.page.locator(f"{selector} img, {selector} script").count() == 0
    assert visit.page.evaluate("window.stolen") is None
    assert not [url for url in visit.requests if "evil" in url]


def test_page_loads_from_its_gateway_only(open_page: OpenPage, written: WrittenStack, gateway: GatewayProcess) -> None:
    full(written)
    visit = open_page()
    visit.says("#state", "live")
    assert len(visit.requests) > 5
    assert all(url.startswith(gateway.ops_url + "/dashboard") for url in visit.requests)


def test_lost_redis_and_gateway_are_shown_and_a_return(open_page: OpenPage, tmp_path: Path, model: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, running_gateway(tmp_path, model, redis) as gateway:
        written = WrittenStack(redis.client, gateway.keys)
        written.ahead_ms = AHEAD_MS
        full(written)
        visit = open_page(gateway.ops_url)
        visit.says("#state", "live")
        redis.stop(signal.SIGKILL)
        visit.says("#state", "no Redis")
        assert "Redis does not answer" in visit.text("#banner")
        assert "The figures are from" in visit.text("#banner")
        assert visit.text("#tok-s") == "1,235", "the last stats stay, marked as old"
        assert visit.page.locator("main.stale").count() == 1
        redis.start()
        full(written)
        visit.says("#state", "live")
        assert not visit.page.locator("#banner").is_visible()
        gateway.stop(signal.SIGKILL)
        visit.says("#state", "disconnected")
        assert "trying again" in visit.text("#banner")


def test_each_missing_service_is_named(open_page: OpenPage, written: WrittenStack) -> None:
    visit = open_page()
    visit.says("#banner", "No scheduler has reported on tiny")
    assert "No iteration has been answered yet" in visit.text("#iterations-sub")
    assert visit.text("#ttft") == "–"
    written.lead()
    written.tell()
    visit.says("#banner", "No worker is registered")
    written.worker()
    visit.says("#state", "live")
    written.tell(time_ms=written.now_ms() - 60_000)
    visit.says("#banner", "has been silent since")
    written.leave()
    visit.says("#banner", "No scheduler leads shard-0")
    written.event("worker_lost", "its stream ended")
    visit.says("#events", "its stream ended")


def test_model_that_takes_turns_sleeps_loads_and_serves(
    open_page: OpenPage, written: WrittenStack, redis_server: RedisServer
) -> None:
    redis_server.client.set(PLACER_KEYS.lease(PLACER), "1", px=60_000)
    written.lead()
    written.tell(running=0, waiting=0)
    visit = open_page()
    for is_awake, state, words in ((False, "asleep", "a request wakes it"), (True, "loading", "requests wait")):
        redis_server.client.hset(PLACER_KEYS.placements, "tiny", Placement(is_awake).encode())
        visit.says("#state", state)
        visit.says("#banner", words)
    written.worker()
    visit.says("#state", "idle")
    assert not visit.page.locator("#banner").is_visible()
    written.tell()
    visit.says("#state", "live")
    assert visit.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_the_width_of_a_phone(open_page: OpenPage, written: WrittenStack, dark: bool) -> None:
    full(written)
    written.worker("w" * 120, device="d" * 90)
    written.replica("w" * 120, state="draining", role="prefill", dock=1)
    written.event("worker_lost", "x" * 300)
    visit = open_page(width=390, dark=dark)
    visit.says("#events", "xxx")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    beyond = visit.page.evaluate(
        """[...document.querySelectorAll("main *, header *")].filter(
          (one) => one.getBoundingClientRect().right > innerWidth + 1
        ).map((one) => one.outerHTML)"""
    )
    assert beyond == []
    label = "[...document.querySelectorAll('#classes td')].map((one) => getComputedStyle(one, '::before').content)"
    assert '"SLO missed"' in visit.page.evaluate(label), "a cell says its column"


SPOTS = """() => {
  const pen = CanvasRenderingContext2D.prototype;
  const [write, clear] = [pen.fillText, pen.clearRect];
  window.spots = [];
  pen.clearRect = function (...all) {
    if (this.canvas.closest("#chart-ttft")) window.spots = [];
    clear.apply(this, all);
  };
  pen.fillText = function (text, x, y) {
    if (this.canvas.closest("#chart-ttft")) window.spots.push({ text, x, wide: this.measureText(text).width });
    write.call(this, text, x, y);
  };
}"""
"""Keep the labels of a chart as it was drawn last: where, and how wide they are."""
TIMES = """(length) => {
  const times = window.spots.filter((spot) => spot.text.includes(":"));
  return times.length && times.every((spot) => spot.text.length === length) && window.spots;
}"""


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_charts_are_whole_and_apart(open_page: OpenPage, written: WrittenStack, width: int) -> None:
    full(written)
    visit = open_page(width=width)
    visit.says("#chart-throughput", "1,235")
    visit.page.evaluate(SPOTS)
    for seconds, label in (("3600", "14:20"), ("60", "14:20:30"), ("300", "14:20")):
        visit.page.select_option("#range", seconds)
        spots = visit.page.wait_for_function(TIMES, arg=len(label)).json_value()
        times = sorted((spot for spot in spots if ":" in spot["text"]), key=lambda spot: spot["x"])
        assert len(times) >= 3, f"range {seconds}: {times}"
        assert all(b["x"] - a["x"] > (a["wide"] + b["wide"]) / 2 for a, b in itertools.pairwise(times)), times
        assert {"0 s", "1 s"} <= {spot["text"] for spot in spots}, "one unit for all labels of an axis"
    cut = "[...document.querySelectorAll('.u-legend')].filter((one) => one.scrollHeight > one.clientHeight + 1).length"
    assert visit.page.evaluate(cut) == 0
    assert visit.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(open_page: OpenPage, written: WrittenStack, dark: bool) -> None:
    """WCAG 2.2, 1.4.3: contrast of 4.5 or more; 1.4.11: 3 for lines and bars."""
    full(written)
    visit = open_page(dark=dark)
    visit.says("#state", "live")
    colours = visit.page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
          const names = ["panel", "page", "text", "soft", "good", "bad", "warn", "decode", "prefill", "line1", "line2",
            "line3"];
          return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()])); }"""
    )
    for ground in ("panel", "page"):
        for name in ("text", "soft", "good", "bad", "warn"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("decode", "prefill", "line1", "line2", "line3"):
        assert contrast(colours[name], colours["panel"]) >= 3, name


def contrast(first: str, second: str) -> float:
    """Of two #rrggbb colours, by WCAG's formula of relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_elements_have_accessible_names(open_page: OpenPage, written: WrittenStack) -> None:
    full(written)
    visit = open_page()
    visit.says("#state", "live")
    nameless = visit.page.evaluate(
        """[...document.querySelectorAll("input, select, img, canvas#iterations, [role=img]")].filter((one) =>
          !(one.labels?.length || one.hasAttribute("alt") || one.getAttribute("aria-label"))
        ).map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert visit.page.locator("h1").count() == 1
    assert visit.page.locator("#state[role=status]").count() == visit.page.locator("#banner[role=alert]").count() == 1
    assert visit.page.locator("html[lang=en]").count() == 1


def test_several_shards_are_summed_and_can_be_selected(
    open_page: OpenPage, written: WrittenStack, gateway: GatewayProcess, redis_server: RedisServer
) -> None:
    full(written)
    other = WrittenStack(redis_server.client, gateway.keys, "shard-1").lead()
    other.ahead_ms = AHEAD_MS
    other.tell(running=3, policy="orca", tok_s=100)
    visit = open_page()
    visit.says("#running", "20")
    visit.says("#policy", "sarathi")
    visit.page.get_by_label("Shard").select_option("shard-1")
    visit.says("#policy", "orca")


def test_page_beyond_loopback_needs_a_valid_key(
    open_page: OpenPage, tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    redis_server.client.flushall()
    with running_gateway(tmp_path, model, redis_server, ops_host="0.0.0.0", api_key="sk-right") as guarded:
        written = WrittenStack(redis_server.client, guarded.keys)
        written.ahead_ms = AHEAD_MS
        full(written)
        visit = open_page(guarded.ops_url)
        visit.says("#state", "key needed")
        visit.page.get_by_label("API key").fill("sk-wrong")
        visit.page.get_by_role("button", name="Show").click()
        visit.says("#banner", "the key is not valid")
        visit.page.get_by_label("API key").fill("sk-right")
        visit.page.get_by_role("button", name="Show").click()
        visit.says("#state", "live")
        assert visit.text("#running") == "17"


def test_page_asks_for_another_key_when_one_lacks_the_scope(open_page: OpenPage) -> None:
    visit = open_page()
    refusal = {"error": {"message": "live page: this key lacks the scope ops"}}
    visit.page.route("**/dashboard/events", lambda route: route.fulfill(status=403, json=refusal))
    visit.page.reload()
    visit.says("#banner", "lacks the scope ops")
    assert visit.page.locator("#key-form").is_visible()
