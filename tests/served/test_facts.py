"""What serves a model is said in one way: by `/v1/models`, by the log at the start, by `triptych doctor`."""

import logging
import re

import httpx
import torch
from click.testing import CliRunner

from tests.served.conftest import CHAT
from triptych import launch, zoo
from triptych.cli import main
from triptych.core.config import Config, HttpConfig
from triptych.models.served import is_emulated


def test_models_log_and_doctor_agree(caplog):
    """dtype, device and runners as they are, and no `auto`: the embedded model's bfloat16 where the CPU has it, else
    float32; the same for all three who say it."""
    cpu = torch.device("cpu")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "float32" if device == "cpu" and is_emulated(torch.bfloat16, cpu) else "bfloat16"
    config = Config(models=(launch.default_model(),), http=HttpConfig(port=0, access_log=False))
    with caplog.at_level(logging.INFO, "triptych.launch"), launch.background_server(config) as url:
        entry = httpx.get(f"{url}/v1/models").json()["data"][0]
        httpx.post(
            url + CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        ).raise_for_status()
    told = CliRunner().invoke(main, ["doctor", str(zoo.folder("tiny-vl"))]).output

    assert (entry["dtype"], entry["device"].partition(":")[0]) == (dtype, device)
    said = f"{dtype} on {entry['device']}, language {entry['runner']} ("
    assert said in caplog.text
    assert said in told
    assert f"tower {entry['tower']} (" in told
    assert re.search(rf"dtype +{dtype}: ", told)
