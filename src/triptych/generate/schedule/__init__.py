"""Which rows take the next denoising step. Pure: no tensor, no clock, no thread."""

from triptych.generate.schedule.job import BatchKey, Job, StepPlan
from triptych.generate.schedule.scheduler import StepScheduler
from triptych.generate.schedule.sizer import BatchSizer, ShapeTimes, StepTable
from triptych.generate.schedule.way import ONE_WORKER, Way, ways_of

__all__ = [
    "ONE_WORKER",
    "BatchKey",
    "BatchSizer",
    "Job",
    "ShapeTimes",
    "StepPlan",
    "StepScheduler",
    "StepTable",
    "Way",
    "ways_of",
]
