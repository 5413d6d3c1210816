"""Pictures and the requests that carry them."""

import base64
import io
import random
from typing import Any

from PIL import Image, ImageDraw


def picture(seed: int, width_px: int, height_px: int, kind: str = "PNG") -> bytes:
    """A few discs and boxes of random colours on a plain ground."""
    rng = random.Random(seed)

    def colour() -> tuple[int, int, int]:
        return rng.randrange(256), rng.randrange(256), rng.randrange(256)

    image = Image.new("RGB", (width_px, height_px), colour())
    pen = ImageDraw.Draw(image)
    for index in range(5):
        left, top = rng.randrange(max(1, width_px - 20)), rng.randrange(max(1, height_px - 20))
        box = (left, top, left + rng.randint(8, 30), top + rng.randint(8, 30))
        (pen.ellipse if index % 2 else pen.rectangle)(box, fill=colour())
    return saved(image, kind)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def image_part(data: bytes | str, **more: Any) -> dict[str, Any]:
    """Bytes of a file, or a URL."""
    url = data if isinstance(data, str) else data_url(data)
    return {"type": "image_url", "image_url": {"url": url}, **more}


def user(text: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def ask(text: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A greedy chat request of a fixed length; `more` overrides."""
    body = {"messages": [user(text, *parts)], "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": True}
    return {**body, **more}
