#include "exec/issuing.hpp"

#include <cstddef>
#include <limits>
#include <utility>

namespace pykern {

namespace {

constexpr Position kNowhere = std::numeric_limits<Position>::max();

}  // namespace

IssuingProgram::IssuingProgram(const StreamJob& job) : program_(made(job)) {}

Program IssuingProgram::made(const StreamJob& job) {
    const StreamOrder& order = job.order();
    Program::Issued issued;
    position_of_.assign(order.tasks().size(), kNowhere);
    // By stream, in the order of the job: the rows of lanes come first.
    std::vector<std::vector<TaskNumber>> rows(static_cast<std::size_t>(order.num_streams()));
    for (const TaskNumber task : job.issued()) {
        rows[static_cast<std::size_t>(order.tasks()[task].stream)].push_back(task);
    }
    for (int stream = 0; stream < order.num_streams(); ++stream) {
        if (stream <= order.num_devices()) {
            issued.row_begin.push_back(static_cast<Position>(task_of_.size()));
        }
        for (const TaskNumber task : rows[static_cast<std::size_t>(stream)]) {
            position_of_[task] = static_cast<Position>(task_of_.size());
            task_of_.push_back(task);
            issued.actions.push_back(order.tasks()[task].action);
            issued.devices.push_back(order.device_of_stream(stream));
        }
    }
    if (order.num_streams() == order.num_devices()) {
        issued.row_begin.push_back(static_cast<Position>(task_of_.size()));
    }
    for (const std::vector<TaskNumber>& row : rows) {
        for (std::size_t i = 1; i < row.size(); ++i) {
            issued.edges.push_back({.from = position(row[i - 1]), .to = position(row[i])});
        }
    }
    for (const TaskNumber task : job.issued()) {
        for (const TaskNumber input : order.waits(task)) {
            // Another half has issued it before.
            if (position(input) == kNowhere) continue;
            issued.edges.push_back({.from = position(input), .to = position(task)});
        }
    }
    const Plan& plan = order.plan();
    return Program::issuing(plan.placement(), plan.num_slices(), std::move(issued));
}

}  // namespace pykern
