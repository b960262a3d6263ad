"""The work of a stage: against published layer times, and by hand."""

from dataclasses import replace
from typing import Any

import pytest

from pykern.scale import DGX_A100, Cluster, Gpu, Job, Layout, Link, Mesh, Part, Transformer, predict
from pykern.scale.work import StageWork, works

# 22 billion parameters, four rows: Korthikanti et al., 2022, arXiv 2205.05198, table 3.
MODEL = Transformer(num_layers=48, width=6144, sequence=2048, vocabulary=51_200, heads=64)
SMALL = Transformer(num_layers=8, width=64, sequence=16, vocabulary=100, heads=4)
CLUSTER = Cluster(Gpu(1000.0, 0.5, 1e9, 10.0), 8, Link(100.0, 3.0), Link(10.0, 7.0), 5.0)


def layer(model: Transformer, cluster: Cluster, batch: int, tensor: int, **how: Any) -> StageWork:
    mesh = Mesh(cluster, Layout(1, tensor, 1))
    (work,) = works(Job(model, batch, batch, **how), mesh, [Part(model, 1, False, False)])
    return work


# Their table 4, in milliseconds: forward and backward.
@pytest.mark.parametrize(
    ("how", "forward", "backward", "error"),
    [
        ({}, 7.7, 11.9, 0.04),
        ({"sequence_parallel": True}, 7.2, 11.8, 0.03),
        ({"recompute": "layer"}, 7.7, 19.5, 0.02),
        ({"recompute": "scores"}, 7.7, 13.2, 0.07),
        ({"recompute": "scores", "sequence_parallel": True}, 7.2, 13.1, 0.06),
    ],
)
def test_a_layer_takes_about_what_was_measured(
    how: dict[str, Any], forward: float, backward: float, error: float
) -> None:
    found = layer(MODEL, DGX_A100, 4, 8, overlap_sums=True, **how)
    # The first forward is the one that gives the GPU its efficiency.
    assert found.forward_ns / 1e6 == pytest.approx(forward, abs=0.05)
    assert found.backward_ns / 1e6 == pytest.approx(backward, rel=error)


def test_scores_in_memory_are_read_and_written() -> None:
    fused = layer(replace(SMALL, heads=None), CLUSTER, 1, 2)
    found = layer(SMALL, CLUSTER, 1, 2)
    scores = 16 * 16 * 4 / 2
    assert found.forward - fused.forward == pytest.approx(scores * 9 / 10)
    assert found.backward - fused.backward == pytest.approx(scores * 11 / 10)
    assert found.weights == fused.weights
    again = layer(SMALL, CLUSTER, 1, 2, recompute="scores").again
    assert again == pytest.approx(found.scores + scores * 9 / 10)


def test_a_layer_that_is_computed_again_takes_a_forward_without_the_head() -> None:
    job, mesh = Job(SMALL, 1, recompute="layer"), Mesh(CLUSTER, Layout(1, 2, 1))
    parts = SMALL.parts(2)
    first, last = works(job, mesh, parts)
    assert first.again == pytest.approx(first.forward_ns)
    assert last.again == pytest.approx(first.forward_ns)
    plain = predict(replace(job, recompute="none"), CLUSTER, Layout(1, 2, 1), "gpipe")
    found = predict(job, CLUSTER, Layout(1, 2, 1), "gpipe")
    assert found.makespan_ns == pytest.approx(plain.makespan_ns + 2 * first.again)
    assert found.tensor_ns == pytest.approx(1.5 * plain.tensor_ns)


def test_memory_of_what_is_kept_is_that_of_the_papers() -> None:
    (whole,) = replace(MODEL, num_layers=1).parts(1)
    part, scores, width = replace(whole, has_head=False), 64 * 2048, 6144
    assert part.activation_bytes(1, 8) == 13 * width + 5 * scores / 8
    assert part.activation_bytes(1, 8, "scores") == 13 * width
    assert part.activation_bytes(1, 8, "scores", sequence_parallel=True) == 34 * width / 8
    assert part.activation_bytes(1, 8, "layer") == 2 * width
    job, layout = Job(SMALL, 4, recompute="layer"), Layout(1, 1, 1)
    found, plain = (predict(each, CLUSTER, layout, "gpipe") for each in (job, Job(SMALL, 4)))
    (all_layers,) = SMALL.parts(1)
    kept = 4 * (all_layers.activation_bytes(16, 1) - all_layers.activation_bytes(16, 1, "layer"))
    one = Part(SMALL, 1, False, False).activation_bytes(16, 1)
    assert plain.memory_bytes - found.memory_bytes == pytest.approx(kept - one)


def test_sums_of_a_backward_hide_behind_products_for_weight_gradients() -> None:
    slow = replace(CLUSTER, inside=Link(1.0, 3.0))
    for cluster in (CLUSTER, slow):
        plain = layer(SMALL, cluster, 8, 2)
        found = layer(SMALL, cluster, 8, 2, overlap_sums=True)
        hidden = min(plain.sums, plain.weights)
        assert plain.backward_ns - found.backward_ns == pytest.approx(hidden)
        assert found.forward_ns == plain.forward_ns
        # A backward that is split has no such products beside.
        assert found.input_ns == plain.input_ns
    gathered = layer(SMALL, CLUSTER, 8, 2, overlap_sums=True, sequence_parallel=True)
    assert gathered.shown == pytest.approx(gathered.sums / 2)


def test_sequence_parallel_shards_send_parts_and_norm_parts() -> None:
    job, layout = Job(SMALL, 1), Layout(1, 2, 2)
    plain = predict(job, CLUSTER, layout, "one_f_one_b")
    found = predict(replace(job, sequence_parallel=True), CLUSTER, layout, "one_f_one_b")
    message, others = 16 * 64 * 2, 8 * 64 * (22 + 34) * 16
    assert plain.makespan_ns - found.makespan_ns == pytest.approx(
        2 * message / 2 / 100 + others / 2 / 10
    )


def test_options_are_the_schedules() -> None:
    job, layout = Job(SMALL, 8), Layout(1, 1, 2)
    bubbles = [
        predict(job, CLUSTER, layout, name, options=options).bubble_ratio
        for name, options in (
            ("interleaved", {"num_chunks": 1}),
            ("interleaved", {}),
            ("interleaved", {"num_chunks": 4}),
            ("hanayo", {}),
            ("hanayo", {"waves": 2}),
        )
    ]
    assert bubbles[0] > bubbles[1] > bubbles[2]
    assert bubbles[3] > bubbles[4]
    with pytest.raises(TypeError, match="waves"):
        predict(job, CLUSTER, layout, "interleaved", options={"waves": 2})


def test_what_is_computed_again_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'scores' or 'layer'"):
        Job(SMALL, 8, recompute="everything")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads must be 1 to"):
        replace(SMALL, heads=0)
