"""What a server says of itself: what serves its model (`/v1/models`, the log at the start, `triptych doctor`), and how
its three caches and its engine do (`/metrics`)."""

import re

import torch
from click.testing import CliRunner

from tests.served.conftest import ENGINE
from tests.served.pictures import ask, image_part, picture
from triptych.cli import main
from triptych.metrics.names import CACHES
from triptych.models.served import is_emulated


def test_models_log_and_doctor_agree(served):
    """dtype, device and runners as they are, and no `auto`: the embedded model's bfloat16 where the device has it, else
    float32; the same for all three who say it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "float32" if is_emulated(torch.bfloat16, torch.device(device)) else "bfloat16"
    with served.http() as http:
        entry = http.get("/v1/models").json()["data"][0]
    told = CliRunner().invoke(main, ["doctor", str(served.folder)], env={"COLUMNS": "300"}).output

    assert (entry["dtype"], entry["device"].partition(":")[0]) == (dtype, device)
    said = f"{dtype} on {entry['device']}, language {entry['runner']} ("
    assert f"tiny-vl: {said}" in " ".join(served.log)
    assert said in told
    assert f"tower {entry['tower']} (" in told
    assert re.search(rf"dtype +{dtype}: ", told)


def test_three_caches_are_counted_apart(served):
    """The same question about the same picture is found in the processor's and the language cache, other words before
    the same picture in the processor's and the encoder's; each says what that saved, and stays within its capacity."""
    image = image_part(picture(31, 140, 140))

    def grown(words: str) -> dict[str, float]:
        before = served.metrics()
        content = [{"type": "text", "text": words * 10}, image]
        assert served.chat(ask("", messages=[{"role": "user", "content": content}])).status_code == 200
        after = served.metrics()
        return {name: value - before.get(name, 0.0) for name, value in after.items()}

    served.flush()
    first, same, other = grown("what is this? "), grown("what is this? "), grown("how many are here? ")

    assert [first[f"{cache}_misses"] >= 1 for cache in CACHES] == [True, True, True]
    assert [first[f"{cache}_hits"] for cache in CACHES] == [0, 0, 0]
    assert (same["processor_hits"], same["prefix_hits"] >= 1) == (1, True)
    assert (other["processor_hits"], other["encoder_hits"], other["encoder_misses"]) == (1, 1, 0)
    assert same["processor_saved_ms"] > 0
    assert same["prefix_saved_ms"] > 0
    assert other["encoder_saved_ms"] > 0
    now = served.metrics()
    for cache in CACHES:
        assert 0 < now[f"{cache}_bytes"] <= now[f"{cache}_capacity_bytes"]
        assert now[f"{cache}_entries"] >= 1
        assert f"{cache}_evictions" in now


def test_engine_says_what_it_takes(served):
    """Steps, busy time and memory of the engine's device are there and grow as they should."""
    before = served.metrics()
    assert served.chat(ask("hello")).status_code == 200
    after = served.metrics()

    steps = after["triptych_engine_steps_total"] - before["triptych_engine_steps_total"]
    assert 24 <= steps <= 30
    assert after["triptych_engine_busy_ms_total"] > before["triptych_engine_busy_ms_total"]
    assert 0 < after["triptych_device_memory_used_bytes"] < after["triptych_device_memory_total_bytes"]
    assert after["triptych_kv_bytes_total"] == ENGINE.kv_cache_bytes
