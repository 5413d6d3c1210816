"""Figures from records, work from seeds, ratios from figures: pure."""

import json

import pytest
from bench.load import Record
from bench.ratios import TARGETS, rows
from bench.summary import Slo, summarise
from bench.understand import gaps_between
from bench.work import WorkSpec, bodies, poisson_offsets_s


def record(intended_s=0.0, *, lag_s=0.0, ttft_s=0.1, gap_s=0.01, num_tokens=5, error=None):
    first_s = intended_s + ttft_s
    texts_s = [first_s + gap_s * index for index in range(num_tokens)]
    return Record("text", intended_s, intended_s + lag_s, texts_s[-1], texts_s, 10, num_tokens, error=error)


def test_figures_are_those_of_the_records():
    """Rates are over the wall time from the first intended send to the last end."""
    figures = summarise([record(0.0), record(0.86, ttft_s=0.1)])

    assert figures["wall_s"] == pytest.approx(1.0)
    assert figures["requests_per_s"] == pytest.approx(2.0)
    assert figures["tokens_per_s"] == pytest.approx(10.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(100)
    assert figures["tpot_ms"]["p99"] == pytest.approx(10)
    assert figures["itl_ms"]["max"] == pytest.approx(10)


def test_goodput_leaves_out_slow_and_failed():
    """A late first token, slow tokens and an error each make a request no good."""
    records = [record(), record(ttft_s=0.5), record(gap_s=0.1), record(error="status 503")]

    figures = summarise(records, slo=Slo(ttft_ms=200, tpot_ms=50))

    assert figures["goodput_per_s"] * figures["wall_s"] == pytest.approx(1, rel=1e-2)
    assert figures["num_failed"] == 1
    assert figures["errors"] == ["status 503"]


@pytest.mark.parametrize(("lag_s", "void"), [(0.001, False), (0.2, True)])
def test_a_late_client_voids_the_run(lag_s, void):
    """An open loop whose client lags has not made the load it says."""
    figures = summarise([record(lag_s=lag_s) for _ in range(4)], open_loop=True)

    assert figures["void"] is void
    assert figures["dispatch_lag_ms"]["p99"] == pytest.approx(lag_s * 1e3)


def test_work_follows_from_its_seed():
    """Same seed, same bytes; unique pictures differ, the same picture does not, and every question differs."""
    unique, same = WorkSpec("unique", size_px=32, seed=7), WorkSpec("same", size_px=32, seed=7)
    urls = [json.loads(body)["messages"][0]["content"][0]["image_url"]["url"] for body in bodies("m", unique, 3)]
    same_urls = [json.loads(body)["messages"][0]["content"][0]["image_url"]["url"] for body in bodies("m", same, 3)]

    assert bodies("m", unique, 3) == bodies("m", unique, 3)
    assert (len(set(urls)), len(set(same_urls)), len(set(bodies("m", same, 3)))) == (3, 1, 3)


def test_poisson_times_have_their_rate():
    """They start at once, never go back, and over many the mean gap is one over the rate."""
    offsets_s = poisson_offsets_s(4.0, 4000, seed=1)

    assert offsets_s[0] == 0
    assert offsets_s == sorted(offsets_s)
    assert offsets_s[-1] / 4000 == pytest.approx(0.25, rel=0.05)
    with pytest.raises(ValueError, match="got 0"):
        poisson_offsets_s(0.0, 3, seed=1)


def test_gaps_outside_the_window_do_not_count():
    """Only gaps that lie wholly between the first picture's sending and the last one's end are the text's."""
    one = record(ttft_s=1.0, gap_s=1.0, num_tokens=5)  # pieces at 1, 2, 3, 4, 5 s

    assert gaps_between([one], 1.5, 4.5) == [1.0, 1.0]


def test_ratios_say_hit_and_miss_in_the_right_direction():
    """Less is better for times and more for rates; a missing figure is no hit."""

    def figures(ms, rate):
        work = {"ttft_ms": {"p50": ms}, "tpot_ms": {"p50": ms}, "requests_per_s": rate, "tokens_per_s": rate}
        names = ("single_text", "single_unique", "single_same", "eight_unique", "eight_text")
        return dict.fromkeys(names, work) | {"mixed": {"text_itl_ms": {"p99": ms}}}

    better = rows({"triptych": figures(10, 20), "vllm": figures(100, 10)})
    worse = rows({"triptych": figures(100, 10), "vllm": figures(100, 10)})
    alone = rows({"triptych": figures(100, 10)})

    assert {row.verdict for row in better} == {"hit"}
    assert {row.verdict for row in worse} == {"miss"}
    assert {row.verdict for row in alone} == {"no figure"}
    assert len(better) == len(TARGETS) == 7
