#include "bind.hpp"

namespace pykern {

void bind_plan(pybind11::module_&) {}

}  // namespace pykern
