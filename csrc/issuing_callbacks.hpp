// Issuing callbacks: threads, one for each lane, issue a step to the streams of GPUs.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "callbacks.hpp"
#include "exec/issuing.hpp"
#include "exec/streams.hpp"
#include "worker_executor.hpp"

namespace pykern {

// The driver's calls need no interpreter lock, so that only the actions themselves have it.
class IssuingCallbacks final : public Callbacks, public StreamClient {
   public:
    explicit IssuingCallbacks(int num_lanes) : Callbacks(num_lanes, 0, nullptr) {}

    // The step that the workers run next. Both must live until its end.
    void begin_issue(Dispatch& dispatch, const IssuingProgram& program);
    // Throws what the driver or the watch has thrown in the step, if anything.
    void rethrow();

    // Nothing: see `enter`, `leave` and `run`.
    void resume(int /*worker*/) noexcept override {}
    void suspend(int /*worker*/) noexcept override {}
    bool enter(int worker) noexcept override;
    void leave(int worker) noexcept override;
    bool run(int worker, Position position) noexcept override;
    // Calls the action, on the worker of its lane.
    bool run(TaskNumber task, Transfers& transfers) noexcept override;

   private:
    template <class Call>
    auto with_lock(int worker, const Call& call);

    Dispatch* dispatch_ = nullptr;
    const IssuingProgram* program_ = nullptr;
    std::mutex mutex_;
    std::exception_ptr error_;  // the first; guarded by mutex_
};

// The threads, with what they call.
class Issuers {
   public:
    explicit Issuers(int num_lanes);

    std::unique_ptr<HeldClaim> claim() const { return WorkerExecutor::claim(executor_); }
    StreamClient& client() { return *callbacks_; }
    // Has the threads issue all tasks of the program by the dispatch. Returns what has failed;
    // throws what the driver or the watch has thrown.
    std::vector<Failure> issue(Dispatch& dispatch, IssuingProgram& program,
                               const CallsOfKinds& calls, const pybind11::object& carry);
    void close() { executor_->close(); }

   private:
    explicit Issuers(std::unique_ptr<IssuingCallbacks> callbacks, int num_lanes);

    IssuingCallbacks* callbacks_;
    std::shared_ptr<WorkerExecutor> executor_;  // has the callbacks
};

}  // namespace pykern
