"""Sound from any container to mono samples at the model's rate."""

import numpy as np
import pytest

from tests.media.decoding import decode, inspect
from tests.media.made import film, sound, tone, wav
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia, UnsupportedMedia
from triptych.core.media import DecodeSpec, Modality
from triptych.media.decode.audio import mix_down

AUDIO = Modality.AUDIO
CODECS = [
    ("flac", "flac", "s16", "audio/flac"),
    ("aac", "mp4", "fltp", "video/mp4"),
    ("aac", "adts", "fltp", "audio/aac"),
    ("libmp3lame", "mp3", "fltp", "audio/mpeg"),
    ("libopus", "ogg", "s16", "application/ogg"),
    ("libopus", "webm", "s16", "video/x-matroska"),
    ("pcm_s24le", "wav", "s32", "audio/wav"),
    ("pcm_f32le", "wav", "flt", "audio/wav"),
    ("pcm_u8", "wav", "u8", "audio/wav"),
    ("pcm_s16be", "aiff", "s16", "audio/aiff"),
]


def loudness(samples, hertz, rate):
    """The amplitude of one frequency in the middle of `samples`."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    wave = np.exp(-2j * np.pi * hertz * np.arange(len(middle)) / rate)
    return 2 * abs(np.mean(middle * wave))


@pytest.mark.parametrize(("codec", "container", "sample_format", "mime"), [c for c in CODECS if c[2] != "u8"])
def test_containers_yield_their_sound(codec, container, sample_format, mime):
    """A tone of known pitch and loudness from each codec, resampled to 16 kHz."""
    rate = 48_000 if codec == "libopus" else 44_100
    data = sound(tone(2.0, rate), codec=codec, container=container, rate=rate, sample_format=sample_format)
    header = inspect(data, AUDIO)

    decoded = decode(data, AUDIO)

    assert (header.mime, header.sample_rate_hz, header.num_channels) == (mime, rate, 1)
    assert header.duration_s == pytest.approx(2.0, abs=0.3 if container == "adts" else 0.08)
    assert decoded.sample_rate_hz == 16_000
    assert decoded.samples.dtype == np.float32
    assert len(decoded.samples) == pytest.approx(32_000, abs=1200)
    assert loudness(decoded.samples, 440, 16_000) == pytest.approx(0.5, abs=0.03)


def test_equal_rate_is_exact():
    """16-bit samples at the wanted rate come as they are, divided by 32768."""
    data = wav(tone(0.5))
    written = np.frombuffer(data[44:], "<i2")

    assert (decode(data, AUDIO).samples == written.astype(np.float32) / 32768).all()


@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000, 96_000])
def test_resampling_keeps_pitch_and_length(rate):
    """Whole seconds in, whole seconds out, whatever the block sizes."""
    decoded = decode(wav(tone(3.0, rate), rate), AUDIO)

    assert len(decoded.samples) == 48_000
    assert loudness(decoded.samples, 440, 16_000) == pytest.approx(0.5, abs=0.01)


def test_stereo_is_averaged():
    """Each side counts half."""
    left = np.stack([tone(1.0), np.zeros(16_000, np.float32)], axis=1)
    assert loudness(decode(wav(left), AUDIO).samples, 440, 16_000) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("channel", "share"), [(0, 1.0), (1, 1.0), (2, 0.7071), (3, 0.0), (4, 0.7071), (5, 0.7071)])
def test_surround_is_mixed_as_stated(channel, share):
    """5.1: fronts 1, centre and surrounds 0.7071, low frequencies 0, divided by the sum; nothing audible is hidden and
    nothing inaudible is heard."""
    samples = np.zeros((16_000, 6), np.float32)
    samples[:, channel] = tone(1.0)
    data = sound(samples, codec="flac", container="flac", layout="5.1")

    heard = loudness(decode(data, AUDIO).samples, 440, 16_000)

    assert heard == pytest.approx(0.5 * share / (2 + 3 * 0.7071), abs=0.005)


def test_unknown_places_are_averaged():
    """Channels without a place in the room count alike."""
    channels = np.array([[3.0], [0.0], [0.0]], np.float32)
    assert mix_down(channels, ["AMBI0", "AMBI1", "AMBI2"]).tolist() == [1.0]
    assert mix_down(channels[:1], ["LFE"]).tolist() == [3.0]
    assert mix_down(channels, ["LFE", "LFE", "LFE2"]).tolist() == [1.0]


def test_loud_and_broken_floats_are_bounded():
    """Samples over full scale are clipped, and what is not a number is silence."""
    samples = np.array([[0.5], [3.0], [-3.0], [np.nan], [np.inf]] * 100, np.float32)
    data = sound(samples, codec="pcm_f32le", container="wav", sample_format="flt")

    assert decode(data, AUDIO).samples[:4].tolist() == [0.5, 1.0, -1.0, 0.0]


def test_sound_of_a_film_when_asked():
    """A film sent as audio is heard."""
    decoded = decode(film(60, sound=True), AUDIO)
    assert loudness(decoded.samples, 440, 16_000) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(UnsupportedMedia, match="no sound"):
        inspect(film(5), AUDIO)


def test_budgets_at_the_header():
    """Seconds and channels are refused by name before decoding."""
    with pytest.raises(BudgetExceeded, match="max_audio_duration_s is 1, the request has 2"):
        inspect(wav(tone(2.0)), AUDIO, Tier(max_audio_duration_s=1.0))
    with pytest.raises(BudgetExceeded, match="max_audio_channels is 1, the request has 2"):
        inspect(wav(np.zeros((100, 2))), AUDIO, Tier(max_audio_channels=1))


def test_lying_duration_is_caught_while_decoding():
    """A header that claims a second does not buy an hour."""
    from triptych.core.media import MediaHeader
    from triptych.media import decode as decoders
    from triptych.media.budget import DecodeGuard

    data = wav(tone(30.0))
    claimed = MediaHeader(AUDIO, "audio/wav", len(data), duration_s=1.0, sample_rate_hz=16_000, num_channels=1)
    steps = decoders.decode(data, claimed, DecodeSpec(), DecodeGuard(Tier(max_audio_duration_s=5.0)))
    with pytest.raises(BudgetExceeded, match="max_audio_duration_s"):
        for _ in steps:
            pass


@pytest.mark.parametrize(("codec", "container", "sample_format", "mime"), [c for c in CODECS if c[2] != "u8"])
@pytest.mark.parametrize("kept", [0.01, 0.5])
def test_cut_sounds_are_corrupt_or_shorter(codec, container, sample_format, mime, kept):
    """A file that ends early yields what is there, or is refused."""
    rate = 48_000
    data = sound(tone(2.0, rate), codec=codec, container=container, rate=rate, sample_format=sample_format)
    try:
        decoded = decode(data[: int(len(data) * kept)], AUDIO)
    except (InvalidMedia, UnsupportedMedia):
        return
    assert 0 < len(decoded.samples) <= 33_000


def test_empty_sound_is_refused():
    """A container without samples is corrupt."""
    with pytest.raises(InvalidMedia):
        decode(wav(np.zeros(0)), AUDIO)
