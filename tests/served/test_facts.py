"""What serves a model is said in one way: by `/v1/models`, by the log at the start, by `triptych doctor`."""

import re

import torch
from click.testing import CliRunner

from triptych.cli import main
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
