// Undo: what a block has to put back, put back although interrupts come in between.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "bind.hpp"
#include "calls.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// Python raises what a signal handler raises between any two of its calls: within a `finally`,
// within the __enter__ or __exit__ of a class. It does not between an __enter__ or __exit__ in C
// and the block, nor on the way there. So these begin with the block and end with it, and what they
// call in the end is called again where an exception came in between.

// More interrupts than anybody sends while something short is called; an exception of the call's
// own comes each time.
constexpr int kAttempts = 16;

// Calls until nothing is raised; returns what was raised first.
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
        if (call.empty()) throw py::type_error("Undo needs something to call");
        function_ = call[0];
        arguments_ = call[py::slice(1, static_cast<py::ssize_t>(call.size()), 1)];
    }

    void leave() {
        const py::object raised =
            insist([this] { return PyObject_CallObject(function_.ptr(), arguments_.ptr()); });
        // A traceback may hold the block for as long as it likes, what was put back is let go of.
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
    py::class_<Undo>(module, "Undo",
                     "A context that calls something in the end, whatever has been raised within "
                     "it. Where an interrupt hits the call, it is called again, and the interrupt "
                     "goes on afterwards: so it must be able to be called twice.")
        .def(py::init<const py::args&>())
        .def("__enter__", [](const py::object& self) { return self; })
        .def("__exit__", [](Undo& self, const py::args&) { self.leave(); });

    py::class_<Within>(
        module, "Within",
        "A context that calls begin(), gives what that returns, and in the end calls "
        "end(what was raised, or None) as Undo does, also where begin() raised "
        "something. A lock is held meanwhile.")
        .def(py::init<py::object, py::object, py::object>(), py::arg("begin"), py::arg("end"),
             py::arg("lock") = py::none())
        .def("__enter__", &Within::enter)
        .def("__exit__", [](Within& self, const py::object&, const py::object& error,
                            const py::object&) { self.leave(error); });
}

}  // namespace pykern
