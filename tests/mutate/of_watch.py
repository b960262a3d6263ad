"""Faults in how stalled steps are seen and told, and in streams that go from user to user."""

from .mutant import Mutant

WATCH = ("test_step_marks.cpp", "test_stream_watch.cpp")
# A step as one graph.
WHOLE = ("test_watched_graph.cpp",)
LASTING = ("test_lasting.cpp",)

OF_WATCH = (
    Mutant(
        "csrc/exec/step_marks.cpp",
        "if (taken_.exchange(true, std::memory_order_acquire)) return false;",
        "taken_ = true;",
        WATCH,
    ),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "cuda::driver::cuEventRecord(begin_[index(lane)].get(), lanes_->compute(lane));",
        "",
        WATCH,
    ),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "streams_[index(order_->tasks()[task].stream)]);",
        "streams_[0]);",
        WATCH,
    ),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "if (!is_cut_ || std::ranges::all_of(tails_, is_reached)) return true;",
        "return true;",
        WATCH,
    ),
    Mutant("csrc/exec/step_marks.cpp", "!seen_whole_ || !all_done ||", "!seen_whole_ ||", WATCH),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "!all_done || !all_have_begun()",
        "!all_done",
        WATCH,
        harmless="A lane's tasks come behind its begin; a lane without tasks is late with nothing.",
    ),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "host_since_ns_ == 0 || num_issued_ != before",
        "host_since_ns_ == 0",
        WATCH,
    ),
    Mutant("csrc/exec/step_marks.cpp", " || !is_oldest) {", ") {", WATCH),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "        ++row.at;\n        row.since_ns = 0;\n",
        "        ++row.at;\n",
        WATCH,
    ),
    Mutant("csrc/exec/step_marks.cpp", " || !lacking(stream).empty()) {", ") {", WATCH),
    Mutant("csrc/exec/step_marks.cpp", "    add(tail_since_ns_);\n", "", WATCH),
    Mutant("csrc/exec/step_marks.cpp", "    if (!seen_whole_) add(host_since_ns_);\n", "", WATCH),
    Mutant(
        "csrc/exec/step_marks.cpp",
        "place_in_row_[task] < row.at",
        "place_in_row_[task] <= row.at",
        WATCH,
    ),
    Mutant("csrc/exec/stream_watch.cpp", "        const AsideOfCaptures aside;\n", "", WATCH),
    Mutant(
        "csrc/exec/stream_watch.cpp",
        "        const cuda::CurrentContext current(steps_.front()->lanes().primary(0));\n",
        "",
        WATCH,
    ),
    Mutant("csrc/exec/stream_watch.cpp", "            steps_.front()->release();\n", "", WATCH),
    Mutant(
        "csrc/exec/stream_watch.cpp",
        "            stalled_.store(true, std::memory_order_relaxed);\n",
        "",
        WATCH,
    ),
    Mutant(
        "csrc/exec/stream_watch.cpp",
        "steps_.size() - i - 1, now);",
        "steps_.size() - i, now);",
        WATCH,
    ),
    Mutant(
        "csrc/exec/stall_report.cpp",
        "for (const bool at_work : {true, false})",
        "for (const bool at_work : {false, true})",
        WATCH,
    ),
    Mutant("csrc/exec/stall_report.cpp", "if (step_.has_begun(lane)) continue;", "", WATCH),
    Mutant(
        "csrc/exec/stall_report.cpp",
        'if (step_.is_at_tail()) return "what a failed action has issued";',
        "",
        WATCH,
    ),
    Mutant("csrc/exec/stream_watch.cpp", "if (!report_.empty()) step->give_up();", "", WHOLE),
    Mutant("csrc/exec/stream_watch.cpp", "if (report_.empty()) release_all();", "", WHOLE),
    Mutant(
        "csrc/exec/stream_watch.cpp",
        "for (const std::shared_ptr<StepMarks>& step : steps_) step->give_up();",
        "",
        WHOLE,
    ),
    Mutant("csrc/exec/step_marks.cpp", "    what_ = issued;\n", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "if (recorded_ == &marks) return;", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "if (marks != nullptr) record_to(*marks);", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "add_mark(graph, end,", "add_mark(graph, {},", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "        marks->begin(lane);\n", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "        marks->record_all(issued_);\n", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "if (marks != nullptr) marks->finish();", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "        marks.cut();\n", "", WHOLE),
    Mutant("csrc/exec/step_graph.cpp", "        watch->require_progress();\n", "", WHOLE),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "[[maybe_unused]] const cuda::CUgraphExec kept = exec_.release();",
        "",
        WHOLE,
    ),
    Mutant(
        "csrc/cuda/lasting.cpp",
        "Queue& queue = idle().streams[{device, use}];",
        "Queue& queue = idle().streams[{device, StreamUse::kCompute}];",
        LASTING,
    ),
    Mutant(
        "csrc/cuda/lasting.cpp",
        "idle().streams[{made->primary.device(), made->use}]",
        "idle().streams[{0, made->use}]",
        LASTING,
    ),
    Mutant(
        "csrc/cuda/lasting.cpp",
        "push_back(std::move(owned))",
        "push_front(std::move(owned))",
        LASTING,
    ),
    Mutant(
        "csrc/cuda/lasting.cpp",
        "if (!idle().is_here()) return nullptr;",
        "",
        LASTING,
    ),
    Mutant(
        "csrc/cuda/lasting.cpp",
        "if (still_works(*next)) return",
        "if (still_works(*next) || true) return",
        LASTING,
    ),
)
