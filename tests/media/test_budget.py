"""The arithmetic of budgets, over any headers."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded
from triptych.core.media import DecodeSpec, MediaHeader, MediaRef, Modality
from triptych.media import budget

MODALITIES = st.sampled_from(list(Modality))
HEADERS = st.builds(
    MediaHeader,
    modality=MODALITIES,
    mime=st.just("x/y"),
    num_bytes=st.integers(0, 2**36),
    width_px=st.integers(1, 50_000),
    height_px=st.integers(1, 50_000),
    num_frames=st.integers(1, 10**6),
    frames_per_s=st.floats(0.1, 240),
    duration_s=st.floats(0, 10_000),
    sample_rate_hz=st.integers(1, 200_000),
    num_channels=st.integers(1, 64),
)
SPECS = st.builds(
    DecodeSpec,
    num_frames=st.none() | st.integers(1, 2000),
    frames_per_s=st.none() | st.floats(0.01, 60),
    times_s=st.none() | st.lists(st.floats(0, 100), min_size=1, max_size=50).map(tuple),
    max_frames=st.integers(1, 1000),
)


def refusal(check, *args):
    try:
        check(*args)
    except BudgetExceeded as error:
        return error
    return None


@given(st.lists(MODALITIES, max_size=60))
def test_counts_are_by_modality(modalities):
    """A refusal names the modality's limit and the number sent; within the limits there is none."""
    tier = Tier(max_images=5, max_videos=3, max_audios=2)
    error = refusal(budget.check_counts, [MediaRef(modality, b"") for modality in modalities], tier)

    counts = {limit: modalities.count(kind) for kind, limit in budget._COUNT_LIMITS.items()}
    over = {limit for limit, count in counts.items() if count > getattr(tier, limit)}
    assert (error is not None) == bool(over)
    if error:
        assert error.limit in over
        assert error.requested == counts[error.limit]


@given(HEADERS)
def test_header_passes_exactly_when_every_limit_holds(header):
    """No limit is forgotten and none is invented; a refusal states the values."""
    tier = Tier(max_width_px=9000, max_height_px=9000, max_item_pixels=10**7, max_item_bytes=2**30)
    picture = header.modality is not Modality.AUDIO
    values = {"max_item_bytes": header.num_bytes}
    if picture:
        values |= {"max_width_px": header.width_px, "max_height_px": header.height_px}
        values |= {"max_item_pixels": header.width_px * header.height_px}
    if header.modality is Modality.VIDEO:
        values |= {"max_video_duration_s": header.duration_s, "max_video_coded_frames": header.num_frames}
    if header.modality is Modality.AUDIO:
        values |= {"max_audio_duration_s": header.duration_s, "max_audio_channels": header.num_channels}
    over = {limit for limit, value in values.items() if value > getattr(tier, limit)}

    error = refusal(budget.check_header, header, tier, "messages.0")

    assert (error is not None) == bool(over)
    if error:
        assert error.limit in over
        assert (error.allowed, error.requested) == (getattr(tier, error.limit), values[error.limit])
        assert error.param == "messages.0"


@given(st.lists(HEADERS, max_size=8))
def test_request_is_the_sum_of_its_items(headers):
    """Bytes and pixels of all items together."""
    tier = Tier(max_request_media_bytes=2**37, max_request_pixels=3 * 10**9)
    num_bytes, num_pixels = sum(h.num_bytes for h in headers), sum(h.num_pixels for h in headers)

    error = refusal(budget.check_request, headers, tier)

    assert (error is None) == (num_bytes <= 2**37 and num_pixels <= 3 * 10**9)


@given(HEADERS, SPECS)
def test_sampled_frames_never_pass_the_spec(header, spec):
    """At least one frame, at most what the spec allows, and the tier's limits hold over what passes."""
    count = budget.num_sampled_frames(header, spec)
    tier = Tier(max_video_frames=100, max_request_pixels=10**9)

    assert count >= 1
    if spec.num_frames is None and spec.times_s is None:
        assert count <= spec.max_frames
    if header.modality is Modality.VIDEO and refusal(budget.check_decode, header, spec, tier) is None:
        assert count <= 100
        assert count * header.num_pixels <= 10**9


def test_refusal_shows_its_numbers_in_full():
    """A byte over 32 MiB looks like one."""
    error = BudgetExceeded("max_item_bytes", allowed=2**25, requested=2**25 + 1)
    assert error.message == "max_item_bytes is 33554432, the request has 33554433"
    assert "60, the request has 60.001" in BudgetExceeded("x", allowed=60.0, requested=60.001).message


@given(st.integers(0, 2**31))
def test_item_limit_is_the_tighter_one(num_request_bytes):
    """The next item may take what is left of the request, and never more than an item may."""
    tier = Tier(max_item_bytes=2**25, max_request_media_bytes=2**27)
    name, allowed = budget.item_bytes_limit(tier, num_request_bytes)

    assert allowed == min(2**25, 2**27 - num_request_bytes)
    assert name == ("max_item_bytes" if allowed == 2**25 else "max_request_media_bytes")
