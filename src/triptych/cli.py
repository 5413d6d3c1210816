"""The command line: one short function a verb. What they do is in `launch`, `client`, `doctor` and `demo`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress

from triptych.core.config import Config, EngineConfig, HttpConfig, Tenant, load_config
from triptych.core.errors import TriptychError

OUT = Console()
ERR = Console(stderr=True)
DEFAULT_URL = "http://127.0.0.1:8000"


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: 1073741824, 512MiB, 2GB."""

    name = "bytes"
    _UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "b": 1}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        number = text.rstrip("bikmg ")
        unit = text[len(number) :].strip()
        if unit not in self._UNITS or not number.replace(".", "", 1).isdecimal():
            self.fail(f"{value!r} is no number of bytes; write 1073741824, 512MiB or 2GB", param, ctx)
        return int(float(number) * self._UNITS[unit])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="triptych")
def main() -> None:
    """Serve multimodal models: understand pictures, video and sound; generate pictures and video."""


@main.command()
@click.argument("model", required=False)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--port", type=int, help="0 takes a free one.  [8000]")
@click.option("--name", help="What clients call the model.  [its folder's name]")
@click.option("--api-key", "api_keys", multiple=True, help="A key that callers must present; may be repeated.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]))
@click.option("--device", help="auto, cpu, cuda, cuda:1.  [auto]")
@click.option("--runner", help="How the model is run; `doctor` lists them.  [auto]")
@click.option("--num-threads", type=int, help="Threads of the engine process.  [all cores]")
@click.option("--max-model-tokens", type=int, help="Longest prompt and answer.  [the model's own]")
@click.option("--max-running", type=int, help="Requests in one batch.  [64]")
@click.option("--kv-cache-bytes", type=Bytes(), help="Memory for keys and values.  [1GiB]")
@click.option("--encoder-cache-bytes", type=Bytes(), help="Memory for embeddings of media.  [256MiB]")
@click.option("--max-decode-stall-ms", type=float, help="Longest wait of running answers for an encoder.  [40]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def serve(model: str | None, config_file: Path | None, api_keys: tuple[str, ...], log_level: str, **flags: Any) -> None:
    """Serve MODEL: a Hugging Face folder, a hub name, or an embedded model. Without one: the embedded one."""
    from triptych.launch import serve as run

    with _plain_errors():
        config = _with_flags(load_config(config_file) if config_file else Config(), model, api_keys, flags)
        _log_to_stderr(log_level)
        ERR.print(f"Loading {', '.join(one.path for one in config.models)} ...", style="dim")
        run(config, lambda url: ERR.print(f"Ready on [bold]{url}[/]  ·  API {url}/v1  ·  status page {url}/"))


@main.command()
@click.argument("question")
@click.argument("media", nargs=-1)
@click.option("--url", help=f"The server to ask.  [{DEFAULT_URL}, or else in this process]")
@click.option("--model", help="Model at the server; without a server: folder, hub name or embedded model.")
@click.option("--key", default="", envvar="TRIPTYCH_API_KEY", help="API key.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--stages", is_flag=True, help="Show where the time went.")
def ask(
    question: str, media: tuple[str, ...], url: str | None, model: str | None, key: str, stages: bool, **fields: Any
) -> None:
    """Ask QUESTION about MEDIA: files or URLs of pictures, video or sound."""
    from triptych import client
    from triptych.waterfall import waterfall

    with _plain_errors():
        parts = [client.media_part(source) for source in media]
        with _server(url, model) as (base, served_name):
            answer = client.ask(
                base,
                question,
                parts,
                key=key,
                on_text=lambda text: click.echo(text, nl=False),
                model=served_name,
                **fields,
            )
        click.echo()
        if stages:
            OUT.print(waterfall(answer))


@main.command()
@click.argument("prompt")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help=".png, .jpg, .webp or .mp4")
@click.option("--model", required=True, help="A diffusers folder.")
@click.option("--width-px", type=int, help="[the model's own]")
@click.option("--height-px", type=int, help="[the model's own]")
@click.option("--steps", "num_steps", type=int, help="Denoising steps.  [the model's own]")
@click.option("--guidance", "guidance_scale", type=float, help="[the model's own]")
@click.option("--negative-prompt", help="What should not be in it.")
@click.option("--seed", type=int, help="The same seed gives the same picture.  [drawn]")
@click.option("--frames", "num_frames", type=int, help="Frames of a clip.")
def draw(prompt: str, output: Path, model: str, **options: Any) -> None:
    """Draw PROMPT to a file, in this process."""
    from triptych.launch import draw_to_file

    with _plain_errors(), Progress(console=ERR, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        drawn = draw_to_file(
            prompt, output, model, options, lambda step, total: progress.update(
                task, description="drawing", completed=step, total=total
            ),
        )  # fmt: skip
    stages = ", ".join(f"{stage} {ms:.0f}" for stage, ms in drawn.stage_ms.items())
    OUT.print(f"{drawn.path}  seed {drawn.request.seed}  {stages}", highlight=False)


@main.command()
@click.argument("model", required=False)
@click.option("--config", "config_file", type=click.Path(path_type=Path))
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
@click.option("--load/--no-load", default=True, help="Load the weights, which decides the runner.")
def doctor(model: str | None, config_file: Path | None, device: str, dtype: str, load: bool) -> None:
    """Say what this machine has, whether MODEL can be served, and what would be used and why."""
    from triptych.doctor import examine
    from triptych.launch import default_model

    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}
    with _plain_errors():
        config = load_config(config_file) if config_file else Config()
        models = (default_model(model),) if model or not config.models else config.models
        bad = 0
        for one in models:
            engine = one.engine if config_file else EngineConfig(device=device, dtype=dtype)
            for finding in examine(msgspec.structs.replace(one, engine=engine), load=load):
                OUT.print(f"{marks[finding.is_good]} {finding.topic:<10} {finding.what}", highlight=False)
                bad += finding.is_good is False
    sys.exit(1 if bad else 0)


@main.command()
@click.argument("model")
def calibrate(model: str) -> None:
    """Calibrate the step cache of MODEL, a diffusers folder, and write the result beside it with its quality table.

    The cache stays off where no threshold passes the quality gate.
    """
    from triptych.generate.calibrate import as_table, calibrate_folder
    from triptych.launch import diffusion_folder

    with _plain_errors():
        found = calibrate_folder(
            diffusion_folder(model), on_trial=lambda trial: ERR.print(f"threshold {trial.threshold:g} tried")
        )
        click.echo(as_table(found))


@main.command()
@click.option("--model", help="Another model than the embedded one.")
def demo(model: str | None) -> None:
    """Serve the embedded model, ask it about two pictures, show where the time went, stop."""
    from triptych.demo import run_demo

    with _plain_errors():
        run_demo(OUT, model)


def _with_flags(config: Config, model: str | None, api_keys: tuple[str, ...], flags: dict[str, Any]) -> Config:
    """Flags override the file. A model on the command line takes the place of the file's models."""
    from triptych.launch import default_model

    given = {name: value for name, value in flags.items() if value is not None}
    http = {name: value for name, value in given.items() if name in HttpConfig.__struct_fields__}
    engine = {name: value for name, value in given.items() if name in EngineConfig.__struct_fields__}
    models = (default_model(model),) if model or not config.models else config.models
    models = tuple(
        _replace(one, engine=_replace(one.engine, **engine), name=given.get("name", one.name)) for one in models
    )
    tenants = config.tenants + tuple(Tenant(name=f"key-{n}", key=key) for n, key in enumerate(api_keys, 1))
    overridden: Config = _replace(config, models=models, http=_replace(config.http, **http), tenants=tenants)
    return overridden


def _replace(piece: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(piece, **changes)


@contextlib.contextmanager
def _server(url: str | None, model: str | None) -> Iterator[tuple[str, str | None]]:
    """(the server's URL, the model's name there): the one named, the one on the usual port, or one in this process."""
    from triptych import client
    from triptych.launch import background_server, default_model

    if url is not None or client.is_ready(DEFAULT_URL):
        yield (url or DEFAULT_URL).rstrip("/").removesuffix("/v1"), model
        return
    config = Config(models=(default_model(model),), http=HttpConfig(port=0, access_log=False))
    with background_server(config, in_process=True) as here:
        yield here, None


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Our own errors are one line and exit code 1, without a traceback."""
    try:
        yield
    except TriptychError as error:
        raise click.ClickException(error.message) from error
    except ValueError as error:  # the rules of `core.config`, broken by flags
        raise click.UsageError(str(error)) from error


def _log_to_stderr(level: str) -> None:
    """Readable lines for what happens, one JSON object a line for each request."""
    logging.basicConfig(level=level.upper(), format="%(message)s", handlers=[RichHandler(console=ERR, show_path=False)])
    requests = logging.getLogger("triptych.requests")
    requests.propagate = False
    requests.addHandler(logging.StreamHandler(sys.stderr))
    for noisy in ("httpx", "httpcore", "uvicorn", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
