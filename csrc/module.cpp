// The extension's entry point: it calls the bind functions and does nothing else.
#include <pybind11/pybind11.h>

#include "bind.hpp"

PYBIND11_MODULE(_C, module) {
    module.doc() = "The C++ core of pykern: plans, their checks, simulation, search and execution.";
    pykern::bind_plan(module);
    pykern::bind_lower(module);
    pykern::bind_costs(module);
    pykern::bind_timeline(module);
    pykern::bind_search(module);
    pykern::bind_undo(module);
    pykern::bind_exec(module);
    pykern::bind_cuda(module);
    pykern::bind_streams(module);
}
