#include "exec/kept_lock.hpp"

#include "exec/watchdog.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

std::string place(const Program& program, Position position) {
    const Action action = program.action(position);
    // Which batch has the slot is known to Python alone.
    const std::string cell = program.is_endless() ? "slot " : "microbatch ";
    const std::string of_stream = program.is_endless() ? " of the stream" : "";
    return "stage " + std::to_string(action.stage) + ", " + cell +
           std::to_string(action.microbatch) + of_stream + ", action " + to_text(action);
}

std::string of_device(const Program& program, Position position) {
    return to_text(program.action(position)) + " of device " +
           std::to_string(program.device_of(position));
}

std::string line_of(const Program& program, const Workers::Waiting& row) {
    std::string inputs;
    for (const Position input : row.inputs) {
        if (!inputs.empty()) inputs += ", ";
        inputs += of_device(program, input);
    }
    if (inputs.empty()) inputs = "the lock or a worker";
    return "device " + std::to_string(program.device_of(row.position)) + " waits for " + inputs +
           ", to go on with " + to_text(program.action(row.position)) + "\n";
}

}  // namespace

std::string tell_kept_lock(const Program& program, std::int64_t ns,
                           const std::vector<UnderWay>& acting,
                           const std::vector<Workers::Waiting>& rows) {
    std::string text = "pykern: a call in C has kept the interpreter lock for " + seconds(ns) +
                       ". Until the call returns, no Python code runs, and neither Ctrl-C nor "
                       "PipelineStalled can end the step\n";
    for (const UnderWay& one : acting) {
        const std::string how_long =
            one.ns > 0 ? " for " + seconds(one.ns) : " for at most " + seconds(ns);
        text += "device " + std::to_string(program.device_of(one.position)) + " is in " +
                place(program, one.position) + how_long + "\n";
    }
    if (acting.empty()) {
        text += "no stage is in an action: another thread of the program has made the call\n";
    }
    for (const Workers::Waiting& row : rows) text += line_of(program, row);
    return text + "Ctrl-\\ (SIGQUIT) ends the process\n";
}

}  // namespace pykern
