"""Which rows take the next denoising step. Pure: no tensor, no clock, no thread."""

from triptych.generate.schedule.job import BatchKey, Job, StepPlan
from triptych.generate.schedule.scheduler import StepScheduler
from triptych.generate.schedule.sizer import BatchSizer

__all__ = ["BatchKey", "BatchSizer", "Job", "StepPlan", "StepScheduler"]
