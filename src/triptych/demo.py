"""`triptych demo`: serve the embedded models, ask about a drawing and a photograph, show where the time went, stop.

Between the two the model that draws draws, and the one that answers is asked about that.
"""

from __future__ import annotations

import base64
import io
from importlib.resources import files
from typing import Any

from rich.console import Console

from triptych.client import ask, draw
from triptych.core.config import Config, HttpConfig
from triptych.launch import background_server, default_model, embedded_models
from triptych.testing.scenes import Scene, SceneObject, draw_scene
from triptych.waterfall import waterfall

DRAWN = "a red circle left of a blue square on white"


def run_demo(console: Console, model: str | None = None) -> None:
    models = (default_model(model),) if model else embedded_models()
    config = Config(models=models, http=HttpConfig(port=0, access_log=False))
    names = " and ".join(one.path for one in models)
    console.print(f"Loading {names} ...", style="dim")
    with background_server(config) as url:
        console.print(f"Serving [bold]{names}[/] on {url}\n")
        scene = draw_scene(7, size_px=(112, 112), plain=True)
        console.print(f"A picture drawn for this run: {_describe(scene)}", style="dim")
        asked = _only_one_of_its_shape(scene)
        question = f"What color is the {asked.shape}?"
        _show(console, url, question, png_part(scene), note=f"it was drawn {asked.colour}")
        _show(console, url, question, png_part(scene), note="the same picture again")
        if model is None:
            part = _image_part("png", draw(url, DRAWN, seed=1))
            _show(console, url, "What color is the square?", part, note=f"drawn just now for: {DRAWN}")
        _show(console, url, "What is in the picture?", photograph_part(), note="a photograph")
    console.print("Stopped; nothing is left running.", style="dim")


def _show(console: Console, url: str, question: str, part: dict[str, Any], note: str = "") -> None:
    console.print(f"\n[bold]{question}[/]{f'  ({note})' if note else ''}")
    answer = ask(
        url,
        question,
        [part],
        on_text=lambda text: console.print(text, end="", style="green"),
        temperature=0,
        max_tokens=48,
    )
    console.print()
    console.print(waterfall(answer))


def _only_one_of_its_shape(scene: Scene) -> SceneObject:
    """An object that a question can mean without doubt."""
    return next(thing for thing in scene.objects if scene.count(shape=thing.shape) == 1)


def _describe(scene: Scene) -> str:
    return ", ".join(thing.name for thing in scene.objects)


def png_part(scene: Scene) -> dict[str, Any]:
    assert scene.image is not None
    buffer = io.BytesIO()
    scene.image.save(buffer, "PNG")
    return _image_part("png", buffer.getvalue())


def photograph_part() -> dict[str, Any]:
    """A portrait of Grace Hopper (United States Navy, public domain: `testing/photograph.LICENSE`)."""
    return _image_part("jpeg", files("triptych.testing").joinpath("photograph.jpg").read_bytes())


def _image_part(kind: str, data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}
