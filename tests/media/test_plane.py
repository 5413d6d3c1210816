"""The plane as its callers see it: items in, blobs and pixels out, each refusal with its item's name."""

import asyncio
import base64
import os
import threading
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.media.made import RED, film, photo, saved, tone, wav
from tests.media.memory import MemoryBound
from tests.media.servers import answering, loopback_config, response, server
from triptych.core.config import MediaConfig, SourcePolicy, Tier
from triptych.core.errors import (
    BudgetExceeded,
    Conflict,
    ForbiddenSource,
    InvalidMedia,
    InvalidRequest,
    SourceUnavailable,
    TriptychError,
    UnknownMediaId,
    UnsupportedMedia,
)
from triptych.core.media import DecodeSpec, MediaRef, Modality
from triptych.media import inline
from triptych.media import plane as plane_module
from triptych.media.plane import MediaPlane
from triptych.metrics.names import sample_for
from triptych.metrics.registry import Metrics

PNG = saved(Image.new("RGB", (20, 10), RED), "PNG")
PHOTO = saved(Image.fromarray(photo(200, 150)), "JPEG")


def image(source, media_id=None, param=None, **options):
    return MediaRef(Modality.IMAGE, source, media_id, param, options)


async def opened(plane, *refs, tier=None, tenant="t"):
    return await plane.open(refs, tier=tier or Tier(), tenant=tenant)


async def test_every_source_yields_the_same_content(tmp_path):
    """Bytes, data URLs, files and downloads of one picture have one digest, in the order asked."""
    (tmp_path / "a.png").write_bytes(PNG)
    async with server(answering(PNG)) as served:
        config = loopback_config(served.port, policy={"local_root": str(tmp_path)})
        async with MediaPlane(config) as plane:
            blobs = await opened(
                plane,
                image(PNG, param="p0", detail="low"),
                image("data:image/png;base64," + base64.b64encode(PNG).decode()),
                image(f"file://{tmp_path}/a.png"),
                image(f"{served.url}/a.png"),
                image(PHOTO),
            )

    assert [blob.digest for blob in blobs] == [blake3(PNG).digest()] * 4 + [blake3(PHOTO).digest()]
    assert [blob.header.width_px for blob in blobs] == [20] * 4 + [200]
    assert (blobs[0].param, blobs[0].options) == ("p0", {"detail": "low"})
    assert all(blob.fetch_ms > 0 for blob in blobs)


async def test_nothing_asked_nothing_done():
    """No items are no error."""
    async with MediaPlane() as plane:
        assert await opened(plane) == []


async def test_decode_gives_each_modality():
    """Pixels, frames and samples."""
    refs = [image(PNG), MediaRef(Modality.VIDEO, film(10)), MediaRef(Modality.AUDIO, wav(tone(0.5)))]
    async with MediaPlane() as plane:
        blobs = await opened(plane, *refs)
        picture, clip, sound = [await plane.decode(blob, DecodeSpec(num_frames=3), tier=Tier()) for blob in blobs]

    assert picture.pixels.shape == (10, 20, 3)
    assert clip.frames.shape == (3, 64, 96, 3)
    assert sound.samples.shape == (8000,)


async def test_same_content_is_decoded_once(monkeypatch):
    """Ten callers at the same moment share one decode; another spec is another decode."""
    decodes, decode = [], plane_module.decoders.decode

    def counted(data, header, spec, guard):
        decodes.append(spec)
        return decode(data, header, spec, guard)

    monkeypatch.setattr(plane_module.decoders, "decode", counted)
    async with MediaPlane() as plane:
        first, second = await opened(plane, image(PHOTO), image(PHOTO))
        found = await asyncio.gather(*(plane.decode(b, DecodeSpec(), tier=Tier()) for b in [first, second] * 5))
        await plane.decode(first, DecodeSpec(fit_px=(10, 10)), tier=Tier())

        assert all(each is found[0] for each in found)
        assert len(decodes) == 2
        assert plane.stats()["media_decodes_joined"] == 9


async def test_same_url_is_fetched_once_a_tenant():
    """Requests of one tenant at the same moment share a download; it survives the first one's cancellation."""

    async def slow(path, headers, writer):
        await asyncio.sleep(0.15)
        writer.write(response(PNG))
        return True

    async with server(slow) as served, MediaPlane(loopback_config(served.port)) as plane:
        url = f"{served.url}/a.png"
        leader = asyncio.create_task(opened(plane, image(url)))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(opened(plane, image(url), image(url))) for _ in range(3)]
        stranger = asyncio.create_task(opened(plane, image(url), tenant="other"))
        await asyncio.sleep(0.02)
        leader.cancel()
        found = await asyncio.gather(*others, stranger)

        assert {blob.digest for blobs in found for blob in blobs} == {blake3(PNG).digest()}
        assert len(served.requests) == 2
        assert plane._arrivals == {}


async def test_first_failure_cancels_the_others():
    """One bad item ends the request at once; nothing goes on behind it."""

    async def endless(path, headers, writer):
        await asyncio.sleep(60)

    async with server(endless) as served, MediaPlane(loopback_config(served.port)) as plane:
        with pytest.raises(InvalidMedia) as caught:
            await opened(plane, image(f"{served.url}/a", param="slow"), image(PNG[:40], param="messages.0.content.1"))
        assert caught.value.param == "messages.0.content.1"
        await plane._fetches.close()
        assert plane.stats()["media_fetch_queue_depth"] == 0


async def test_shared_failure_names_each_ones_field():
    """One download fails for two requests; each is told about its own item."""
    async with server(answering(b"", status=404)) as served, MediaPlane(loopback_config(served.port)) as plane:
        jobs = [opened(plane, image(f"{served.url}/a", param=param)) for param in ("first", "second")]
        errors = await asyncio.gather(*jobs, return_exceptions=True)

    assert [error.param for error in errors] == ["first", "second"]
    assert all(isinstance(error, SourceUnavailable) for error in errors)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (b"", InvalidRequest),
        (b"not media", UnsupportedMedia),
        ("data:image/png;base64,!!!!", InvalidMedia),
        ("data:image/png", InvalidMedia),
        ("data:,", InvalidMedia),
        ("data:text/plain,hello", UnsupportedMedia),
        ("http://example.com/a.png", ForbiddenSource),
        ("https://127.0.0.1/a.png", ForbiddenSource),
        ("file:///etc/passwd", ForbiddenSource),
        ("a.png", InvalidRequest),
        (None, InvalidRequest),
    ],
)
async def test_bad_sources_are_refused_by_kind(source, error):
    """Each way to be wrong has its own class, and carries the item's field."""
    async with MediaPlane() as plane:
        with pytest.raises(error) as caught:
            await opened(plane, image(source, param="image_url"))
    assert caught.value.param == "image_url"


async def test_data_urls_in_their_spellings():
    """Percent-coded, URL-safe, unpadded, with line breaks, with any declared type, large ones off the loop."""
    text = base64.b64encode(PNG).decode()
    percent = "".join(f"%{byte:02x}" for byte in PNG)
    large = saved(Image.fromarray(photo(700, 500)), "PNG")
    spellings = [
        f"data:image/png;base64,{text}",
        f"DATA:image/jpeg;charset=x;BASE64,{text}",
        f"data:;base64,{text.rstrip('=')}",
        f"data:;base64,{text.replace('+', '-').replace('/', '_')}",
        f"data:;base64,{text.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        f"data:;base64,{text[:40]}\n{text[40:]}",
        f"data:image/png,{percent}",
    ]
    async with MediaPlane() as plane:
        blobs = await opened(plane, *map(image, spellings))
        assert {blob.digest for blob in blobs} == {blake3(PNG).digest()}
        (blob,) = await opened(plane, image("data:;base64," + base64.b64encode(large).decode()))
        assert blob.data == large


@given(st.text("%0123456789abcdefABCDEFxyz\n~é", max_size=40), st.integers(3, 9))
def test_percent_signs_are_undone_as_urllib_does_it(text, slice_bytes):
    """Whole, broken and doubled escapes, wherever a slice ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline, "SLICE_BYTES", slice_bytes)
        found = b"".join(inline._unquoted(text))
    assert found == unquote_to_bytes(text)


def test_percent_coded_bomb_takes_little_more_than_itself():
    """Thirty million bytes of `%41`: an object for each would be gigabytes."""
    url = "data:," + "%41" * 10_000_000
    with MemoryBound(80_000_000):
        assert inline.decode_data_url(url, "max_item_bytes", 2**25) == b"A" * 10_000_000


async def test_text_that_is_no_text_is_refused():
    """Halves of characters, which JSON in careless hands may hold."""
    async with MediaPlane() as plane:
        with pytest.raises(InvalidMedia):
            await opened(plane, image("data:,\ud800"))
        with pytest.raises(InvalidMedia):
            await opened(plane, image("data:;base64,\ud800"))
        with pytest.raises(ForbiddenSource):
            await opened(plane, image("https://example.com/\ud800"))


async def test_local_paths_stay_below_the_root(tmp_path):
    """Links and dots that lead out are refused, alike for what exists and what does not."""
    root, outside = tmp_path / "root", tmp_path / "secret.png"
    root.mkdir()
    outside.write_bytes(PNG)
    (root / "in.png").write_bytes(PNG)
    (root / "link.png").symlink_to(outside)
    (root / "inner.png").symlink_to(root / "in.png")
    (root / "dir").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    async with MediaPlane(MediaConfig(policy=SourcePolicy(local_root=str(root)))) as plane:
        for name in ("in.png", "inner.png", "./in.png", "%69n.png"):
            assert len(await opened(plane, image(f"file://{root}/{name}"))) == 1
        for path in (
            f"{root}/link.png",
            f"{root}/../secret.png",
            f"{root}/dir/secret.png",
            outside,
            "/etc/passwd",
            "/nope",
        ):
            with pytest.raises(ForbiddenSource) as caught:
                await opened(plane, image(f"file://{path}"))
            assert str(tmp_path) not in caught.value.message
        for path in (
            f"file://host{root}/in.png",
            f"file:{root}/in.png",
            f"file://{root}/pipe",
            f"file://{root}/in.png%00",
        ):
            with pytest.raises(ForbiddenSource):
                await opened(plane, image(path))
        with pytest.raises(SourceUnavailable):
            await opened(plane, image(f"file://{root}/nope.png"))
        with pytest.raises(BudgetExceeded, match="max_item_bytes"):
            await opened(plane, image(f"file://{root}/in.png"), tier=Tier(max_item_bytes=10))


async def test_media_ids_are_aliases_inside_a_tenant():
    """An id stands for what its tenant sent with it; nobody else's, no other content, and nothing when forgotten."""
    async with MediaPlane() as plane:
        await opened(plane, image(PNG, "cat"))
        (again,) = await opened(plane, image(None, "cat"))
        assert again.data == PNG
        await opened(plane, image(PNG, "cat"))
        with pytest.raises(UnknownMediaId, match="'cat'"):
            await opened(plane, image(None, "cat"), tenant="other")
        with pytest.raises(Conflict, match="other content"):
            await opened(plane, image(PHOTO, "cat"))
        await opened(plane, image(PHOTO, "cat"), tenant="other")
        with pytest.raises(InvalidRequest, match="256 characters"):
            await opened(plane, image(PNG, "x" * 257))
        with pytest.raises(BudgetExceeded, match="max_width_px"):
            await opened(plane, image(None, "cat"), tier=Tier(max_width_px=19))
        with pytest.raises(UnsupportedMedia):
            await opened(plane, MediaRef(Modality.AUDIO, None, "cat"))
        assert plane.flush() == 2
        with pytest.raises(UnknownMediaId):
            await opened(plane, image(None, "cat"))


async def test_media_ids_are_bounded_in_bytes():
    """The oldest ids go when the room is full, and what cannot be kept is served all the same."""
    async with MediaPlane(MediaConfig(media_id_alias_bytes=len(PHOTO) + 1000)) as plane:
        await opened(plane, image(PNG, "old"))
        await opened(plane, image(PHOTO, "new"))
        with pytest.raises(UnknownMediaId):
            await opened(plane, image(None, "old"))
        assert plane.stats()["media_id_cache_bytes"] <= len(PHOTO) + 1000
        assert len(await opened(plane, image(PHOTO + b"\0" * 2000, "huge"))) == 1


async def test_unnamed_failure_keeps_no_alias():
    """An id whose content was refused stands for nothing."""
    async with MediaPlane() as plane:
        with pytest.raises(BudgetExceeded):
            await opened(plane, image(PNG, "cat"), tier=Tier(max_width_px=1))
        with pytest.raises(UnknownMediaId):
            await opened(plane, image(None, "cat"))


@pytest.mark.parametrize(
    ("tier", "limit"),
    [
        (Tier(max_images=1), "max_images"),
        (Tier(max_item_bytes=100), "max_item_bytes"),
        (Tier(max_request_media_bytes=2 * len(PHOTO) - 1), "max_request_media_bytes"),
        (Tier(max_request_pixels=2 * 30_000 - 1), "max_request_pixels"),
        (Tier(max_height_px=149), "max_height_px"),
    ],
)
async def test_request_budgets_hold_over_all_items(tier, limit):
    """Counts, bytes and pixels, of an item and of all together."""
    async with MediaPlane() as plane:
        with pytest.raises(BudgetExceeded) as caught:
            await opened(plane, image(PHOTO), image(PHOTO), tier=tier)
    assert caught.value.limit == limit
    assert caught.value.requested > caught.value.allowed


async def test_request_over_its_bytes_ends_while_downloads_run():
    """The sum over items is counted as bytes arrive, and another request's share of a download goes on."""
    release = asyncio.Event()
    body = PHOTO + b"\0" * 200_000

    async def half(path, headers, writer):
        data = response(body)
        writer.write(data[:-1000])
        await writer.drain()
        await release.wait()
        writer.write(data[-1000:])
        return True

    async with server(half) as served, MediaPlane(loopback_config(served.port)) as plane:
        rich = asyncio.create_task(opened(plane, image(f"{served.url}/0")))
        refs = [image(f"{served.url}/{i}") for i in range(3)]
        with pytest.raises(BudgetExceeded, match="max_request_media_bytes"):
            await asyncio.wait_for(opened(plane, *refs, tier=Tier(max_request_media_bytes=400_000)), 5)
        release.set()
        assert (await rich)[0].data == body


async def test_event_loop_stays_free_while_decoding():
    """A decode of some length leaves the loop to others."""
    big = saved(Image.fromarray(photo(3000, 2000)), "PNG", compress_level=1)
    async with MediaPlane() as plane:
        (blob,) = await opened(plane, image(big))
        job = asyncio.create_task(plane.decode(blob, DecodeSpec(), tier=Tier()))
        ticks = 0
        while not job.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert (await job).pixels.shape == (2000, 3000, 3)
        assert ticks >= 3


async def test_close_leaves_no_thread_behind():
    """A closed plane ends its threads, and refuses work."""
    before = set(threading.enumerate())
    plane = MediaPlane()
    await plane.start()
    await opened(plane, image(PNG))
    await plane.close()

    assert not {thread.name for thread in set(threading.enumerate()) - before if "media" in thread.name}
    with pytest.raises(TriptychError):
        await opened(plane, image(PNG))


async def test_stats_are_known_to_the_metrics():
    """Queue depth, workers and both caches are in the metrics' table."""
    async with MediaPlane() as plane:
        names = [name for name in plane.stats() if sample_for(name)]
    assert {"media_decode_queue_depth", "decode_workers_busy", "decode_workers", "media_id_cache_bytes"} <= set(names)
    assert "response_cache_hits" in names


async def test_shared_pixels_are_not_changed_by_a_later_decode():
    """Each decode that is not shared has pixels of its own."""
    async with MediaPlane() as plane:
        (blob,) = await opened(plane, image(PNG))
        first = await plane.decode(blob, DecodeSpec(), tier=Tier())
        second = await plane.decode(blob, DecodeSpec(), tier=Tier())
    assert not np.shares_memory(first.pixels, second.pixels)


async def test_counters_move_and_reach_the_metrics():
    """Fetches, bytes, joined work, decodes, waiting, work and refusals: each counted where it happens, each in the
    exposition under its own name."""

    async def slow(path, headers, writer):
        await asyncio.sleep(0.05)
        writer.write(response(PHOTO))
        return True

    async with server(slow) as served, MediaPlane(loopback_config(served.port)) as plane:
        refs = [image(f"{served.url}/a"), image(f"{served.url}/a"), image(f"{served.url}/b")]
        blobs = await opened(plane, *refs)
        await asyncio.gather(*(plane.decode(blob, DecodeSpec(), tier=Tier()) for blob in blobs))
        for source in ("ftp://example.com/a", "https://10.0.0.1/a", "file:///etc/passwd"):
            with pytest.raises(ForbiddenSource):
                await opened(plane, image(source))
        stats = plane.stats()
        page = Metrics().render({"front": stats}).decode()

    wanted = {
        "media_fetches": 2,
        "media_fetches_joined": 1,
        "media_fetched_bytes": 2 * len(PHOTO),
        "media_decodes": 1,
        "media_decodes_joined": 2,
        "media_sources_refused": 3,
    }
    assert {name: stats[name] for name in wanted} == wanted
    assert stats["media_decode_busy_ms"] > 0
    assert stats["media_decode_wait_ms"] >= 0
    for name in (*wanted, "media_decode_busy_ms", "media_decode_wait_ms"):
        assert f'triptych_{name}_total{{model="front"}} {stats[name]}' in page
    for queue in ("media_decode", "media_fetch"):
        assert f'triptych_queue_depth{{model="front",queue="{queue}"}} 0.0' in page


async def test_queue_of_the_pool_is_seen_while_it_stands():
    """Depth, busy workers and the time waited, while a worker is held."""
    gate = threading.Event()
    async with MediaPlane(MediaConfig(decode_workers=1)) as plane:
        jobs = [asyncio.create_task(plane._pool.run(lambda: gate.wait(5))) for _ in range(3)]
        async with asyncio.timeout(5):
            while plane.stats()["media_decode_queue_depth"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # counted from here: a busy machine may take as long to start the worker
        stats = plane.stats()
        assert (stats["media_decode_queue_depth"], stats["decode_workers_busy"]) == (2, 1)
        gate.set()
        await asyncio.gather(*jobs)
        assert plane.stats()["media_decode_wait_ms"] >= 2 * 45


async def test_decode_seconds_are_a_budget():
    """A film that takes longer to decode than its tier allows is refused by name, and its worker is free again."""
    long = film(3000, size=(160, 120), gop=3000)
    async with MediaPlane(MediaConfig(decode_workers=1)) as plane:
        (blob,) = await opened(plane, MediaRef(Modality.VIDEO, long, param="video_url"))
        with pytest.raises(BudgetExceeded, match=r"max_decode_s is 0\.01, the request has 0\.") as caught:
            await plane.decode(blob, DecodeSpec(num_frames=300), tier=Tier(max_decode_s=0.01))
        assert (caught.value.limit, caught.value.param) == ("max_decode_s", "video_url")
        (picture,) = await opened(plane, image(PNG))
        assert (await plane.decode(picture, DecodeSpec(), tier=Tier())).pixels.shape == (10, 20, 3)
