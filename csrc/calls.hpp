// Calls: what the executors have in common at Python's edge. Which callables a step needs, what it
// gives back where one fails, and who may run a step.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/action.hpp"
#include "plan/placement.hpp"

namespace pykern {

// The action that raised, its device, and the exception. An interrupt has no action and device -1.
using Failure = std::tuple<std::optional<Action>, int, pybind11::object>;
// Callables by kind; for each stage of each replica one, replica after replica.
using CallsOfKinds = std::map<Kind, std::vector<pybind11::object>>;

// Takes the exception that Python has raised, with its traceback.
pybind11::object fetch_exception();
// Throws it into Python again, as error_already_set.
[[noreturn]] void raise_exception(const pybind11::object& exception);

// Throws std::invalid_argument unless there are callables for all that such a plan holds, and they
// can run it.
void require_calls(const Placement& placement, int num_slices,
                   const std::array<bool, kNumKinds>& held, const CallsOfKinds& calls);

// How often this process and its ancestors have been forked: another number than before tells that
// this is a child, where no other thread than the one that has forked is left.
int num_forks();

// The right to be in a step: one thread at a time, in the process that made the executor.
class Claim {
   public:
    Claim();

    // Takes the executor for one step, before the caller touches anything that a step uses. Throws
    // std::runtime_error where that may not be.
    void take();
    void release();
    // No further step begins: the pipeline is closed, for this reason.
    void close(std::string why = "");
    // Waits until nobody is in a step, with the interpreter lock. Meanwhile Python handles its
    // signals: what the first one raises is given to `interrupt` and returned when the step is
    // over, the second ends the wait and is thrown.
    pybind11::object wait(const std::function<void(const pybind11::object&)>& interrupt);

    bool is_fork() const { return num_forks() != num_forks_; }
    // Whether the calling thread is in a step of this executor.
    bool is_mine();
    // The threads that have taken it and still run, by their numbers in the system.
    std::vector<pid_t> callers();

   private:
    bool wait_a_little();

    int num_forks_;
    std::mutex mutex_;
    std::condition_variable released_;
    std::thread::id taken_by_;    // no thread: free; guarded by mutex_
    bool closed_ = false;         // guarded by mutex_
    std::string why_;             // guarded by mutex_
    std::vector<pid_t> callers_;  // the last one last; guarded by mutex_
};

// A claim that is taken, as a context of Python: its end releases the claim, as does the destructor
// where an interrupt came before the block began.
class HeldClaim {
   public:
    explicit HeldClaim(std::shared_ptr<Claim> claim) : claim_(std::move(claim)) { claim_->take(); }
    HeldClaim(const HeldClaim&) = delete;
    HeldClaim& operator=(const HeldClaim&) = delete;
    ~HeldClaim() { release(); }

    void release() {
        if (claim_) std::exchange(claim_, nullptr)->release();
    }

   private:
    std::shared_ptr<Claim> claim_;  // null where it is released
};

}  // namespace pykern
