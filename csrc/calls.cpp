#include "calls.hpp"

#include <unistd.h>

#include <stdexcept>
#include <string>

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

void require_calls(const Placement& placement, int num_slices,
                   const std::array<bool, kNumKinds>& held, const CallsOfKinds& calls) {
    if (num_slices > 1) {
        throw std::invalid_argument("the program cuts its microbatches into " +
                                    std::to_string(num_slices) +
                                    " slices, which callbacks do not take");
    }
    const int num_calls = placement.num_replicas() * placement.num_stages();
    for (std::size_t i = 0; i < kNumKinds; ++i) {
        const auto kind = static_cast<Kind>(i);
        if (!held[i]) continue;
        const auto found = calls.find(kind);
        const std::size_t given = found == calls.end() ? 0 : found->second.size();
        if (given == static_cast<std::size_t>(num_calls)) continue;
        throw std::invalid_argument(
            "the program needs " + std::to_string(num_calls) + " callbacks of kind " +
            kind_name(kind) + ", one for each stage of each replica, got " + std::to_string(given));
    }
}

Claim::Claim() : process_(getpid()) {}

bool Claim::is_fork() const { return getpid() != process_; }

void Claim::take() {
    if (is_fork()) {
        throw std::runtime_error(
            "this pipeline was made in another process and does not survive a fork; make a new one "
            "in the child");
    }
    const std::scoped_lock lock(mutex_);
    if (closed_) throw std::runtime_error("the pipeline is closed");
    if (taken_by_ != std::thread::id()) {
        throw std::runtime_error(
            "the pipeline is already running a step: a stage, a hook or another thread called it "
            "again");
    }
    taken_by_ = std::this_thread::get_id();
}

void Claim::release() {
    const std::scoped_lock lock(mutex_);
    taken_by_ = std::thread::id();
    released_.notify_all();
}

void Claim::close() {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
}

void Claim::wait() {
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return taken_by_ == std::thread::id(); });
}

bool Claim::is_mine() {
    const std::scoped_lock lock(mutex_);
    return taken_by_ == std::this_thread::get_id();
}

}  // namespace pykern
