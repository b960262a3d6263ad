"""torch.distributed.pipelining in one process: the same names over pykern's runtime.

A script for torchrun becomes a plain one by importing from here: see
docs/from-torchrun-pipelining.md.
"""

from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from .. import follows_torch  # noqa: F401 - refuses an older torch
from . import ranks
from .pipe import Pipe, build_stage, pipeline
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
    "Pipe",
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
    "SplitPoint",
    "TensorChunkSpec",
    "_PipelineScheduleRuntime",
    "build_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
    "ranks",
    "run",
]
