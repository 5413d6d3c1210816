"""A real server on the embedded model: `triptych serve`'s own front, media plane and engine process, small budgets."""

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig

from tests.served.faulty_engine import DELAYS_VARIABLE
from tests.served.sources import Sources
from triptych import launch, zoo
from triptych.cluster.engine_process import EngineProcess
from triptych.core.config import (
    Config,
    EngineConfig,
    FetchConfig,
    HttpConfig,
    MediaConfig,
    ModelConfig,
    SourcePolicy,
    Tenant,
    Tier,
)
from triptych.models.served import choose_device, is_emulated

CHAT = "/v1/chat/completions"
# What serves is bfloat16 where the device has it, else float32: budgets are so many tokens in either.
ELEMENT_BYTES = 4 if is_emulated(torch.bfloat16, choose_device("auto")) else 2
TEXT = AutoConfig.from_pretrained(zoo.folder("tiny-vl")).get_text_config()
EMBED_BYTES = TEXT.hidden_size * ELEMENT_BYTES
HEAD_DIM = TEXT.hidden_size // TEXT.num_attention_heads
KEY_VALUE_BYTES = TEXT.num_hidden_layers * 2 * TEXT.num_key_value_heads * HEAD_DIM * ELEMENT_BYTES  # keys and values
ENGINE = EngineConfig(
    num_threads=1,
    max_running=4,
    max_step_tokens=128,
    kv_cache_bytes=2048 * KEY_VALUE_BYTES,
    encoder_cache_bytes=900 * EMBED_BYTES,
)
TIER = Tier(max_images=4, max_item_pixels=2_000_000, max_item_bytes=4 * 2**20, max_download_s=60)

# What many models' templates say, and the embedded one's does not.
STRICT_ROLES = """{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user/assistant') -}}
{%- endif -%}
{%- endfor -%}
"""

# Gauges that are zero whenever nobody is served. Caches may hold what nobody references.
RESERVED = {
    "triptych_requests_in_flight",
    "triptych_queue_depth",
    "triptych_running",
    "triptych_kv_blocks_used",
    "triptych_encoder_held_bytes",
    "triptych_live_media_bytes",
    "triptych_transfer_shared_bytes",
    "triptych_media_decoded_bytes",
    "triptych_decode_workers_busy",
}


@dataclass
class Served:
    """A server that is ready, its model's folder, what it said at its start, what it may fetch from, and how slow it
    is made."""

    url: str
    folder: Path
    log: list[str]
    sources: Sources
    _delays: Path

    def chat(self, body: dict[str, object], *, path: str = CHAT, **headers: str) -> httpx.Response:
        with self.http() as http:
            return http.post(path, json=body, headers=headers)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": "Bearer user"}, timeout=120)

    def flush(self) -> None:
        for cache in ("processor", "encoder", "prefix", "media"):
            httpx.post(f"{self.url}/v1/admin/caches/{cache}/flush", headers={"x-api-key": "admin"}).raise_for_status()

    @contextlib.contextmanager
    def slow(self, *, layer_s: float = 0.0, step_s: float = 0.0) -> Iterator[None]:
        self._delays.write_text(f"{layer_s} {step_s}")
        try:
            yield
        finally:
            self._delays.write_text("0 0")

    def metrics(self) -> dict[str, float]:
        """Each metric's sum over its labels; beside them `QUEUE_queue`, `CACHE_hits` and the like, `cancelled`.
        An engine that is in a slow layer answers after it."""
        while not (found := self._metrics())["triptych_engine_up"]:
            pass
        return found

    def _metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                if queue := sample.labels.get("queue"):
                    found[f"{queue}_queue"] = found.get(f"{queue}_queue", 0.0) + sample.value
                if sample.name == "triptych_requests_total" and sample.labels["code"] == "cancelled":
                    found["cancelled"] = found.get("cancelled", 0.0) + sample.value
                if cache := sample.labels.get("cache"):
                    what = sample.name.removeprefix("triptych_cache_").removesuffix("_total")
                    found[f"{cache}_{what}"] = sample.value
        return found

    def num_cancelled(self) -> int:
        """Requests whose clients left."""
        return int(self.metrics().get("cancelled", 0))

    def still_reserved(self) -> dict[str, float]:
        """What is held though it should not be, once all requests have ended."""
        metrics = self.metrics()
        assert metrics.keys() >= RESERVED, RESERVED - metrics.keys()
        return {name: metrics[name] for name in sorted(RESERVED) if metrics[name]}

    def wait_until_free(self, timeout_s: float = 20.0) -> None:
        end_s = time.monotonic() + timeout_s
        while held := self.still_reserved():
            assert time.monotonic() < end_s, held
            time.sleep(0.02)


@pytest.fixture(scope="package")
def served(tmp_path_factory) -> Iterator[Served]:
    delays = tmp_path_factory.mktemp("delays") / "delays"
    delays.write_text("0 0")
    folder = shutil.copytree(zoo.folder("tiny-vl"), tmp_path_factory.mktemp("models") / "tiny-vl")
    template = folder / "chat_template.jinja"
    template.write_text(STRICT_ROLES + template.read_text())
    with Sources() as sources, pytest.MonkeyPatch.context() as patch:
        policy = SourcePolicy(
            schemes=("https", "http", "data"), ports=(sources.port,), allowed_networks=("127.0.0.1/32",)
        )
        config = Config(
            models=(ModelConfig(str(folder), engine=ENGINE),),
            http=HttpConfig(port=0),
            media=MediaConfig(policy=policy, fetch=FetchConfig(read_timeout_s=60, total_timeout_s=60)),
            tiers={"default": TIER},
            tenants=(Tenant(name="user", key="user"), Tenant(name="admin", key="admin", admin=True)),
        )
        patch.setenv(DELAYS_VARIABLE, str(delays))
        patch.setattr(launch, "EngineProcess", functools.partial(EngineProcess, module="tests.served.faulty_engine"))
        with _logged("triptych.launch") as log, launch.background_server(config) as url:
            yield Served(url, folder, log, sources, delays)


@contextlib.contextmanager
def _logged(name: str) -> Iterator[list[str]]:
    """What this logger says, from its level INFO on."""
    said: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
