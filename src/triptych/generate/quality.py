"""How near two pictures are: PSNR, SSIM, mean absolute difference, flicker; and the gate of the step cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

MIN_PSNR_DB = 28.0
MIN_SSIM = 0.95
SSIM_WINDOW_PX = 7


@dataclass(frozen=True, slots=True)
class Quality:
    """Worst over frames for PSNR and SSIM, mean for the difference (0 to 255). `flicker`: mean absolute change from
    frame to frame, ours less the reference's; 0 for one picture. `latent_error`: relative L2."""

    psnr_db: float
    ssim: float
    mean_difference: float
    flicker: float
    latent_error: float

    @property
    def passes(self) -> bool:
        return self.psnr_db >= MIN_PSNR_DB and self.ssim >= MIN_SSIM

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def compare(ours: npt.NDArray[np.uint8], reference: npt.NDArray[np.uint8], latent_error: float = 0.0) -> Quality:
    """Both [F, H, W, 3] uint8, of one shape."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    pairs = list(zip(ours.astype(np.float64), reference.astype(np.float64), strict=True))
    return Quality(
        psnr_db=min(psnr_db(a, b) for a, b in pairs),
        ssim=min(ssim(a, b) for a, b in pairs),
        mean_difference=float(np.mean([np.abs(a - b).mean() for a, b in pairs])),
        flicker=_flicker(ours) - _flicker(reference),
        latent_error=latent_error,
    )


def psnr_db(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """On 0 to 255; 100 for equal pictures."""
    error = float(((a - b) ** 2).mean())
    return 100.0 if error < 1e-10 else min(100.0, float(10 * np.log10(255.0**2 / error)))


def ssim(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Mean structural similarity of the luma planes, uniform window, as Wang et al. 2004 define it."""
    luma = np.array([0.299, 0.587, 0.114])
    x, y = a @ luma, b @ luma
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mean_x, mean_y = _window_mean(x), _window_mean(y)
    n = SSIM_WINDOW_PX**2
    unbias = n / (n - 1)
    var_x = unbias * (_window_mean(x * x) - mean_x**2)
    var_y = unbias * (_window_mean(y * y) - mean_y**2)
    cov = unbias * (_window_mean(x * y) - mean_x * mean_y)
    top = (2 * mean_x * mean_y + c1) * (2 * cov + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _window_mean(plane: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    size = min(SSIM_WINDOW_PX, *plane.shape)
    windows = np.lib.stride_tricks.sliding_window_view(plane, (size, size))
    return windows.mean(axis=(-1, -2))


def _flicker(frames: npt.NDArray[np.uint8]) -> float:
    if len(frames) < 2:
        return 0.0
    return float(np.abs(np.diff(frames.astype(np.float64), axis=0)).mean())
