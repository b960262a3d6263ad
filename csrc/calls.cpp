#include "calls.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>

#include "ending.hpp"
#include "exec/thread_numbers.hpp"
#include "interpreter_lock.hpp"
#include "plan/text.hpp"

namespace py = pybind11;

namespace pykern {

py::object fetch_exception() {
#if PY_VERSION_HEX >= 0x030C0000
    return py::reinterpret_steal<py::object>(PyErr_GetRaisedException());
#else
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return py::reinterpret_steal<py::object>(value);
#endif
}

void raise_exception(const py::object& exception) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw py::error_already_set();
}

void require_calls(const Placement& placement, int num_slices,
                   const std::array<bool, kNumKinds>& held, const CallsOfKinds& calls) {
    if (num_slices > 1) {
        throw std::invalid_argument("plan must have whole microbatches for callbacks, got " +
                                    std::to_string(num_slices) + " slices");
    }
    const int num_calls = placement.num_replicas() * placement.num_stages();
    for (std::size_t i = 0; i < kNumKinds; ++i) {
        const auto kind = static_cast<Kind>(i);
        if (!held[i]) continue;
        const auto found = calls.find(kind);
        const std::size_t given = found == calls.end() ? 0 : found->second.size();
        if (given == static_cast<std::size_t>(num_calls)) continue;
        throw std::invalid_argument("callbacks of kind " + std::string(kind_name(kind)) +
                                    " must be " + std::to_string(num_calls) +
                                    ", one for each stage of each replica, got " +
                                    std::to_string(given));
    }
}

namespace {

// How often a thread that waits for the end of a step looks for signals.
constexpr std::chrono::milliseconds kSignalTick{20};

// Relaxed: a child begins with one thread, which has written it.
std::atomic<int> forks{0};

}  // namespace

int num_forks() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    static_cast<void>(registered);
    return forks.load(std::memory_order_relaxed);
}

Claim::Claim() : num_forks_(num_forks()) {}

void Claim::take() {
    if (is_fork()) {
        throw std::runtime_error(
            "this pipeline was made in another process and does not survive a fork. Make a new one "
            "in the child");
    }
    stay_at_end();
    const std::scoped_lock lock(mutex_);
    if (closed_) throw std::runtime_error("the pipeline is closed" + why_);
    if (taken_by_ != std::thread::id()) {
        throw std::runtime_error(
            "the pipeline is already running a step: a stage, a hook or another thread called it "
            "again");
    }
    taken_by_ = std::this_thread::get_id();
    const pid_t caller = this_thread_number();
    if (!callers_.empty() && callers_.back() == caller) return;
    std::erase_if(callers_, [caller](pid_t each) { return each == caller || is_gone(each); });
    callers_.push_back(caller);
}

void Claim::release() {
    // Its lock may be held by a thread that stayed in the parent.
    if (is_fork()) return;
    const std::scoped_lock lock(mutex_);
    taken_by_ = std::thread::id();
    released_.notify_all();
}

void Claim::close(std::string why) {
    const std::scoped_lock lock(mutex_);
    // The first reason stays.
    if (!closed_) why_ = std::move(why);
    closed_ = true;
}

bool Claim::wait_a_little() {
    const Unlocked unlocked;
    std::unique_lock lock(mutex_);
    return released_.wait_for(lock, kSignalTick, [this] { return taken_by_ == std::thread::id(); });
}

py::object Claim::wait(const std::function<void(const py::object&)>& interrupt) {
    py::object raised;
    while (!wait_a_little()) {
        if (PyErr_CheckSignals() == 0) continue;
        if (raised) throw py::error_already_set();
        raised = fetch_exception();
        interrupt(raised);
    }
    return raised;
}

bool Claim::is_mine() {
    const std::scoped_lock lock(mutex_);
    return taken_by_ == std::this_thread::get_id();
}

std::vector<pid_t> Claim::callers() {
    if (is_fork()) return {};
    const std::scoped_lock lock(mutex_);
    std::erase_if(callers_, is_gone);
    return callers_;
}

}  // namespace pykern
