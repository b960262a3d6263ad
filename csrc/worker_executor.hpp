// Worker executor: a set of workers with their callbacks, as Python sees it, bound to one process.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "callbacks.hpp"
#include "calls.hpp"
#include "ending.hpp"
#include "exec/watchdog.hpp"
#include "exec/workers.hpp"

namespace pykern {

class WorkerExecutor final : public Closable {
   public:
    // Workers that run actions as Python calls.
    WorkerExecutor(int num_workers, double timeout_s);
    // Workers with other callbacks, for as many workers, which are made without a watchdog.
    WorkerExecutor(int num_workers, std::unique_ptr<Callbacks> callbacks);
    WorkerExecutor(const WorkerExecutor&) = delete;
    WorkerExecutor& operator=(const WorkerExecutor&) = delete;
    ~WorkerExecutor() override;

    static std::unique_ptr<HeldClaim> claim(const std::shared_ptr<WorkerExecutor>& self) {
        return std::make_unique<HeldClaim>(std::shared_ptr<Claim>(self, &self->claim_));
    }

    std::vector<Failure> run(WorkerProgram& job, CallsOfKinds calls, pybind11::object carry,
                             const pybind11::object& begun, const pybind11::object& stalled);
    bool is_short(const WorkerProgram& job) const;
    std::vector<Failure> run_short(WorkerProgram& job, CallsOfKinds calls);
    void feed(const WorkerProgram& job, int slot);
    void stop(const WorkerProgram& job, pybind11::object exception);
    void close();

    void close_at_end() noexcept override {
        close_silently([this] { close(); });
    }
    std::vector<pid_t> callers() override { return claim_.callers(); }

   private:
    void start();
    void watch(std::chrono::nanoseconds timeout);
    std::vector<Workers::Waiting> waiting(const std::vector<UnderWay>& under_way) const;
    std::vector<Failure> give_up(WorkerProgram& job, const pybind11::object& stalled);
    void renew_after(std::vector<Failure>& failures);
    void refuse_closed(const std::vector<Failure>& failures) const;
    void refuse_misfit(const Program& program, const CallsOfKinds& calls);

    int num_workers_;
    Claim claim_;
    bool gave_up_ = false;                  // closing, while a step goes on
    bool abandoned_ = false;                // by the step that ran last
    std::unique_ptr<Watchdog> watchdog_;    // with a timeout
    std::unique_ptr<Callbacks> callbacks_;  // after watchdog_, which it uses
    std::unique_ptr<Workers> workers_;      // after callbacks_, which its threads use
};

}  // namespace pykern
