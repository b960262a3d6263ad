"""The one table of what a pipeline cannot be given together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from ..budget.budget import Budget
from ..parallel.data.refusals import refuse_foreign_loss
from ..partition.balance import Partition
from ..partition.layers import refuse_shared
from ..plan import Plan
from ..runtime.asynchronous.refusals import WHY, refuse_unversioned
from ..runtime.features.compiled import refuse_ties
from ..runtime.stage.replica import refuse_replicas, refuse_trained_loss
from .request import Request

# The name of a loss that is outside of the pipeline.
OUTSIDE = "gradients through the output"

# Levels at which a stage keeps all, or nothing but its input.
_WHOLE = (None, "none", "stage")


def _levels(recompute: object) -> Iterator[object]:
    """All that stand in an argument."""
    if isinstance(recompute, list | tuple):
        for part in recompute:
            yield from _levels(part)
    else:
        yield recompute


# Whether a request, with the plan that was chosen if it was, has an option in force.
OPTIONS: Mapping[str, Callable[[Request, Plan | None], bool]] = {
    "GPUs": lambda asked, _: asked.on_gpus,
    "CPU workers": lambda asked, _: not asked.on_gpus,
    "replicas": lambda asked, _: asked.replicas != 1,
    "a plan of replicas": lambda _, plan: plan is not None and plan.placement.num_replicas > 1,
    "capture": lambda asked, _: asked.capture is not False,
    "capture that has to be": lambda asked, _: asked.capture in (True, "step"),
    "threads that issue": lambda asked, _: asked.issue == "threads",
    "recompute": lambda asked, _: asked.recompute is not None,
    "a budget": lambda asked, _: isinstance(asked.recompute, Budget),
    "check_finite": lambda asked, _: asked.check_finite in ("grads", "activations"),
    "deferred_batch_norm": lambda asked, _: asked.deferred_batch_norm,
    "process_group": lambda asked, _: asked.process_group is not None,
    "optimizer": lambda asked, _: asked.optimizer is not None,
    "tensor_parallel": lambda asked, _: asked.tensor_parallel is not None,
    "verify": lambda asked, _: asked.verified is not None,
    "timeout": lambda asked, _: asked.timeout is not None,
    "compile": lambda asked, _: asked.compile is not False,
    "recompute of parts of a stage": lambda asked, _: any(
        level not in _WHOLE for level in _levels(asked.recompute)
    ),
    # An argument of `step`: see `refused_with`.
    "scaler": lambda *_: False,
    # In force where a loss is outside: see `refused_with`.
    OUTSIDE: lambda *_: False,
    # The loss that a call of `map` brings: see `refused_with`.
    "a loss of a call": lambda *_: False,
    # In force in a call of `profile`: see `refused_with`.
    "a profile": lambda *_: False,
}

_BESIDE_PEERS = (
    "verify must be False beside {name}, got {{asked.verify!r}}. The plain model of one process "
    "does not know the gradients of other processes. Verify the same model and schedule without "
    "{name}"
)
_NO_GRAPH = (
    "gradients do not come back through the output of this pipeline: {why}. Make a Pipeline "
    "without this option, or give it the loss (loss_fn=...) and call step()"
)
_NO_MAP = (
    "pipe.map must be called on a Pipeline without this option: {why}. Make another Pipeline, or "
    "give this one the loss (loss_fn=...) and call step()"
)
_NO_PROFILE = (
    "pipe.profile must be called on a Pipeline without this option: {why}. Profile the same model "
    "and schedule without it"
)
_NOT_COMPILED = (
    "compile must be False {where}, got {{asked.compile!r}}: {why}. Compile layers instead "
    "(layer.compile())"
)
_BESIDE_UPDATES = "{name} must be {known} here, got {{asked.{name}!r}}: " + WHY

# By two options, the message, with `asked` and `plan` to be filled in.
REFUSED: Mapping[tuple[str, str], str] = {
    **{
        ("optimizer", name): _BESIDE_UPDATES.format(name=name, known=known)
        for name, known in (
            ("capture", "False"),
            ("recompute", "None"),
            ("check_finite", "'off' or 'loss'"),
            ("deferred_batch_norm", "False"),
            ("process_group", "None"),
            ("replicas", "1"),
            ("tensor_parallel", "None"),
            ("verify", "False"),
            ("compile", "False"),
        )
    },
    ("optimizer", "GPUs"): (
        "devices must be CPU workers for schedules that update weights within a step, got GPUs"
    ),
    ("optimizer", "scaler"): (
        "scaler must be None in steps of AsyncPipeline, got one. A scaler goes with an "
        "optimizer.step() of yours"
    ),
    **{
        ("verify", name): _BESIDE_PEERS.format(name=name)
        for name in ("process_group", "tensor_parallel")
    },
    ("capture", "process_group"): (
        "capture must be False with process_group, got {asked.capture!r}. A captured step replays "
        "without Python, which starts the sums over processes"
    ),
    ("capture", "tensor_parallel"): (
        "capture must be False with tensor_parallel, got {asked.capture!r}. A captured step "
        "replays without Python, in which torch computes with DTensors"
    ),
    ("capture", "check_finite"): (
        "check_finite must be 'off' or 'loss' with capture, got {asked.check_finite!r}. A captured "
        "graph calls no Python to look at results of actions: use check_finite='loss', or "
        "capture=False"
    ),
    ("capture that has to be", "CPU workers"): (
        "capture must be False or 'auto' on CPU workers, which call every action, got "
        "{asked.capture!r}. Use GPUs"
    ),
    ("threads that issue", "CPU workers"): (
        "issue must be 'caller' on CPU workers, whose threads call the actions, got 'threads'. Use "
        "GPUs"
    ),
    ("threads that issue", "capture"): (
        "issue must be 'caller' with capture, got 'threads'. One call launches the graphs of an "
        "action: capture=False, or leave issue out"
    ),
    **{
        ("threads that issue", name): (
            f"issue must be 'caller' with {name}, got 'threads'. Processes must start their sums "
            "in the same order, and threads have no order among them"
        )
        for name in ("process_group", "tensor_parallel")
    },
    ("a budget", "tensor_parallel"): (
        "recompute must be levels with tensor_parallel, got a Budget. One process alone cannot "
        "measure shards: give levels, such as the `fitted` of a pipeline without shards"
    ),
    ("a plan of replicas", "tensor_parallel"): (
        "the plan must have one replica for tensor_parallel, got {plan.placement.num_replicas}, "
        "whose copies would be sharded over the groups of other devices"
    ),
    ("tensor_parallel", "scaler"): (
        "scaler must be None with tensor_parallel, got one. torch's GradScaler does not support "
        "DTensors of several groups: train in bfloat16, or in float32"
    ),
    **{
        (name, OUTSIDE): _NO_GRAPH.format(why=why)
        for name, why in (
            ("a plan of replicas", "its plan has several replicas, which a step adds up"),
            ("process_group", "it adds up the gradients of processes within a step"),
            ("tensor_parallel", "its shards run in processes that have to take the same steps"),
            ("optimizer", "its weights are updated within a step"),
            ("verify", "verify compares it with the plain model, which knows no loss outside"),
        )
    },
    **{
        (name, "a loss of a call"): _NO_MAP.format(why=why)
        for name, why in (
            ("a plan of replicas", "its replicas would call the function at the same time"),
            ("process_group", "all processes have agreed on the loss of the Pipeline"),
            ("tensor_parallel", "all processes have agreed on the loss of the Pipeline"),
            ("optimizer", "AsyncPipeline updates weights by its own loss"),
            ("verify", "verify compares losses of steps"),
            ("capture that has to be", "CUDA graphs replay the loss that was captured"),
        )
    },
    **{
        (name, "a profile"): _NO_PROFILE.format(why=why)
        for name, why in (
            ("optimizer", "AsyncPipeline updates weights within its steps"),
            ("tensor_parallel", "a shard cannot run alone in one process"),
        )
    },
    **{
        ("compile", name): _NOT_COMPILED.format(where=where, why=why)
        for name, where, why in (
            ("GPUs", "on GPUs", "compiled stages have run on CPU workers only"),
            ("a plan of replicas", "beside replicas", "a copy would run the original's code"),
            ("verify", "beside verify", "the plain model is not compiled, and rounds otherwise"),
            ("tensor_parallel", "beside tensor_parallel", "shards are computed in Python"),
            (
                "recompute of parts of a stage",
                "beside recompute of parts of a stage",
                "a compiled stage is one part, which recompute='stage' makes again",
            ),
            ("check_finite", "beside check_finite", "compiled code shows no layer's output"),
            (
                "deferred_batch_norm",
                "beside deferred_batch_norm",
                "compiled code has the running statistics of every microbatch",
            ),
        )
    },
}


def refuse_combinations(asked: Request, plan: Plan | None = None) -> None:
    """Raises ValueError for the first two options of a request that cannot be together.

    Args:
        asked: the request.
        plan: the plan that was chosen for it, where there is one by now.
    """
    for pair, message in REFUSED.items():
        if all(OPTIONS[option](asked, plan) for option in pair):
            raise ValueError(message.format(asked=asked, plan=plan))


def refused_with(what: str, asked: Request, plan: Plan | None = None) -> str | None:
    """The message for such a pipeline that is used with an option of calls; None if it may be."""
    found = (REFUSED.get((name, what)) for name, has in OPTIONS.items() if has(asked, plan))
    return next(filter(None, found), None)


def refuse_layers(
    asked: Request, plan: Plan, layers: Mapping[str, nn.Module], cut: Partition
) -> None:
    """Raises ValueError for layers, or a loss, that a request's options or its plan cannot have."""
    refuse_shared(layers, cut)
    if asked.compile:
        refuse_ties(layers, cut.stages)
    if asked.optimizer is not None:
        refuse_unversioned(layers, cut.stages, asked.loss_fn)
    if plan.placement.num_replicas > 1:
        refuse_replicas(layers)
        refuse_trained_loss(asked.loss_fn)
    if asked.process_group is not None:
        refuse_foreign_loss(asked.loss_fn, layers.values())
