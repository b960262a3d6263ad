"""Faults in how stalled steps are told, in streams that go from user to user, and in traces."""

from .mutant import mutants

WATCH = ("test_step_marks.cpp", "test_stream_watch.cpp")
# A step as one graph.
WHOLE = ("test_watched_graph.cpp",)
LASTING = ("test_lasting.cpp",)
TRACES = ("-n0", "tests/kineto/test_read.py")

OF_WATCH = (
    *mutants(
        "csrc/exec/step_marks.cpp",
        WATCH,
        ("if (taken_.exchange(true, std::memory_order_acquire)) return false;", "taken_ = true;"),
        ("cuda::driver::cuEventRecord(begin_[index(lane)].get(), lanes_->compute(lane));", ""),
        ("streams_[index(order_->tasks()[task].stream)]);", "streams_[0]);"),
        ("if (!is_cut_ || std::ranges::all_of(tails_, is_reached)) return true;", "return true;"),
        ("!seen_whole_ || !all_done ||", "!seen_whole_ ||"),
        (
            "!all_done || !all_have_begun()",
            "!all_done",
            "A lane's tasks come behind its begin; a lane without tasks is late with nothing.",
        ),
        ("host_since_ns_ == 0 || num_issued_ != before", "host_since_ns_ == 0"),
        (" || !is_oldest) {", ") {"),
        ("        ++row.at;\n        row.since_ns = 0;\n", "        ++row.at;\n"),
        (" || !lacking(stream).empty()) {", ") {"),
        ("    add(tail_since_ns_);\n", ""),
        ("    if (!seen_whole_) add(host_since_ns_);\n", ""),
        ("place_in_row_[task] < row.at", "place_in_row_[task] <= row.at"),
    ),
    *mutants(
        "csrc/exec/stream_watch.cpp",
        WATCH,
        ("        const AsideOfCaptures aside;\n", ""),
        ("        const cuda::CurrentContext current(steps_.front()->lanes().primary(0));\n", ""),
        ("            steps_.front()->release();\n", ""),
        ("            stalled_.store(true, std::memory_order_relaxed);\n", ""),
        ("steps_.size() - i - 1, now);", "steps_.size() - i, now);"),
    ),
    *mutants(
        "csrc/exec/stall_report.cpp",
        WATCH,
        ("for (const bool at_work : {true, false})", "for (const bool at_work : {false, true})"),
        ("if (step_.has_begun(lane)) continue;", ""),
        ('if (step_.is_at_tail()) return "what a failed action has issued";', ""),
    ),
    *mutants(
        "csrc/exec/stream_watch.cpp",
        WHOLE,
        ("if (!report_.empty()) step->give_up();", ""),
        ("        failed.cut();\n", ""),
        ("if (report_.empty()) release_all();", ""),
        ("for (const std::shared_ptr<StepMarks>& step : steps_) step->give_up();", ""),
    ),
    *mutants(
        "csrc/exec/step_marks.cpp",
        WHOLE,
        ("    what_ = issued;\n", ""),
    ),
    *mutants(
        "csrc/exec/step_graph.cpp",
        WHOLE,
        ("if (recorded_ == &marks) return;", ""),
        ("if (marks != nullptr) record_to(*marks);", ""),
        ("add_mark(graph, end,", "add_mark(graph, {},"),
        ("        marks->begin(lane);\n", ""),
        ("        marks->record_all(issued_);\n", ""),
        ("if (marks != nullptr) marks->finish();", ""),
        ("        watch->require_progress();\n", ""),
        ("[[maybe_unused]] const cuda::CUgraphExec kept = exec_.release();", ""),
    ),
    *mutants(
        "csrc/cuda/lasting.cpp",
        LASTING,
        (
            "Queue& queue = idle().streams[{device, use}];",
            "Queue& queue = idle().streams[{device, StreamUse::kCompute}];",
        ),
        ("idle().streams[{made->primary.device(), made->use}]", "idle().streams[{0, made->use}]"),
        ("push_back(std::move(owned))", "push_front(std::move(owned))"),
        ("if (!idle().is_here()) return nullptr;", ""),
        ("if (still_works(*next)) return", "if (still_works(*next) || true) return"),
    ),
    *mutants(
        "pykern/recorded/steps.py",
        TRACES,
        (
            "            places = (work.process, work.thread), work.process\n",
            "            places = (work.process,)\n",
        ),
    ),
    *mutants(
        "pykern/kineto/ranges.py",
        TRACES,
        ("            call = ranges.get(event.external)\n", "            pass\n"),
        (
            "calls.get(event.correlation) if event.correlation is not None else None",
            "calls.get(event.external)",
        ),
    ),
)
