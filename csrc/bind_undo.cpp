// Undo: a block puts back what it has changed, although interrupts come in between.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "bind.hpp"
#include "calls.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// A signal handler may raise between any two calls of Python code: within a `finally`, or within
// the __enter__ or __exit__ of a class. Up to Python 3.13 it cannot raise between an __enter__ or
// __exit__ in C and the block; in 3.14 it can, behind the __enter__. So the contexts here begin
// with the block and end with it. At the end they call a function, and call it again where an
// exception came in between.

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

class Undo {
   public:
    explicit Undo(const py::args& call) {
        if (call.empty()) {
            throw py::type_error("Undo must get a function to call, got no arguments");
        }
        function_ = call[0];
        arguments_ = call[py::slice(1, static_cast<py::ssize_t>(call.size()), 1)];
    }

    void leave() {
        const py::object raised =
            insist([this] { return PyObject_CallObject(function_.ptr(), arguments_.ptr()); });
        // A traceback may keep this object alive, but not the function and its arguments.
        function_ = py::none();
        arguments_ = py::tuple();
        if (raised) raise_exception(raised);
    }

   private:
    py::object function_;
    py::tuple arguments_;
};

class Within {
   public:
    Within(py::object begin, py::object end, py::object lock)
        : begin_(std::move(begin)), end_(std::move(end)), lock_(std::move(lock)) {}

    py::object enter() {
        if (!lock_.is_none()) lock_.attr("acquire")();
        auto given = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(begin_.ptr()));
        if (given) return given;
        const py::object raised = fetch_exception();
        finish(raised);
        raise_exception(raised);
    }

    void leave(const py::object& error) {
        const py::object raised = finish(error);
        if (raised) raise_exception(raised);
    }

   private:
    py::object finish(const py::object& error) {
        py::object raised = insist([&] { return PyObject_CallOneArg(end_.ptr(), error.ptr()); });
        if (!lock_.is_none()) lock_.attr("release")();
        return raised;
    }

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
        .def("__enter__", [](const py::object& self) { return self; })
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
