"""Predicted costs of a step on many GPUs: data, tensor and pipeline parallel together.

Figures of data sheets go in and the planner's simulator runs the plan; nothing here was measured.
"""

from pykern.scale.choose import best, layouts
from pykern.scale.cluster import BY_NAME, DGX_A100, DGX_H100, DGX_H200, Cluster, Gpu, Link, Ring
from pykern.scale.job import Job
from pykern.scale.mesh import Layout, Mesh
from pykern.scale.of_box import cluster_of
from pykern.scale.predict import Prediction, planned, predict
from pykern.scale.straggler import Straggler, straggler
from pykern.scale.transformer import Part, Transformer

__all__ = [
    "BY_NAME",
    "DGX_A100",
    "DGX_H100",
    "DGX_H200",
    "Cluster",
    "Gpu",
    "Job",
    "Layout",
    "Link",
    "Mesh",
    "Part",
    "Prediction",
    "Ring",
    "Straggler",
    "Transformer",
    "best",
    "cluster_of",
    "layouts",
    "planned",
    "predict",
    "straggler",
]
