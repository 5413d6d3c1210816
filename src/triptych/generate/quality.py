"""How near two pictures are: PSNR, SSIM, mean absolute difference, flicker; and the gate of the step caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.core.errors import InvalidMedia, InvalidRequest

MIN_PSNR_DB = 28.0
MIN_SSIM = 0.95
SSIM_WINDOW_PX = 11
MAX_SCORE_LOSS_POINTS = 1.0


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
        return not gate_failures(self.psnr_db, self.ssim)


def gate_failures(psnr_db: float, ssim: float, score_loss_points: float = 0.0) -> list[str]:
    """What keeps a setting from passing, in words; empty when it passes. `score_loss_points`: of the task score, in
    points of a hundred."""
    failures = []
    if not psnr_db >= MIN_PSNR_DB:
        failures.append(f"PSNR {psnr_db:.1f} dB is below {MIN_PSNR_DB:g}")
    if not ssim >= MIN_SSIM:
        failures.append(f"SSIM {ssim:.3f} is below {MIN_SSIM:g}")
    if score_loss_points > MAX_SCORE_LOSS_POINTS:
        failures.append(f"the task score falls by {score_loss_points:.1f} points, more than {MAX_SCORE_LOSS_POINTS:g}")
    return failures


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
    """Mean structural similarity of two [H, W, 3] pictures as Wang et al. 2004 define it: Gaussian window of 11 px and
    sigma 1.5, where it lies inside the picture, over the three channels; by torchmetrics. Raises InvalidRequest where
    that is not installed, InvalidMedia below 11 px."""
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError as error:
        raise InvalidRequest("SSIM needs torchmetrics: pip install 'triptych[quality]'") from error
    if min(a.shape[:2]) < SSIM_WINDOW_PX:
        raise InvalidMedia(f"SSIM has a window of {SSIM_WINDOW_PX} px, the picture is {a.shape[1]}x{a.shape[0]}")
    x, y = (torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None] for picture in (a, b))
    _, by_place = structural_similarity_index_measure(x, y, sigma=1.5, data_range=255.0, return_full_image=True)
    edge = SSIM_WINDOW_PX // 2  # torchmetrics mirrors the picture there, the definition does not
    return float(by_place[..., edge:-edge, edge:-edge].mean())


def _flicker(frames: npt.NDArray[np.uint8]) -> float:
    if len(frames) < 2:
        return 0.0
    return float(np.abs(np.diff(frames.astype(np.float64), axis=0)).mean())
