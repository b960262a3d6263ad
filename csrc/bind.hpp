// One bind function per part of the core. Python types stop in the files that define them.
#pragma once

#include <pybind11/pybind11.h>

namespace pykern {

void bind_plan(pybind11::module_& module);
void bind_exec(pybind11::module_& module);

}  // namespace pykern
