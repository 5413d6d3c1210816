"""The command line: flags, typos, questions in process and against a server, the doctor."""

import re

import pytest
from click.testing import CliRunner, Result
from tiny_folder import make_tiny_text
from toy_door import png_url

from triptych import cli, zoo
from triptych.client import Answer, ask, media_part
from triptych.core.config import Config, Tenant, load_config
from triptych.core.errors import InvalidRequest, UnknownModel
from triptych.launch import resolve_model
from triptych.waterfall import waterfall


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("srve",), "Did you mean 'serve'?"),
        (("serve", "--prot", "1"), "'--port'?"),
        (("serve", "--port", "many"), "not a valid integer"),
        (("serve", "--port", "70000"), "between 0 and 65535"),
        (("serve", "--kv-cache-bytes", "lots"), "512MiB"),
        (("serve", "--dtype", "int3"), "bfloat16"),
        (("serve", "--config", "missing.toml"), "no configuration file missing.toml"),
        (("ask", "what?", "missing.png"), "no file missing.png"),
        (("ask", "what?", __file__), "no picture, video or sound"),
        (("ask", "what?", "--url", "http://127.0.0.1:9"), "nobody answers"),
        (("serve", "no/such-model-here"), "neither a folder nor a model"),
        (("serve", "small-vl"), "is built first: triptych models build small-vl"),
    ],
)
def test_mistakes_get_helpful_errors(arguments, words):
    """A wrong flag, value or file is one line that helps, without a traceback."""
    ended = run(*arguments)

    assert ended.exit_code in (1, 2)
    assert words in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[http]\nprot = 1\n", "did you mean 'port'?"),
        ("[http]\nport = 'x'\n", "$.http.port"),
        ("[[tenants]]\nname = 'a'\nkey = 'k'\ntier = 'gold'\n", "tiers are ['default']"),
        ("[[tenants]]\nname = 'a'\nkey = 'k'\n[[tenants]]\nname = 'b'\nkey = 'k'\n", "same key"),
        ("[http\n", "c.toml"),
    ],
)
def test_mistakes_in_a_configuration_name_the_key(tmp_path, text, words):
    """A configuration file is refused with the key at fault, and the nearest known one."""
    (tmp_path / "c.toml").write_text(text)

    with pytest.raises(InvalidRequest, match=re.escape(words)):
        load_config(tmp_path / "c.toml")


def test_flags_override_the_file(tmp_path):
    """What a flag says wins; what it does not say stays as in the file."""
    (tmp_path / "c.toml").write_text(
        "[http]\nport = 1\nhost = '::1'\n[[models]]\npath = 'a'\n[models.engine]\nmax_running = 3\ndtype = 'float16'\n"
    )
    flags = dict(port=2, dtype="float32", kv_cache_bytes=4096, name=None)
    config = cli._with_flags(load_config(tmp_path / "c.toml"), None, ("k1", "k2"), flags)

    assert (config.http.port, config.http.host) == (2, "::1")
    engine = config.models[0].engine
    assert (engine.dtype, engine.max_running, engine.kv_cache_bytes) == ("float32", 3, 4096)
    assert [tenant.key for tenant in config.tenants] == ["k1", "k2"]
    assert cli._with_flags(Config(), "other", (), {}).models[0].path == "other"


def test_nothing_named_serves_the_model_that_answers_and_the_one_that_draws(tmp_path, monkeypatch):
    """The embedded ones, whatever folder of such a name lies here; and a name that would go to both is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-vl").mkdir()
    models = cli._with_flags(Config(), None, (), {}).models
    assert [model.name for model in models] == ["tiny-vl", "tiny-image"]
    assert [resolve_model(model).path for model in models] == [str(zoo.folder(model.name)) for model in models]
    with pytest.raises(InvalidRequest, match="--name is for one model"):
        cli._with_flags(Config(), None, (), {"name": "mine"})


@pytest.mark.parametrize(
    ("text", "expected"), [("1024", 1024), ("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 gib", 3 * 2**29)]
)
def test_numbers_of_bytes(text, expected):
    """Bytes are written as people write them."""
    assert expected == cli.Bytes().convert(text, None, None)


def test_media_part_of_files_and_urls(tmp_path):
    """A local file travels as a data URL of its kind; a URL stays one."""
    for name, kind in (("a.png", "image_url"), ("a.mp4", "video_url"), ("a.wav", "audio_url")):
        (tmp_path / name).write_bytes(b"x")
        part = media_part(str(tmp_path / name))
        assert part["type"] == kind
        assert part[kind]["url"].startswith("data:")
    assert media_part("https://host/b.webm?x=1") == {
        "type": "video_url",
        "video_url": {"url": "https://host/b.webm?x=1"},
    }


def test_client_streams_and_raises_leaves(toy, serve):
    """The client gives text as it comes, the stage table, and the server's own error leaves."""
    pieces: list[str] = []
    part = {"type": "image_url", "image_url": {"url": png_url()}}
    answer = ask(toy.url, "hello", [part], on_text=pieces.append, max_tokens=64)

    assert answer.text == "".join(pieces) == "hello"
    assert answer.ttft_ms == pytest.approx(sum(answer.stage_ms.values()), abs=0.05)
    with pytest.raises(UnknownModel, match=r"no model 'toi' answers here, did you mean 'toy'\?; those that do: toy"):
        ask(toy.url, "hello", model="toi")
    keyed = serve(Config(tenants=(Tenant(name="a", key="k"),)))
    assert ask(keyed.url, "hello", key="k").text == "hello"


def test_ask_against_a_server(toy):
    """`ask --url` prints the answer, and the waterfall when asked."""
    ended = run("ask", "hello", "--url", f"{toy.url}/v1", "--stages")

    assert ended.exit_code == 0
    assert ended.stdout.splitlines()[0] == "hello"


def test_ask_in_process(tmp_path, monkeypatch):
    """Without a server `ask` serves the model itself, and stops."""
    monkeypatch.setattr(cli, "DEFAULT_URL", "http://127.0.0.1:9")
    folder = make_tiny_text(tmp_path / "tiny-text")
    ended = run("ask", "hello", "--model", str(folder), "--max-tokens", "3")

    assert ended.exit_code == 0, ended.output
    assert len(ended.stdout) > 1


def test_doctor_says_what_will_be_used(tmp_path):
    """The doctor reads the model's folder, names device and libraries, and ends with 1 when something is wrong."""
    good = run("doctor", str(make_tiny_text(tmp_path / "tiny-text")), "--device", "cpu")
    bad = run("doctor", "no/such-model-here")

    assert good.exit_code == 0, good.output
    for words in ("Qwen2ForCausalLM", "cpu, because the configuration says so", "torch 2.", "runner "):
        assert words in good.output
    assert bad.exit_code == 1
    assert "LlamaForCausalLM" in bad.output


def test_waterfall_shows_every_stage():
    """One row a stage, in their order, and the sum."""
    stages = {"llm_prefill_ms": 30.0, "request_parse_ms": 10.0, "ttft_ms": 40.0, "tpot_ms": 5.0}
    table = waterfall(Answer("x", "stop", {"stages": stages}))

    assert list(table.columns[0].cells)[:2] == ["request_parse", "llm_prefill"]
    assert str(list(table.columns[1].cells)[2]) == "40.0 ms"
    bars = [str(cell) for cell in table.columns[2].cells][:2]
    assert len(bars[0]) - len(bars[0].lstrip()) == 0
    assert len(bars[1]) - len(bars[1].lstrip()) == 9
