#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>

#include "exec/trace.hpp"
#include "plans.hpp"

using namespace pykern;

TEST_CASE("the trace keeps the last steps, newest first") {
    const Program program(plan_of(Placement::linear(2), 1, {"0F0 0B0", "1F0 1B0"}));
    Trace trace(program.num_actions());
    CHECK(trace.size() == 0);
    CHECK_THROWS_AS(static_cast<void>(trace.timeline(program, 0)), std::out_of_range);
    for (std::int64_t step = 0; step < 11; ++step) {
        trace.begin();
        for (Position position = 0; position < 4; ++position) {
            const std::int64_t start = 1000 * step + std::int64_t{10} * position;
            trace.record(position, start, start + step + 1);
        }
        trace.end();
    }
    // A step in progress is not the last one yet.
    trace.begin();
    trace.record(0, 0, 99);
    CHECK(trace.size() == Trace::kSteps);
    for (std::size_t ago = 0; ago < Trace::kSteps; ++ago) {
        const Timeline timeline = trace.timeline(program, ago);
        const Span first = timeline.rows()[0][0];
        CHECK(first.start_ns == 0);
        CHECK(first.end_ns == static_cast<double>(11 - ago));
        CHECK(timeline.rows()[1][1].start_ns == 30);
    }
    CHECK_THROWS_AS(static_cast<void>(trace.timeline(program, Trace::kSteps)), std::out_of_range);
}

TEST_CASE("actions that did not run leave no span") {
    const Program program(plan_of(Placement::linear(2), 1, {"0F0 0B0", "1F0 1B0"}));
    Trace trace(program.num_actions());
    trace.begin();
    trace.record(0, 100, 150);
    trace.end();
    const Timeline timeline = trace.timeline(program, 0);
    CHECK(timeline.rows()[0].size() == 1);
    CHECK(timeline.rows()[1].empty());
    CHECK(timeline.makespan_ns() == 50);
}
