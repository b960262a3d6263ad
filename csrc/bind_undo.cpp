// Undo: a block puts back what it has changed, although interrupts come in between.
#include <pybind11/pybind11.h>

#include <functional>
#include <stdexcept>
#include <utility>

#include "bind.hpp"
#include "calls.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// A signal handler may raise between any two calls of Python code: within a `finally`, or within
// the __enter__ or __exit__ of a class. It cannot raise between the block and an __exit__ in C. Up
// to Python 3.13 nor can it between an __enter__ in C and the block; in 3.14 it can, and Python
// then drops the context. So the contexts here end with the block, or else with their last
// reference. At the end they call a function, and call it again where an exception came in between.

// Nobody sends so many interrupts during a short call. An exception of the call itself comes at
// each attempt.
constexpr int kAttempts = 16;

// Calls until a call does not raise. Returns the first exception, if any.
template <class Call>
py::object insist(const Call& call) {
    py::object raised;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
        const auto result = py::reinterpret_steal<py::object>(call());
        if (result) break;
        py::object again = fetch_exception();
        if (!raised) raised = std::move(again);
    }
    return raised;
}

// At the end of an object that Python has dropped between its __enter__ and the block. The
// interrupt is on its way, and a further exception cannot be raised.
void leave_dropped(const std::function<void()>& leave) noexcept {
    try {
        leave();
    } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a context that was interrupted");
    }
}

class Undo {
   public:
    explicit Undo(const py::args& call) {
        if (call.empty()) {
            throw py::type_error("Undo must get a function to call, got no arguments");
        }
        function_ = call[0];
        arguments_ = call[py::slice(1, static_cast<py::ssize_t>(call.size()), 1)];
    }

    Undo(const Undo&) = delete;
    Undo& operator=(const Undo&) = delete;
    ~Undo() {
        if (entered_) leave_dropped([this] { leave(); });
    }

    void enter() { entered_ = true; }

    void leave() {
        entered_ = false;
        const py::object raised =
            insist([this] { return PyObject_CallObject(function_.ptr(), arguments_.ptr()); });
        // A traceback may keep this object alive, but not the function and its arguments.
        function_ = py::none();
        arguments_ = py::tuple();
        if (raised) raise_exception(raised);
    }

   private:
    bool entered_ = false;
    py::object function_;
    py::tuple arguments_;
};

class Within {
   public:
    Within(py::object begin, py::object end, py::object lock)
        : begin_(std::move(begin)), end_(std::move(end)), lock_(std::move(lock)) {}

    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;
    ~Within() {
        if (!entered_) return;
        leave_dropped(
            [this] { leave(py::module_::import("builtins").attr("KeyboardInterrupt")()); });
    }

    py::object enter() {
        if (!lock_.is_none()) lock_.attr("acquire")();
        auto given = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(begin_.ptr()));
        entered_ = static_cast<bool>(given);
        if (given) return given;
        const py::object raised = fetch_exception();
        finish(raised);
        raise_exception(raised);
    }

    void leave(const py::object& error) {
        entered_ = false;
        const py::object raised = finish(error);
        if (raised) raise_exception(raised);
    }

   private:
    py::object finish(const py::object& error) {
        py::object raised = insist([&] { return PyObject_CallOneArg(end_.ptr(), error.ptr()); });
        if (!lock_.is_none()) lock_.attr("release")();
        return raised;
    }

    bool entered_ = false;
    py::object begin_;
    py::object end_;
    py::object lock_;
};

}  // namespace

void bind_undo(py::module_& module) {
    py::class_<Undo>(
        module, "Undo",
        "A context that calls a function at its end, also after an exception. If an "
        "interrupt hits the call, the context calls the function again, and raises the "
        "interrupt afterwards. So a second call must be harmless.")
        .def(py::init<const py::args&>())
        .def("__enter__",
             [](py::object self) {
                 py::cast<Undo&>(self).enter();
                 return self;
             })
        .def("__exit__", [](Undo& self, const py::args&) { self.leave(); });

    py::class_<Within>(
        module, "Within",
        "A context that calls begin() and gives its result. At its end, or if begin() raises, "
        "the context calls end(exception or None) as Undo does. It holds the lock meanwhile.")
        .def(py::init<py::object, py::object, py::object>(), py::arg("begin"), py::arg("end"),
             py::arg("lock") = py::none())
        .def("__enter__", &Within::enter)
        .def("__exit__", [](Within& self, const py::object&, const py::object& error,
                            const py::object&) { self.leave(error); });
}

}  // namespace pykern
