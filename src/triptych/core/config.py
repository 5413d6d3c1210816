"""Configuration: small frozen pieces, composed by containment; unknown keys are refused; a room gets only its piece.

Read from TOML by `load_config`. Environment variables are not read here: flags and one file are the whole interface.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import msgspec

from triptych.core.errors import InvalidRequest
from triptych.core.suggest import did_you_mean


class _Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every piece: immutable, keywords only, unknown keys refused."""


class SourcePolicy(_Piece, frozen=True):
    """Which sources media may come from (F2). Globally reachable unicast addresses only, unless listed here.

    `ports` may be reached, and 80 too where `http` is among the schemes. `allowed_hosts`: when not empty, these hosts
    alone (`example.com`, or `*.example.com` for all below it). `allowed_networks`: addresses (`10.1.0.0/16`) that may
    be reached though they are not global; a cloud metadata address only where it stands there by itself
    (`169.254.169.254/32`). `local_root`: a folder whose files may be named by `file:` URLs; None refuses them all.
    """

    schemes: tuple[str, ...] = ("https", "data")
    ports: tuple[int, ...] = (443,)
    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    local_root: str | None = None
    max_redirects: int = 3
    max_url_chars: int = 4096

    def __post_init__(self) -> None:
        unknown = set(self.schemes) - {"https", "http", "data"}
        if unknown:
            raise ValueError(f"schemes may be https, http and data, not {sorted(unknown)}; file needs local_root")
        for network in self.allowed_networks:
            ipaddress.ip_network(network)
        for port in self.ports:
            if not 1 <= port <= 65_535:
                raise ValueError(f"ports must be between 1 and 65535, got {port}")


class FetchConfig(_Piece, frozen=True):
    """Deadlines and limits of downloads. `response_cache_bytes` 0 switches the response cache off; where it is on, an
    answer is used again only after its server confirmed its validator. `ca_file`: authorities (PEM) that are trusted
    beside the system's, for a store of one's own."""

    dns_timeout_s: float = 3.0
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 5.0
    total_timeout_s: float = 20.0
    max_connections: int = 100
    max_connections_per_host: int = 16
    max_retries: int = 1
    response_cache_bytes: int = 0
    ca_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("dns_timeout_s", "connect_timeout_s", "read_timeout_s", "total_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("max_connections", "max_connections_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Tier(_Piece, frozen=True):
    """Budgets by tenant or key (F3). Each field is a limit that a refusal names."""

    max_images: int = 32
    max_videos: int = 4
    max_audios: int = 8
    max_item_bytes: int = 32 * 2**20
    max_request_media_bytes: int = 128 * 2**20
    max_width_px: int = 16_384
    max_height_px: int = 16_384
    max_item_pixels: int = 64_000_000
    max_request_pixels: int = 512_000_000
    max_video_frames: int = 768  # sampled for the model
    max_video_coded_frames: int = 432_000  # in the container: an hour at 120 a second
    max_video_duration_s: float = 3600.0
    max_audio_duration_s: float = 1800.0
    max_audio_channels: int = 8
    max_request_visual_tokens: int = 32_768
    max_download_s: float = 20.0
    max_decode_s: float = 300.0  # of one item, in a decode worker
    # generation
    max_generated_pixels: int = 4_194_304
    max_generated_frames: int = 257
    max_steps: int = 150
    max_images_per_request: int = 10
    # traffic
    max_concurrent_requests: int = 0  # 0: no limit
    requests_per_minute: int = 0  # 0: no limit


class MediaConfig(_Piece, frozen=True):
    """`decode_workers` threads decode; at most `decode_queue` items wait for them. `media_id_alias_bytes` bounds the
    content kept for callers' media ids; `max_decoded_bytes` the pixels and samples between decoder and processor, for
    each model."""

    policy: SourcePolicy = SourcePolicy()
    fetch: FetchConfig = FetchConfig()
    decode_workers: int = 2
    decode_queue: int = 256
    media_id_alias_bytes: int = 64 * 2**20
    processor_cache_bytes: int = 512 * 2**20
    max_decoded_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in ("decode_workers", "decode_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_decoded_bytes < 2**20:
            raise ValueError(f"max_decoded_bytes must be at least {2**20}, got {self.max_decoded_bytes}")


class EngineConfig(_Piece, frozen=True):
    """Budgets of one language engine. `max_decode_stall_ms` bounds how long a running decode waits for an encoder, or
    two of its layers do where they take longer."""

    dtype: str = "auto"
    device: str = "auto"
    kv_cache_bytes: int = 1 * 2**30
    block_size_tokens: int = 32
    max_step_tokens: int = 1024
    max_running: int = 64
    max_waiting: int = 1024
    max_model_tokens: int | None = None
    encoder_cache_bytes: int = 256 * 2**20
    encoder_step_tokens: int | None = None  # None: 1024 on a CPU, which one picture fills; 16384 on a GPU
    max_decode_stall_ms: float = 40.0
    max_media_bytes: int = 2 * 2**30  # processor outputs of all live requests
    prefix_cache: bool = True
    runner: str = "auto"
    num_threads: int | None = None
    shared_memory_bytes: int = 256 * 2**20  # for large arrays on their way to the engine process; 0: none
    warm_up: bool = True  # answer once of its own before /ready


class GenerateConfig(_Piece, frozen=True):
    """Budgets of one diffusion engine. `max_step_tokens` bounds the latent tokens of one denoising step. `niceness`, as
    of nice(2): how far its process steps back for the others on a busy CPU. `num_inference_steps` and `guidance_scale`
    are for requests that name none; without them the folder's, else the pipeline class's."""

    dtype: str = "auto"
    device: str = "auto"
    max_waiting: int = 256
    max_resident: int = 64
    max_step_tokens: int = 262_144
    max_step_branches: int = 64
    decode_queue: int = 8
    text_cache_bytes: int = 64 * 2**20
    warm_up: bool = True
    warm_up_s: float = 10.0
    num_threads: int | None = None
    niceness: int = 3
    num_inference_steps: int | None = None
    guidance_scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_inference_steps is not None and self.num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1, got {self.num_inference_steps}")
        if self.guidance_scale is not None and not 0 <= self.guidance_scale <= 100:
            raise ValueError(f"guidance_scale must be between 0 and 100, got {self.guidance_scale}")
        if not 0 <= self.niceness <= 19:
            raise ValueError(f"niceness must be between 0 and 19, got {self.niceness}")


class ModelConfig(_Piece, frozen=True):
    """One served model. `path` is a folder, a hub name, or the name of an embedded model."""

    path: str
    name: str | None = None
    engine: EngineConfig = EngineConfig()
    generate: GenerateConfig = GenerateConfig()
    processor: dict[str, object] = {}


class HttpConfig(_Piece, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 256 * 2**20
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    access_log: bool = True
    status_page: bool = True
    ttft_slo_text_ms: float = 500.0
    ttft_slo_multimodal_ms: float = 2000.0
    max_choices: int = 16
    max_cache_salt_chars: int = 256
    max_media_id_chars: int = 256
    max_stop_strings: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")


class Tenant(_Piece, frozen=True):
    """`key` is the secret the caller presents; `tier` names an entry of `Config.tiers`. `admin` may look at and flush
    caches, and sees every tenant's requests."""

    name: str
    key: str
    tier: str = "default"
    admin: bool = False


class Config(_Piece, frozen=True):
    models: tuple[ModelConfig, ...] = ()
    http: HttpConfig = HttpConfig()
    media: MediaConfig = MediaConfig()
    tiers: dict[str, Tier] = {}
    tenants: tuple[Tenant, ...] = ()

    def __post_init__(self) -> None:
        known = {"default", *self.tiers}
        for tenant in self.tenants:
            if tenant.tier not in known:
                raise ValueError(f"tenant {tenant.name!r} names tier {tenant.tier!r}; tiers are {sorted(known)}")
            if not tenant.key:
                raise ValueError(f"tenant {tenant.name!r} has an empty key")
        for what in ("name", "key"):
            values = [getattr(tenant, what) for tenant in self.tenants]
            if len(set(values)) < len(values):
                raise ValueError(f"two tenants have the same {what}")

    def tier(self, name: str) -> Tier:
        return self.tiers.get(name) or Tier()


def load_config(path: Path) -> Config:
    """Read a TOML file. Raises InvalidRequest naming the key at fault, and the nearest known one."""
    try:
        raw = msgspec.toml.decode(path.read_bytes())
        return msgspec.convert(raw, type=Config)
    except FileNotFoundError as error:
        raise InvalidRequest(f"no configuration file {path}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path.name}: {error}{_hint(str(error))}") from error


def _hint(message: str) -> str:
    found = re.search(r"unknown field `([^`]+)`", message)
    known = {name for piece in _Piece.__subclasses__() for name in piece.__struct_fields__}
    return did_you_mean(found[1], known) if found else ""
