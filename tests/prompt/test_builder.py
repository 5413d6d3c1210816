"""From messages to a prepared request: counts, spans, identities, refusals in the order of cost, stages that add up."""

import asyncio

import numpy as np
import pytest
from safetensors.numpy import save

from triptych.core.config import Tier
from triptych.core.errors import (
    BudgetExceeded,
    EmbeddingsRefused,
    InvalidMedia,
    InvalidRequest,
    PromptRefused,
    UnsupportedMedia,
)
from triptych.core.media import MediaRef, Modality
from triptych.core.sampling import SamplingParams
from triptych.core.stages import Stage, StageClock
from triptych.prompt import EmbedsPart
from triptych.prompt.builder import load_prompt_builder

from .conftest import picture


def ask(*parts, role="user"):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": role, "content": content}]


async def test_spans_point_at_the_media_tokens(prepare, builder):
    """Each item's span covers exactly its run of placeholder tokens, in prompt order."""
    request = await prepare(ask(picture("60x60#1"), "how many", picture("90x30#2")))
    token = builder.layout.image_token_id

    assert [span.item_idx for span in request.spans] == [0, 1]
    assert [item.num_embeds for item in request.items] == [span.length for span in request.spans]
    for span in request.spans:
        assert {token} == set(request.token_ids[span.start : span.end])
    assert sum(span.length for span in request.spans) == request.token_ids.count(token)
    assert (3, len(request.token_ids)) == request.positions.shape


async def test_count_equals_what_is_served(prepare, builder, media):
    """Counting reads headers alone and gives the very tokens that are served."""
    messages = ask(picture("64x200#1"), "how many red", picture("33x40#2"))
    counted = await builder.count_tokens(messages, media=media, tier=Tier(), tenant="acme")
    decoded = media.num_decoded
    request = await prepare(messages)

    assert decoded == 0
    assert counted.token_ids == request.token_ids
    assert counted.media_tokens == {"image": sum(span.length for span in request.spans)}


async def test_stages_add_up(prepare, clock):
    """Fetch, decode and processor are closed once each, and nothing falls between them."""
    stages = StageClock(clock.now_s())
    await prepare(ask(picture("60x60#1")), stage_clock=stages)

    assert {"request_parse_ms", "media_fetch_ms", "media_decode_ms", "mm_processor_ms"} == set(stages.ms)
    assert (stages.ms[Stage.MEDIA_FETCH], stages.ms[Stage.MEDIA_DECODE]) == (500.0, 250.0)
    assert stages.total_ms == pytest.approx((clock.now_s() - 100.0) * 1e3)


async def test_text_closes_the_parse_alone(prepare, clock):
    """A request without media has no media stages."""
    stages = StageClock(clock.now_s())
    request = await prepare(ask("how many"), stage_clock=stages)

    assert {"request_parse_ms"} == set(stages.ms)
    assert (request.items, request.spans) == ((), ())


async def test_same_picture_is_processed_once(prepare, builder, media):
    """At the same moment by single flight, later from the cache; the keys are equal, other tenants' are not."""
    first, second = await asyncio.gather(prepare(ask(picture("60x60#1"))), prepare(ask("the", picture("60x60#1"))))
    third = await prepare(ask(picture("60x60#1")))
    other = await prepare(ask(picture("60x60#1")), tenant="rival")

    assert media.num_decoded == 1
    assert first.items[0].key == second.items[0].key == third.items[0].key != other.items[0].key
    assert first.cache_salt != other.cache_salt
    assert builder.stats()["processor_cache_hits"] >= 1


async def test_options_and_content_change_the_key(prepare):
    """Another content, another option: another identity."""
    keys = set()
    for part in (picture("60x60#1"), picture("60x60#2"), picture("60x60#1", max_pixels=28 * 28 * 2)):
        keys.add((await prepare(ask(part))).items[0].key)

    assert len(keys) == 3


async def test_flush_forgets(prepare, builder, media):
    """After a flush the picture is decoded again."""
    await prepare(ask(picture("60x60#1")))
    flushed = builder.flush()
    await prepare(ask(picture("60x60#1")))

    assert (flushed, media.num_decoded) == (1, 2)


async def test_visual_tokens_over_the_tier_are_refused_before_decode(prepare, media):
    """The refusal names the limit, its value and the request's; no pixel was decoded."""
    with pytest.raises(BudgetExceeded, match="max_request_visual_tokens is 3"):
        await prepare(ask(picture("60x60#1")), tier=Tier(max_request_visual_tokens=3))

    assert media.num_decoded == 0


async def test_prompt_beyond_the_context_is_refused_before_decode(qwen_folder, prepare, media, clock):
    """A prompt that leaves no room is refused by its size, with both numbers."""
    small = load_prompt_builder(str(qwen_folder), max_tokens=24, time=clock)
    with pytest.raises(PromptRefused, match="context of 24"):
        await prepare(ask(picture("60x60#1"), "how many red is the"), using=small)
    small.close()

    assert media.num_decoded == 0


async def test_endless_prompt_is_refused_before_it_is_tokenised(prepare):
    """Millions of characters can never fit, and are not even rendered."""
    with pytest.raises(PromptRefused, match="at least"):
        await prepare(ask("x" * 5_000_000))


async def test_answer_is_cut_to_the_room_left(prepare, builder):
    """`max_tokens` past the context is lowered to what is left."""
    request = await prepare(ask("how many"), sampling=SamplingParams(max_tokens=100_000))

    assert request.sampling.max_tokens == builder.max_tokens - len(request.token_ids)


async def test_one_bad_picture_fails_the_request_with_its_field(prepare, media):
    """The error names the part; the good picture beside it does not hang."""
    media.fails_on, media.error = "40x40#2", InvalidMedia("corrupt")
    with pytest.raises(InvalidMedia, match="corrupt") as raised:
        await prepare(ask(picture("60x60#1"), picture("40x40#2")))

    assert raised.value.param == "messages.0.content.0"


async def test_pictures_at_the_edges(prepare):
    """1x1 is served; 1x500 is refused at its header, by name."""
    request = await prepare(ask(picture("1x1#1")))
    with pytest.raises(InvalidMedia, match="1x500"):
        await prepare(ask(picture("1x500#1")))

    assert request.items[0].num_embeds >= 1


async def test_unknown_option_names_the_field(prepare):
    """A typo in the options is refused at the header, with the part's place in the body."""
    with pytest.raises(InvalidRequest, match="max_pixel'") as raised:
        await prepare(ask(picture("60x60#1", max_pixel=5)))

    assert raised.value.param == "messages.0.content.0"


async def test_kind_that_the_model_does_not_take_is_refused(prepare):
    """Sound for a model of pictures."""
    with pytest.raises(UnsupportedMedia, match="not audio"):
        await prepare(ask(MediaRef(Modality.AUDIO, "x", param="p")))


async def test_completion_takes_text_and_ids(builder, clock):
    """Text and its ids prepare the same request; an id outside the vocabulary is refused."""

    async def complete(prompt):
        return await builder.prepare_completion(
            prompt,
            sampling=SamplingParams(max_tokens=4),
            tenant="acme",
            request_id="r",
            arrival_s=1.0,
            clock=StageClock(clock.now_s()),
        )

    text = await complete("how many")
    ids = await complete(text.token_ids)

    assert (text.token_ids, text.cache_salt) == (ids.token_ids, ids.cache_salt)
    assert (builder.info.eos_token_ids, 4) == (text.eos_token_ids, text.sampling.max_tokens)
    for wrong in ([10**6], [-1], [], ""):
        with pytest.raises(PromptRefused):
            await complete(wrong)


async def test_media_placeholder_in_a_completion_is_refused(builder, clock):
    """A placeholder token without media would read a stray embedding."""
    with pytest.raises(PromptRefused, match="no media"):
        await builder.prepare_completion(
            [builder.layout.image_token_id],
            sampling=SamplingParams(),
            tenant="acme",
            request_id="r",
            arrival_s=1.0,
            clock=StageClock(clock.now_s()),
        )


def embeds(builder, grid="1,4,6", rows=6, revision=None, width=None):
    metadata = {"model_revision": (revision or builder.info.revision).hex(), "grid": grid}
    values = np.random.default_rng(0).standard_normal((rows, width or builder.info.embed_width)).astype(np.float32)
    return EmbedsPart(save({"embeds": values}, metadata), param="messages.0.content.0")


async def test_precomputed_embeddings_take_the_place_of_a_picture(prepare, builder, media):
    """They have a span and positions like a picture of their grid, and nothing is fetched or decoded."""
    request = await prepare(ask(embeds(builder), "how many", picture("60x60#1")))
    item, span = request.items[0], request.spans[0]

    assert (item.num_embeds, item.features) == (6, None)
    assert (span.length, span.item_idx) == (6, 0)
    assert np.array_equal(item.embeds, np.random.default_rng(0).standard_normal(item.embeds.shape).astype(np.float32))
    assert request.items[1].features is not None
    assert media.num_decoded == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(rows=5), "has 6 embeddings, got 5"),
        (dict(grid="1,3,6"), "multiples of 2"),
        (dict(grid="2,4,6", rows=12), "1,h,w"),
        (dict(revision=b"0" * 32), "model_revision"),
        (dict(width=7), "32 wide, got 7"),
    ],
)
async def test_wrong_embeddings_are_refused_by_name(prepare, builder, changes, match):
    """Count, grid, revision and width are checked before admission; the error names the part."""
    with pytest.raises(EmbeddingsRefused, match=match) as raised:
        await prepare(ask(embeds(builder, **changes)))

    assert raised.value.param == "messages.0.content.0"


async def test_an_item_is_decoded_while_another_downloads(prepare, media):
    """Nothing waits for the slowest download but what needs it."""
    media.late = {"60x60#2": asyncio.Event()}
    request = asyncio.create_task(prepare(ask(picture("60x60#1"), picture("60x60#2"))))
    await asyncio.wait_for(media.decoding.wait(), 5)
    assert media.num_opened == 1
    media.late["60x60#2"].set()
    prepared = await request
    assert (media.num_opened, media.num_decoded, len(prepared.items)) == (2, 2, 2)
    assert prepared.items[0].key != prepared.items[1].key


@pytest.mark.parametrize("late", ["60x60#1", "60x60#2"])
async def test_stages_add_up_however_items_arrive(prepare, media, clock, late):
    """What was decoded while another item downloaded is part of the download's time: nothing is counted twice."""
    media.late = {late: asyncio.Event()}
    stages = StageClock(clock.now_s())
    request = asyncio.create_task(prepare(ask(picture("60x60#1"), picture("60x60#2")), stage_clock=stages))
    await media.decoding.wait()
    await asyncio.sleep(0.05)
    clock.advance(2.0)
    media.late[late].set()
    await request
    assert stages.total_ms == pytest.approx((clock.now_s() - stages.started_s) * 1e3)
    assert stages.ms["media_fetch_ms"] == pytest.approx(2750)  # 0.5 to open, 0.25 of a decode, 2.0 of waiting
    assert stages.ms["media_decode_ms"] == pytest.approx(250)


async def test_no_more_is_decoded_than_would_have_fitted(prepare, media):
    """The items of a request over its tier: those before the limit may have been begun, none after it."""
    sources = [f"60x60#{i}" for i in range(6)]
    media.late = {sources[5]: asyncio.Event()}
    tier = Tier(max_request_visual_tokens=10)  # two pictures of four tokens
    request = asyncio.create_task(prepare(ask(*map(picture, sources)), tier=tier))
    await asyncio.sleep(0.1)
    media.late[sources[5]].set()
    with pytest.raises(BudgetExceeded) as refused:
        await request
    assert (refused.value.allowed, refused.value.requested) == (10, 24)
    assert media.num_decoded == 2


async def test_a_picture_that_fails_ends_the_downloads(prepare, media):
    """Whoever waits is told at once, and what still downloads is given up."""
    media.late = {"60x60#2": asyncio.Event()}
    media.fails_on, media.error = "60x60#1", InvalidMedia("broken", param="messages.0.content.1")
    with pytest.raises(InvalidMedia, match="broken"):
        async with asyncio.timeout(5):
            await prepare(ask(picture("60x60#1"), picture("60x60#2")))
    assert media.num_opened == 1


async def test_a_client_that_leaves_ends_downloads_and_decodes(prepare, media, builder):
    """Cancelled with one item decoding and another on its way: both end, and no room stays taken."""
    media.late = {"60x60#2": asyncio.Event()}
    request = asyncio.create_task(prepare(ask(picture("60x60#1"), picture("60x60#2"))))
    await media.decoding.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.sleep(0.05)
    assert media.num_opened == 1
    assert builder.stats()["media_decoded_bytes"] == 0
    assert len(asyncio.all_tasks()) == 1
