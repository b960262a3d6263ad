"""torch.distributed.pipelining in one process: the same names over pykern's runtime.

A script for torchrun becomes a plain one by importing from here: see
docs/from-torchrun-pipelining.md.
"""

from . import ranks
from .chunks import TensorChunkSpec
from .ranks import run
from .schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from .stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "_PipelineScheduleRuntime",
    "get_schedule_class",
    "ranks",
    "run",
]
