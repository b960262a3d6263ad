// The extension's entry point: it calls the bind functions and does nothing else.
#include <pybind11/pybind11.h>

#include "bind.hpp"

PYBIND11_MODULE(core, module) {
    module.doc() = "The C++ core of pykern: plans, their checks, simulation, search and execution.";
    pykern::bind_plan(module);
    pykern::bind_lower(module);
    pykern::bind_costs(module);
    pykern::bind_timeline(module);
    pykern::bind_search(module);
    pykern::bind_undo(module);
    pykern::bind_landing(module);
    pykern::bind_exec(module);
    pykern::bind_forks(module);
    pykern::bind_cuda(module);
    pykern::bind_lanes(module);
    pykern::bind_streams(module);
    pykern::bind_build(module);
}

// In front of pybind11's own, which would wait for ever for the main interpreter's lock where this
// is another one.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming): Python asks for it
extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit_core();
    PyErr_SetString(PyExc_ImportError,
                    "pykern runs in the main interpreter only: import it there, not in a "
                    "subinterpreter, or use a process of its own");
    return nullptr;
}
