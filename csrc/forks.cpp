#include "forks.hpp"

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "bind.hpp"
#include "ending.hpp"
#include "interpreter_lock.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

using Clock = std::chrono::steady_clock;

// For how long a fork waits. An action may take for ever, or may wait for what the thread that
// forks is about to do.
constexpr std::chrono::seconds kPatience{5};
// How often a waiting thread looks again. A mutex would have to be made anew in the child.
constexpr std::chrono::milliseconds kForkTick{1};

// How many threads are about to fork. Relaxed: the interpreter lock orders all changes, and a
// thread that has seen 0 without the lock looks again with it.
std::atomic<int> num_forking{0};

// The interpreter lock guards both.
int num_present = 0;
bool is_hasty = false;

bool is_forking() { return num_forking.load(std::memory_order_relaxed) > 0; }

void wait_a_little() { std::this_thread::sleep_for(kForkTick); }

void refuse_after_hasty_fork() {
    if (!is_hasty) return;
    throw std::runtime_error(
        "a pipeline cannot be made here: this process was forked while a step ran in another "
        "thread of its parent, and locks that the step held stay locked. Fork between steps, or "
        "start processes by spawn or forkserver");
}

// The face of Presence in Python, from its making on. The destructor ends it where an interrupt
// came before the block began.
class HoldForks {
   public:
    HoldForks() { Presence::of_this_thread().enter(); }
    HoldForks(const HoldForks&) = delete;
    HoldForks& operator=(const HoldForks&) = delete;
    ~HoldForks() { leave(); }

    void leave() {
        if (std::exchange(holds_, false)) Presence::of_this_thread().leave();
    }

   private:
    bool holds_ = true;
};

}  // namespace

Presence& Presence::of_this_thread() {
    thread_local Presence presence;
    return presence;
}

void Presence::enter() {
    if (depth_ == 0) {
        come_back(1);
    } else {
        ++depth_;
    }
}

void Presence::leave() {
    if (--depth_ == 0) give_up();
}

int Presence::leave_for_now() {
    give_up();
    return std::exchange(depth_, 0);
}

void Presence::come_back(int depth) {
    depth_ = depth;
    if (depth == 0) return;
    while (is_forking()) {
        const Unlocked unlocked;
        while (is_forking()) wait_a_little();
    }
    counts_ = true;
    ++num_present;
}

void Presence::give_up() {
    if (std::exchange(counts_, false)) --num_present;
}

void Presence::begin_fork() {
    num_forking.fetch_add(1, std::memory_order_relaxed);
    depth_at_fork_ = leave_for_now();
    const auto deadline = Clock::now() + kPatience;
    while (num_present > 0 && Clock::now() < deadline) {
        const Unlocked unlocked;
        wait_a_little();
    }
}

void Presence::end_fork_in_parent() {
    num_forking.fetch_sub(1, std::memory_order_relaxed);
    come_back(std::exchange(depth_at_fork_, 0));
}

void Presence::end_fork_in_child() {
    is_hasty = is_hasty || num_present > 0;
    num_present = 0;
    num_forking.store(0, std::memory_order_relaxed);
    Presence& here = of_this_thread();
    here.come_back(std::exchange(here.depth_at_fork_, 0));
}

void bind_forks(py::module_& module) {
    py::class_<HoldForks>(
        module, "HoldForks",
        "A context. From when it is made to its end, other threads wait with forks, "
        "some seconds at most.")
        .def(py::init<>())
        .def("__enter__", [](HoldForks&) {})
        .def("__exit__", [](HoldForks& self, const py::args&) { self.leave(); });
    module.def("refuse_after_hasty_fork", &refuse_after_hasty_fork,
               "Raises RuntimeError in a child whose fork has waited in vain for the end of a step "
               "in another thread.");
    py::module_::import("os").attr("register_at_fork")(
        py::arg("before") = py::cpp_function([] { Presence::of_this_thread().begin_fork(); }),
        py::arg("after_in_parent") =
            py::cpp_function([] { Presence::of_this_thread().end_fork_in_parent(); }),
        py::arg("after_in_child") = py::cpp_function([] {
            begin_anew_in_child();
            Presence::end_fork_in_child();
        }));
}

}  // namespace pykern
